# SPDX-License-Identifier: Apache-2.0
"""Puts a random checkpoint on disk so that its folder is either complete or not there."""

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from omni_ep.checkpoint.config_files import generation_config, model_config
from omni_ep.checkpoint.inventory import inventory, tensors
from omni_ep.checkpoint.spec import CheckpointSpec
from omni_ep.checkpoint.tokenizer import write_tokenizer
from omni_ep.checkpoint.weights import split_into_shards, write_shard
from omni_ep.errors import ConfigurationError

FORMAT_VERSION = 1
"""Raised whenever the same spec would give other bytes, so that a cached older folder is not taken for it."""

INDEX = "model.safetensors.index.json"
_JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def make_checkpoint(
    path: str | os.PathLike[str],
    spec: CheckpointSpec,
    progress: Callable[[int], object] | None = None,
) -> bool:
    """Makes the checkpoint folder `path`; parents are made as needed.

    The files are written to a hidden sibling folder, which is renamed when all are there. Any number of
    processes may make the same path at once: the first to finish provides the folder, the others discard
    theirs. A failure or an interrupt removes the sibling; only a killed process leaves one behind, named
    `.<name>.<random>.partial`.

    Args:
        path: the folder to make.
        spec: the sizes.
        progress: called with the number of weight bytes just written, tensor by tensor.

    Returns:
        True if this call made the folder, False if it was already there, complete and of the same spec.

    Raises:
        ConfigurationError: `path` exists and is something else, or `spec` has more shards than tensors.
        OSError: the folder cannot be written.
    """
    target = Path(path).absolute()
    names = [name for name, _ in tensors(spec)]
    if spec.num_shards > len(names):
        raise ConfigurationError(f"num_shards ({spec.num_shards}) must not exceed the {len(names)} tensors.")
    if _already_there(target, spec):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{secrets.token_hex(8)}.partial"
    partial.mkdir()
    try:
        _write_files(partial, spec, progress)
        try:
            # Renaming onto a folder with content fails, so a folder that appeared meanwhile is safe.
            partial.rename(target)
        except OSError:
            if not _already_there(target, spec):
                raise
            return False
        return True
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def missing_from(path: str | os.PathLike[str]) -> str | None:
    """What keeps the folder from being a complete checkpoint, as the end of a sentence; None if nothing does.

    Reads the JSON files and the shards' headers, which tell the files' lengths; no weights.
    """
    folder = Path(path)
    try:
        for name in (*_JSON_FILES, INDEX):
            json.loads((folder / name).read_bytes())
        placed: dict[str, str] = json.loads((folder / INDEX).read_bytes())["weight_map"]
        for shard in sorted(set(placed.values())):
            wanted = {name for name, file in placed.items() if file == shard}
            with safe_open(folder / shard, framework="numpy") as file:
                if wanted - set(file.keys()):
                    return f"{shard} lacks {min(wanted - set(file.keys()))}"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename or shard)).name} is missing"
    except NotADirectoryError:
        return "it is not a folder"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{name} cannot be read"
    except SafetensorError:
        return f"{shard} is damaged"
    return None


def _already_there(target: Path, spec: CheckpointSpec) -> bool:
    """Whether `target` is what would be made; raises if something else is in the way."""
    if not os.path.lexists(target):
        return False
    missing = missing_from(target)
    if missing is not None:
        raise ConfigurationError(
            f"{target} is not a complete checkpoint ({missing}): choose another folder or remove it."
        )
    if json.loads((target / INDEX).read_bytes())["metadata"].get("made_from") != _made_from(spec):
        raise ConfigurationError(
            f"{target} already holds another checkpoint: choose another folder or remove it."
        )
    return True


def _made_from(spec: CheckpointSpec) -> dict[str, Any]:
    """What determines every byte, as JSON gives it back (lists, not tuples)."""
    determined_by: dict[str, Any] = json.loads(json.dumps({"format_version": FORMAT_VERSION, **asdict(spec)}))
    return determined_by


def _write_files(folder: Path, spec: CheckpointSpec, progress: Callable[[int], object] | None) -> None:
    write_tokenizer(folder, spec.image_base_size)
    _write_json(folder / "config.json", model_config(spec))
    _write_json(folder / "generation_config.json", generation_config(spec))
    shards = split_into_shards(tensors(spec), spec.num_shards)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:04d}-of-{len(shards):04d}.safetensors"
        write_shard(folder / file, shard, spec, progress)
        weight_map.update({name: file for name, _ in shard})
    metadata = {"total_size": inventory(spec).bytes, "made_from": _made_from(spec)}
    _write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
