# SPDX-License-Identifier: Apache-2.0
"""Which tensors the real HunyuanImage-3.0 layout holds, as arithmetic, without making a weight."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from omni_ep.checkpoint.spec import DTYPE_BYTES, CheckpointSpec, downsample_fold

Shape = tuple[int, ...]
Tensor = tuple[str, Shape]

VOCAB_SIZE = 320
"""256 bytes and 58 special tokens, rounded up to vLLM's padding of 64 rows."""

TIMESTEP_FREQUENCIES = 256
"""Sinusoid features of the timestep embedders, fixed in the model."""

# The vision tower only reads pictures; text to image loads it and leaves it alone, so it is kept small.
VIT_HIDDEN = 64
VIT_INTERMEDIATE = 128
VIT_LAYERS = 1
VIT_PATCH = 16
VIT_PATCHES = 16


@dataclass(frozen=True)
class Inventory:
    """Totals of a checkpoint: tensors, parameters and bytes; `expert_` counts routed experts only."""

    tensors: int
    parameters: int
    bytes: int
    expert_parameters: int
    expert_bytes: int


def inventory(spec: CheckpointSpec) -> Inventory:
    """The totals of `spec`, headers and JSON files not included."""
    sizes = [(name, prod(shape)) for name, shape in tensors(spec)]
    parameters = sum(size for _, size in sizes)
    experts = sum(size for name, size in sizes if ".mlp.experts." in name)
    width = DTYPE_BYTES[spec.dtype]
    return Inventory(len(sizes), parameters, parameters * width, experts, experts * width)


def tensors(spec: CheckpointSpec) -> tuple[Tensor, ...]:
    """Name and shape of every tensor, in the order in which the shards take them up.

    `qkv_proj` is interleaved per KV head (its query heads, one key head, one value head) and
    `gate_and_up_proj` holds up before gate, as in the published checkpoint; neither shows in the shapes.
    """
    return (
        *_transformer(spec),
        *_vae_encoder(spec),
        *_vae_decoder(spec),
        *_layer("vision_aligner.layers.0", spec.hidden_size, VIT_HIDDEN),
        *_layer("vision_aligner.layers.2", spec.hidden_size, spec.hidden_size),
        *_timestep_embedder("timestep_emb", spec.hidden_size),
        *_timestep_embedder("time_embed", spec.hidden_size),
        *_timestep_embedder("time_embed_2", spec.hidden_size),
        *_layer("patch_embed.model.0", spec.patch_embed_hidden_dim, spec.vae_latent_channels, 3, 3),
        *_timed_block("patch_embed.model.1", spec.patch_embed_hidden_dim, spec.hidden_size, spec.hidden_size),
        *_timed_block("final_layer.model.0", spec.hidden_size, spec.patch_embed_hidden_dim, spec.hidden_size),
        *_layer("final_layer.model.1.0", spec.patch_embed_hidden_dim),
        *_layer("final_layer.model.1.2", spec.vae_latent_channels, spec.patch_embed_hidden_dim, 3, 3),
        *_vision_model(),
    )


def _layer(name: str, out: int, *fan_in: int) -> Iterator[Tensor]:
    """A weight and its bias; without `fan_in`, a norm's."""
    yield f"{name}.weight", (out, *fan_in)
    yield f"{name}.bias", (out,)


