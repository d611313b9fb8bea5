# SPDX-License-Identifier: Apache-2.0
"""Whether the values of a ``config.json`` are of the kinds that everything after it takes for granted.

A hand-edited or half-written file is refused here with a sentence, before arithmetic meets a string.
:mod:`omni_ep.geometry` judges what it reads by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omni_ep.errors import ConfigurationError


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_count, value))


def _is_pair(value: object) -> bool:
    return _is_counts(value) and isinstance(value, list) and len(value) == 2


Kind = tuple[Callable[[object], bool], str]
COUNT: Kind = (_is_count, "a whole number of at least 1")
COUNTS: Kind = (_is_counts, "a list of whole numbers of at least 1")
PAIR: Kind = (_is_pair, "two whole numbers of at least 1")
OBJECT: Kind = (_is_object, "a JSON object")
NAMES: Kind = (_is_names, "a list of names")

KINDS: Mapping[str, Kind] = {
    "architectures": NAMES,
    "vocab_size": COUNT,
    "patch_size": COUNT,
    "image_base_size": COUNT,
    "patch_embed_hidden_dim": COUNT,
    "vae_downsample_factor": PAIR,
    "text_config": OBJECT,
    "vae": OBJECT,
    "vae.latent_channels": COUNT,
    "vae.block_out_channels": COUNTS,
    "vae.ffactor_spatial": COUNT,
    "vae.ffactor_temporal": COUNT,
    "vae.in_channels": COUNT,
    "vae.out_channels": COUNT,
    "vit": OBJECT,
    "vit.hidden_size": COUNT,
    "vit.intermediate_size": COUNT,
    "vit.num_hidden_layers": COUNT,
    "vit.num_attention_heads": COUNT,
    "vit.num_channels": COUNT,
    "vit.num_patches": COUNT,
    "vit.patch_size": COUNT,
    "vit_aligner": OBJECT,
    "vit_aligner.n_embed": COUNT,
    "vit_aligner.input_dim": COUNT,
    "vit_aligner.depth": COUNT,
}
"""What a value must be where its key is present, in a config of HunyuanImage-3."""

GENERAL: Mapping[str, Kind] = {key: KINDS[key] for key in ("architectures", "vocab_size", "text_config")}
"""The part of them that means the same in every model family."""

NULLABLE = frozenset(
    ("architectures", "patch_size", "image_base_size", "vae_downsample_factor", "text_config", "vit")
)
"""Keys that have a default, also in upstream, if they are ``null``."""

_ABSENT = object()


def check_types(config: Mapping[str, Any], where: str, kinds: Mapping[str, Kind] = KINDS) -> None:
    """Refuse a config of which a value is of the wrong kind.

    Args:
        config: contents of a ``config.json``.
        where: the file, for the message.
        kinds: what to check; ``GENERAL`` for another family's config.

    Raises:
        ConfigurationError: naming the first such key, its value and what it must be.
    """
    for path, (fits, wanted) in kinds.items():
        value: Any = config
        for key in path.split("."):
            value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is _ABSENT or (value is None and path in NULLABLE):
            continue
        if not fits(value):
            raise ConfigurationError(
                f"{where}: {path} must be {wanted}, got {value!r:.60}; download config.json again"
            )
