# SPDX-License-Identifier: Apache-2.0
"""What ``config.json`` says a HunyuanImage-3.0 checkpoint must hold, held against its headers.

The transformer is checked whole: names, shapes and dtypes. VAE, vision tower and embedders are built by
upstream code from nested configs; their shapes are checked in the ranks, against the modules themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from omni_ep.errors import ConfigurationError
from omni_ep.geometry import MoEGeometry
from omni_ep.loading.headers import Checkpoint, TensorHeader
from omni_ep.loading.names import parse_expert, parse_layer

_CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FLOATS = ("BF16", "F16", "F32")
EXPERT_PARTS = ("gate_and_up_proj.weight", "down_proj.weight")

Shape = tuple[int, ...]


def expected_tensors(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Name and shape of every transformer tensor but the routed experts'."""
    geometry = MoEGeometry.from_config(config)
    hidden, heads, kv_heads = geometry.hidden_size, geometry.num_attention_heads, geometry.num_key_value_heads
    vocabulary = (int(config["vocab_size"]), hidden)
    expected: dict[str, Shape] = {"model.wte.weight": vocabulary, "model.ln_f.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        expected["lm_head.weight"] = vocabulary
    shared = dict(zip(geometry.moe_layers, geometry.shared_intermediate_size, strict=True))
    for layer in range(geometry.num_layers):
        prefix = f"model.layers.{layer}"
        expected[f"{prefix}.input_layernorm.weight"] = (hidden,)
        expected[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        expected[f"{prefix}.self_attn.qkv_proj.weight"] = ((heads + 2 * kv_heads) * geometry.head_dim, hidden)
        expected[f"{prefix}.self_attn.o_proj.weight"] = (hidden, heads * geometry.head_dim)
        if config.get("use_qk_norm"):
            expected[f"{prefix}.self_attn.query_layernorm.weight"] = (geometry.head_dim,)
            expected[f"{prefix}.self_attn.key_layernorm.weight"] = (geometry.head_dim,)
        if layer in shared:
            expected[f"{prefix}.mlp.gate.wg.weight"] = (geometry.num_experts, hidden)
        if width := shared.get(layer):
            expected[f"{prefix}.mlp.shared_mlp.gate_and_up_proj.weight"] = (2 * width, hidden)
            expected[f"{prefix}.mlp.shared_mlp.down_proj.weight"] = (hidden, width)
    return expected


def is_foreign(name: str, expected: Collection[str]) -> bool:
    """Whether no model of this config asks for a layer's tensor, as far as its name alone can tell.

    Biases and scales are left to the model, an expert's as well.

    Args:
        name: a tensor of the checkpoint.
        expected: names of ``expected_tensors``.
    """
    return (
        parse_layer(name) is not None
        and name.endswith(".weight")
        and name not in expected
        and not ((expert := parse_expert(name)) and is_expert_part(expert.leaf))
    )


def expert_shapes(geometry: MoEGeometry, layer: int) -> dict[str, Shape]:
    """Shape of each part of one routed expert, by the last part of its name."""
    width = geometry.intermediate_sizes[geometry.moe_layers.index(layer)]
    return {
        EXPERT_PARTS[0]: (2 * width, geometry.hidden_size),
        EXPERT_PARTS[1]: (geometry.hidden_size, width),
    }


def check_against_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose transformer is not the one that ``config`` describes.

    Quantized checkpoints (``quantization_config``) have packed shapes and dtypes of their own; for them only
    the presence of each expert is checked.

    Raises:
        ConfigurationError: a tensor is missing, or has another shape or dtype; the file and the expectation
            are named.
    """
    quantized = bool(config.get("quantization_config"))
    if not quantized:
        for name, shape in expected_tensors(config).items():
            header = checkpoint.tensors.get(name)
            if header is None:
                raise ConfigurationError(
                    f"{checkpoint.where} has no tensor {name} in any shard, config.json expects it with "
                    f"shape {list(shape)}; download the checkpoint again"
                )
            _check_shape(header, shape)
            _check_float(header)
    _check_experts(checkpoint, config, quantized)


def _check_experts(checkpoint: Checkpoint, config: Mapping[str, Any], quantized: bool) -> None:
    geometry = MoEGeometry.from_config(config)
    dtype = _CONFIG_DTYPES.get(str(config.get("torch_dtype") or config.get("dtype") or ""))
    present = expert_tensors(checkpoint, geometry.num_experts)
    for layer in geometry.moe_layers:
        for part, shape in expert_shapes(geometry, layer).items():
            projection = part.split(".")[0]
            for expert in range(geometry.num_experts):
                if quantized:
                    if (layer, expert, projection) not in present:
                        raise missing_expert(checkpoint, present, layer, expert, projection)
                    continue
                header = present.get((layer, expert, part))
                if header is None:
                    raise missing_expert(checkpoint, present, layer, expert, part)
                fused = _is_fused(header)
                _check_shape(header, (geometry.num_experts, *shape) if fused else shape)
                _check_float(header, dtype)
                if fused:
                    break


def _is_fused(header: TensorHeader) -> bool:
    name = parse_expert(header.name)
    return name is not None and name.expert is None


def is_expert_part(leaf: str) -> bool:
    """Whether this last part of an expert tensor's name is a weight's; a fused one's may lack ``.weight``."""
    return leaf in EXPERT_PARTS or f"{leaf}.weight" in EXPERT_PARTS


def expert_tensors(checkpoint: Checkpoint, num_experts: int) -> dict[tuple[int, int, str], TensorHeader]:
    """Headers by (layer, expert, part) and by (layer, expert, projection); a fused tensor is there once for
    each of its experts.

    Raises:
        ConfigurationError: an expert's part comes by itself and in a tensor of all experts.
    """
    found: dict[tuple[int, int, str], TensorHeader] = {}
    for header in checkpoint.tensors.values():
        name = parse_expert(header.name)
        if name is None:
            continue
        fused = name.expert is None
        leaf = name.leaf if "." in name.leaf else f"{name.leaf}.weight"
        # A header may claim any number of rows of no bytes.
        rows = min(header.shape[0], num_experts) if header.shape else 0
        for expert in range(rows) if fused else (name.expert or 0,):
            other = found.setdefault((name.layer, expert, leaf), header)
            if other is not header:
                raise ConfigurationError(
                    f"{header.file} holds {header.name}, {other.file.name} holds {other.name}: expert "
                    f"{expert} of layer {name.layer} comes twice, once was expected; remove what does not "
                    "belong to this checkpoint"
                )
            found.setdefault((name.layer, expert, leaf.split(".")[0]), header)
    return found


def missing_expert(
    checkpoint: Checkpoint,
    present: Mapping[tuple[int, int, str], TensorHeader],
    layer: int,
    expert: int,
    part: str,
) -> ConfigurationError:
    """The error for an expert's tensor that no shard holds; ``present`` is from ``expert_tensors``."""
    neighbours = {header.file.name for (other_layer, _, _), header in present.items() if other_layer == layer}
    shards = f" (layer {layer} is in {', '.join(sorted(neighbours))})" if neighbours else ""
    return ConfigurationError(
        f"layer {layer}, expert {expert}: no shard of {checkpoint.where} holds "
        f"model.layers.{layer}.mlp.experts.{expert}.{part}{shards}, config.json expects it; download the "
        "checkpoint again"
    )


def _check_shape(header: TensorHeader, shape: Shape) -> None:
    if header.shape != shape:
        raise ConfigurationError(
            f"{header.file} holds {header.name} with shape {list(header.shape)}, config.json expects "
            f"{list(shape)}; use the config.json that belongs to these weights"
        )


def _check_float(header: TensorHeader, dtype: str | None = None) -> None:
    allowed = (dtype,) if dtype else _FLOATS
    if header.dtype not in allowed:
        raise ConfigurationError(
            f"{header.file} holds {header.name} as {header.dtype}, {' or '.join(allowed)} was expected; use "
            "the config.json that belongs to these weights"
        )
