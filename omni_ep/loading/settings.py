# SPDX-License-Identifier: Apache-2.0
"""What a user may choose about loading: ``additional_config["omni_ep"]`` of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omni_ep.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingSettings:
    """How a rank loads.

    Attributes:
        check_weights: refuse weights that hold NaN or Inf; costs one more pass over every byte.
        filter_weights: read only what the rank owns. Off, vLLM-Omni reads everything itself, which is there
            to be compared with.
    """

    check_weights: bool = False
    filter_weights: bool = True

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None) -> LoadingSettings:
        """Read the engine's ``additional_config``; what else it holds is not ours.

        Raises:
            ConfigurationError: if a setting is not known or its value is not true or false.
        """
        chosen = (additional_config or {}).get("omni_ep") or {}
        known = [field.name for field in fields(cls)]
        if not isinstance(chosen, Mapping):
            raise ConfigurationError(
                f'additional_config["omni_ep"] must map {" and ".join(known)} to true or false, '
                f"got {chosen!r}"
            )
        for name, value in chosen.items():
            if name not in known:
                raise ConfigurationError(
                    f'additional_config["omni_ep"] has no setting {name!r}; it has {" and ".join(known)}'
                )
            if not isinstance(value, bool):
                raise ConfigurationError(
                    f'additional_config["omni_ep"]["{name}"] must be true or false, got {value!r}'
                )
        return cls(**chosen)