def _transformer(spec: CheckpointSpec) -> Iterator[Tensor]:
    hidden, expert = spec.hidden_size, spec.moe_intermediate_size
    heads_dim = spec.num_attention_heads * spec.head_dim
    qkv_dim = heads_dim + 2 * spec.num_key_value_heads * spec.head_dim
    yield "model.wte.weight", (VOCAB_SIZE, hidden)
    yield "model.ln_f.weight", (hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.qkv_proj.weight", (qkv_dim, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads_dim)
        yield f"{prefix}.self_attn.query_layernorm.weight", (spec.head_dim,)
        yield f"{prefix}.self_attn.key_layernorm.weight", (spec.head_dim,)
        yield f"{prefix}.mlp.gate.wg.weight", (spec.num_experts, hidden)
        if spec.num_shared_experts:
            yield from _mlp(f"{prefix}.mlp.shared_mlp", hidden, expert * spec.num_shared_experts)
        for index in range(spec.num_experts):
            yield from _mlp(f"{prefix}.mlp.experts.{index}", hidden, expert)


def _mlp(name: str, hidden: int, intermediate: int) -> Iterator[Tensor]:
    yield f"{name}.gate_and_up_proj.weight", (2 * intermediate, hidden)
    yield f"{name}.down_proj.weight", (hidden, intermediate)


def _vae_encoder(spec: CheckpointSpec) -> Iterator[Tensor]:
    channels = spec.vae_block_channels
    yield from _layer("vae.encoder.conv_in", channels[0], 3, 3, 3, 3)
    for level, width in enumerate(channels):
        for block in range(spec.vae_layers_per_block):
            yield from _resnet_block(f"vae.encoder.down.{level}.block.{block}", width)
        if level + 1 < len(channels):
            out = channels[level + 1] // downsample_fold(level)
            yield from _layer(f"vae.encoder.down.{level}.downsample.conv", out, width, 3, 3, 3)
    yield from _vae_middle("vae.encoder.mid", channels[-1])
    yield from _layer("vae.encoder.norm_out", channels[-1])
    yield from _layer("vae.encoder.conv_out", 2 * spec.vae_latent_channels, channels[-1], 3, 3, 3)


def _vae_decoder(spec: CheckpointSpec) -> Iterator[Tensor]:
    channels = spec.vae_block_channels[::-1]
    yield from _layer("vae.decoder.conv_in", channels[0], spec.vae_latent_channels, 3, 3, 3)
    yield from _vae_middle("vae.decoder.mid", channels[0])
    for level, width in enumerate(channels):
        for block in range(spec.vae_layers_per_block + 1):
            yield from _resnet_block(f"vae.decoder.up.{level}.block.{block}", width)
        if level + 1 < len(channels):
            # Decoder level i undoes encoder level 3 - i.
            out = channels[level + 1] * downsample_fold(len(channels) - 2 - level)
            yield from _layer(f"vae.decoder.up.{level}.upsample.conv", out, width, 3, 3, 3)
    yield from _layer("vae.decoder.norm_out", channels[-1])
    yield from _layer("vae.decoder.conv_out", 3, channels[-1], 3, 3, 3)


def _vae_middle(name: str, width: int) -> Iterator[Tensor]:
    yield from _resnet_block(f"{name}.block_1", width)
    yield from _layer(f"{name}.attn_1.norm", width)
    for projection in ("q", "k", "v", "proj_out"):
        yield from _layer(f"{name}.attn_1.{projection}", width, width, 1, 1, 1)
    yield from _resnet_block(f"{name}.block_2", width)


def _resnet_block(name: str, width: int) -> Iterator[Tensor]:
    # Resampling changes the width before a level begins, so no block ever needs a `nin_shortcut`.
    for half in (1, 2):
        yield from _layer(f"{name}.norm{half}", width)
        yield from _layer(f"{name}.conv{half}", width, width, 3, 3, 3)


def _timestep_embedder(name: str, hidden: int) -> Iterator[Tensor]:
    yield from _layer(f"{name}.mlp.0", hidden, TIMESTEP_FREQUENCIES)
    yield from _layer(f"{name}.mlp.2", hidden, hidden)


def _timed_block(name: str, width_in: int, width_out: int, embedding: int) -> Iterator[Tensor]:
    """A residual block of 2-D convolutions, scaled and shifted by the timestep embedding."""
    yield from _layer(f"{name}.in_layers.0", width_in)
    yield from _layer(f"{name}.in_layers.2", width_out, width_in, 3, 3)
    yield from _layer(f"{name}.emb_layers.1", 2 * width_out, embedding)
    yield from _layer(f"{name}.out_layers.0", width_out)
    yield from _layer(f"{name}.out_layers.3", width_out, width_out, 3, 3)
    if width_in != width_out:
        yield from _layer(f"{name}.skip_connection", width_out, width_in, 1, 1)


def vision_heads(spec: CheckpointSpec) -> int:
    """As many heads as let TP reach the number of KV heads: the vision tower is split over TP, too."""
    return gcd(8, spec.num_key_value_heads)


def _vision_model() -> Iterator[Tensor]:
    yield from _layer("vision_model.embeddings.patch_embedding", VIT_HIDDEN, 3 * VIT_PATCH * VIT_PATCH)
    yield "vision_model.embeddings.position_embedding.weight", (VIT_PATCHES, VIT_HIDDEN)
    for layer in range(VIT_LAYERS):
        prefix = f"vision_model.encoder.layers.{layer}"
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _layer(f"{prefix}.self_attn.{projection}", VIT_HIDDEN, VIT_HIDDEN)
        yield from _layer(f"{prefix}.layer_norm1", VIT_HIDDEN)
        yield from _layer(f"{prefix}.layer_norm2", VIT_HIDDEN)
        yield from _layer(f"{prefix}.mlp.fc1", VIT_INTERMEDIATE, VIT_HIDDEN)
        yield from _layer(f"{prefix}.mlp.fc2", VIT_HIDDEN, VIT_INTERMEDIATE)
    yield from _layer("vision_model.post_layernorm", VIT_HIDDEN)
