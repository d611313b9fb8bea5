# SPDX-License-Identifier: Apache-2.0
"""Layouts as one word: ``tp2*cfg2+ep``.

Factors are joined by ``*`` in any order: ``tp`` tensor parallel, ``sp`` Ulysses sequence parallel, ``ring``
ring sequence parallel, ``pp`` pipeline stages, ``cfg`` guidance branches, ``dp`` data parallel. ``+ep``
switches expert parallelism on; ``1`` alone is a single device.
"""

import re
from collections.abc import Mapping
from typing import Any

from omni_ep.config import RunRequest
from omni_ep.errors import ConfigurationError

FACTORS = {
    "tp": "tensor_parallel_size",
    "sp": "ulysses_degree",
    "ring": "ring_degree",
    "pp": "pipeline_parallel_size",
    "cfg": "cfg_parallel_size",
    "dp": "data_parallel_size",
}
"""Abbreviation to field of ``RunRequest``, in the order they are written."""

_SINGLE = "1"


def parse_layout(name: str) -> dict[str, Any]:
    """Fields of ``RunRequest`` that the name sets.

    Raises:
        ConfigurationError: if the name is not of the form above; it says which piece is wrong.
    """
    sizes, plus, suffix = name.strip().partition("+")
    if plus and suffix.strip() != "ep":
        raise ConfigurationError(f"layout {name!r} ends in +{suffix}; only +ep is known, as in tp2*cfg2+ep")
    fields: dict[str, Any] = {}
    for piece in [] if sizes.strip() == _SINGLE else sizes.split("*"):
        match = re.fullmatch(r"([a-z]+)([1-9]\d*)", piece.strip())
        if match is None or match[1] not in FACTORS:
            raise ConfigurationError(
                f"layout {name!r} has the piece {piece.strip()!r}; a piece is one of {', '.join(FACTORS)} "
                "and a number of ranks, as in tp2*cfg2+ep"
            )
        field = FACTORS[match[1]]
        if field in fields:
            raise ConfigurationError(f"layout {name!r} gives {match[1]} twice; give it once")
        fields[field] = int(match[2])
    if plus:
        fields["enable_expert_parallel"] = True
    return fields


def parse_layouts(text: str) -> dict[str, dict[str, Any]]:
    """Several names, separated by commas, each with its fields.

    Raises:
        ConfigurationError: if there is none, or one occurs twice or is malformed.
    """
    names = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not names:
        raise ConfigurationError("no layout was given; give names such as tp2+ep,cfg2+ep")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"a layout occurs twice in {text!r}; give each once")
    return {name: parse_layout(name) for name in names}


def layout_name(request: RunRequest) -> str:
    """The name of a request's layout; ``parse_layout`` reads it back."""
    sizes = [
        f"{factor}{getattr(request, field)}"
        for factor, field in FACTORS.items()
        if getattr(request, field) > 1
    ]
    return "*".join(sizes or [_SINGLE]) + ("+ep" if request.enable_expert_parallel else "")


def layout_flags(fields: Mapping[str, Any]) -> list[str]:
    """The same as command-line flags, such as ``--tensor-parallel-size 2``; sizes of 1 are left out."""
    flags = []
    for field in FACTORS.values():
        if fields.get(field, 1) > 1:
            flags += [f"--{field.replace('_', '-')}", str(fields[field])]
    return flags + (["--enable-expert-parallel"] if fields.get("enable_expert_parallel") else [])
