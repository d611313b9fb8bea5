# SPDX-License-Identifier: Apache-2.0
"""What is being planned: a checkpoint folder, a ``config.json``, or a preset."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omni_ep.config import SUPPORTED_ARCHITECTURES
from omni_ep.config_types import GENERAL, check_types
from omni_ep.errors import ConfigurationError
from omni_ep.geometry import MoEGeometry
from omni_ep.planner.hunyuan_image3 import hunyuan_image3_weights
from omni_ep.planner.precision import TORCH_NAMES
from omni_ep.planner.presets import PRESETS, preset
from omni_ep.planner.transformer import transformer_weights
from omni_ep.planner.weights import Weight

_WITHOUT_ATTENTION = ("lingbot-video-moe", "qwen3.6-35b-a3b-moe")
"""Presets whose attention is not the grouped-query kind their few figures would suggest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model as the planner sees it."""

    name: str
    config: Mapping[str, Any] = field(repr=False)
    geometry: MoEGeometry = field(repr=False)
    weights: tuple[Weight, ...] = field(repr=False)
    notes: tuple[str, ...]
    """What a reader must know: where figures come from, what is not counted."""
    dtype: str
    """Number format that the checkpoint is stored in, a name of ``PRECISIONS``."""
    is_hunyuan_image3: bool
    is_preset: bool = False

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts together."""
        return self.geometry.routed_parameters


def load_model(model: str) -> PlannedModel:
    """The model that a user names.

    Args:
        model: a folder with a ``config.json``, the path of one, or a preset's name.

    Raises:
        ConfigurationError: if it is none of these, or the config lacks a needed key.
    """
    path = Path(model)
    if model in PRESETS and not path.exists():
        chosen = preset(model)
        notes = [f"source: {chosen.source}", f"not checked: {chosen.unchecked}"]
        return replace(_planned(chosen.name, chosen.config, notes, chosen.dtype), is_preset=True)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            raise ConfigurationError(f"{file} is missing; give a checkpoint folder, config.json or preset")
        preset(model)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{file} is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{file} must hold a JSON object")
    check_types(config, str(file), GENERAL)
    if _is_hunyuan_image3(config):
        check_types(config, str(file))
    stored = config.get("torch_dtype") or config.get("dtype")
    return _planned(model, config, [f"source: {file}"], TORCH_NAMES.get(str(stored), "bf16"))


def _is_hunyuan_image3(config: Mapping[str, Any]) -> bool:
    return bool(set(config.get("architectures") or ()) & set(SUPPORTED_ARCHITECTURES))


def _planned(name: str, config: Mapping[str, Any], notes: list[str], dtype: str) -> PlannedModel:
    geometry = MoEGeometry.from_config(config)
    is_hunyuan = _is_hunyuan_image3(config)
    try:
        if is_hunyuan:
            weights = hunyuan_image3_weights(config, geometry)
        else:
            weights, missing = transformer_weights(
                config, geometry, count_attention=name not in _WITHOUT_ATTENTION
            )
            if missing:
                notes.append(f"not counted: {', '.join(missing)}")
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"the config of {name} lacks what the planner needs: {error}") from None
    return PlannedModel(
        name=name,
        config=config,
        geometry=geometry,
        weights=weights,
        notes=tuple(notes),
        dtype=dtype,
        is_hunyuan_image3=is_hunyuan,
    )
