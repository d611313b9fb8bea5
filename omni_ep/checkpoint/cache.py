# SPDX-License-Identifier: Apache-2.0
"""The checkpoint `omni-ep parity` paints with when none is given: made once, kept in the user's cache."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from omni_ep.checkpoint.make import FORMAT_VERSION, make_checkpoint
from omni_ep.checkpoint.spec import CheckpointSpec

DEMONSTRATION = CheckpointSpec(
    num_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=16,
    top_k=4,
    moe_intermediate_size=256,
    image_base_size=128,
)
"""128x128 pictures, about 18 MB, two thirds of it experts; four KV heads leave room for TP2 with Ulysses2."""


def cache_folder() -> Path:
    """`$OMNI_EP_CACHE`, else `$XDG_CACHE_HOME/omni-ep`, else `~/.cache/omni-ep`."""
    if chosen := os.environ.get("OMNI_EP_CACHE"):
        return Path(chosen).expanduser()
    # The XDG specification has relative paths ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "omni-ep"


def default_checkpoint_path(spec: CheckpointSpec = DEMONSTRATION) -> Path:
    """Where `spec` is cached; a new spec or format has a new name, so nothing stale is ever read."""
    digest = sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder() / f"hunyuan-image3-random-v{FORMAT_VERSION}-{digest}"


def default_checkpoint(progress: Callable[[int], object] | None = None) -> Path:
    """The demonstration checkpoint's folder, made first if need be; see `make_checkpoint` for the rest."""
    path = default_checkpoint_path()
    make_checkpoint(path, DEMONSTRATION, progress)
    return path
