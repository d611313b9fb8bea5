# SPDX-License-Identifier: Apache-2.0
"""Bytes as people write and read them."""

import re

from omni_ep.errors import ConfigurationError

_FACTORS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def parse_bytes(text: str) -> int:
    """``80GiB``, ``32 GB``, ``1.5 TiB`` or ``1024B`` as a number of bytes.

    Raises:
        ConfigurationError: without a number, without a unit, or with an unknown one.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ConfigurationError(
            f"{text!r} is not an amount of memory; write a number and a unit, such as 80GiB or 32GB"
        )
    return int(float(match[1]) * factor)


def format_bytes(size: int) -> str:
    """``72.00 GiB``; under 1 KiB ``512 B``. A negative size keeps its sign."""
    for factor, unit in _STEPS:
        if abs(size) >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"
