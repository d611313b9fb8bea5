# SPDX-License-Identifier: Apache-2.0
"""Every weight that vLLM-Omni allocates for HunyuanImage-3, from its ``config.json``.

Read off vLLM-Omni 0.30.0, below ``vllm_omni/``: ``diffusion/models/hunyuan_image3/`` (the docstrings name
the classes) and ``model_executor/models/hunyuan_image3/siglip2.py``. ``tests/e2e/test_planner_agrees.py``
holds it against running ranks, byte by byte.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omni_ep.geometry import MoEGeometry
from omni_ep.planner.weights import Part, Split, Weight

TIMESTEP_FREQUENCIES = 256
"""Inputs of a TimestepEmbedder (hunyuan_image3_transformer.py:3416)."""


def hunyuan_image3_weights(config: Mapping[str, Any], geometry: MoEGeometry) -> tuple[Weight, ...]:
    """All weights of the pipeline, in no particular order.

    Raises:
        KeyError: if a key is missing that upstream needs as well.
    """
    return (
        *_layers(config, geometry),
        *_embeddings(config),
        *_image_head(config),
        *_vae(config["vae"]),
        *_vit(config["vit"]),
        *_aligner(config["vit_aligner"]),
    )


def attention_weights(
    config: Mapping[str, Any], geometry: MoEGeometry, *, bias: bool, qk_norm: bool
) -> Iterator[Weight]:
    """Grouped-query attention of all layers and the two norms of each (HunYuanAttention, DecoderLayer)."""
    layers, hidden = geometry.num_layers, geometry.hidden_size
    query_rows = geometry.num_attention_heads * geometry.head_dim
    kv_rows = 2 * geometry.num_key_value_heads * geometry.head_dim
    part, kv_heads = Part.ATTENTION, geometry.num_key_value_heads
    yield Weight(part=part, rows=query_rows, columns=hidden, count=layers, split=Split.ROWS, quantizable=True)
    yield Weight(
        part=part,
        rows=kv_rows,
        columns=hidden,
        count=layers,
        split=Split.KV_ROWS,
        heads=kv_heads,
        quantizable=True,
    )
    yield Weight(
        part=part, rows=hidden, columns=query_rows, count=layers, split=Split.COLUMNS, quantizable=True
    )
    if bias:
        yield Weight(part=part, rows=query_rows, count=layers, split=Split.ROWS)
        yield Weight(part=part, rows=kv_rows, count=layers, split=Split.KV_ROWS, heads=kv_heads)
        yield Weight(part=part, rows=hidden, count=layers)
    if qk_norm:
        yield Weight(part=part, rows=geometry.head_dim, count=2 * layers)
    yield Weight(part=part, rows=hidden, count=2 * layers)


def expert_weights(geometry: MoEGeometry) -> Iterator[Weight]:
    """Routed experts, shared experts and gate of every MoE layer (HunYuanSparseMoeBlock)."""
    hidden, experts = geometry.hidden_size, geometry.num_experts
    for width, shared in zip(geometry.intermediate_sizes, geometry.shared_intermediate_size, strict=True):
        yield from mlp_weights(
            Part.ROUTED_EXPERTS, hidden, width, experts, (Split.EXPERT_ROWS, Split.EXPERT_COLUMNS)
        )
        if shared:
            yield from mlp_weights(Part.SHARED_EXPERTS, hidden, shared)
        yield Weight(part=Part.ROUTER, rows=experts, columns=hidden)


def mlp_weights(
    part: Part,
    hidden: int,
    width: int,
    count: int = 1,
    splits: tuple[Split, Split] = (Split.ROWS, Split.COLUMNS),
) -> Iterator[Weight]:
    """Gate and up projection as one matrix, and down projection."""
    yield Weight(part=part, rows=2 * width, columns=hidden, count=count, split=splits[0], quantizable=True)
    yield Weight(part=part, rows=hidden, columns=width, count=count, split=splits[1], quantizable=True)


def _layers(config: Mapping[str, Any], geometry: MoEGeometry) -> Iterator[Weight]:
    bias = bool(config.get("attention_bias") or config.get("bias"))
    yield from attention_weights(config, geometry, bias=bias, qk_norm=bool(config.get("use_qk_norm", False)))
    yield from expert_weights(geometry)
    dense_layers = geometry.num_layers - len(geometry.moe_layers)
    if dense_layers:
        width = config["intermediate_size"]
        yield from mlp_weights(Part.DENSE_MLP, geometry.hidden_size, width, dense_layers)


def _embeddings(config: Mapping[str, Any]) -> Iterator[Weight]:
    """Token embedding, final norm, and lm_head, an nn.Linear that every rank holds whole."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield Weight(part=Part.EMBEDDINGS, rows=vocabulary, columns=hidden, split=Split.VOCAB_ROWS)
    yield Weight(part=Part.EMBEDDINGS, rows=vocabulary, columns=hidden)
    yield Weight(part=Part.EMBEDDINGS, rows=hidden)


def _layer(part: Part, out: int, *fan_in: int, count: int = 1) -> Iterator[Weight]:
    """A replicated weight and its bias; without ``fan_in``, a norm's."""
    columns = 1
    for size in fan_in:
        columns *= size
    yield Weight(part=part, rows=out, columns=columns, count=count)
    yield Weight(part=part, rows=out, count=count)


def _image_head(config: Mapping[str, Any]) -> Iterator[Weight]:
    """Timestep embedders, patch embedding (UNetDown) and final layer (UNetUp)."""
    part, hidden = Part.IMAGE_HEAD, config["hidden_size"]
    waist, latent = config["patch_embed_hidden_dim"], config["vae"]["latent_channels"]
    embedders = 3 + bool(config.get("cfg_distilled")) + bool(config.get("use_meanflow"))
    yield from _layer(part, hidden, TIMESTEP_FREQUENCIES, count=embedders)
    yield from _layer(part, hidden, hidden, count=embedders)
    blocks = max(1, (config.get("patch_size") or 1) // 2)
    yield from _layer(part, waist, latent, 3, 3)
    for index in range(blocks):
        yield from _timed_block(waist, hidden if index + 1 == blocks else waist, hidden)
    for index in range(blocks):
        yield from _timed_block(hidden if index == 0 else waist, waist, hidden)
    yield from _layer(part, waist)
    yield from _layer(part, latent, waist, 3, 3)


def _timed_block(width_in: int, width_out: int, embedding: int) -> Iterator[Weight]:
    """ResBlock: two convolutions, scaled and shifted by the timestep embedding."""
    part = Part.IMAGE_HEAD
    yield from _layer(part, width_in)
    yield from _layer(part, width_out, width_in, 3, 3)
    yield from _layer(part, 2 * width_out, embedding)
    yield from _layer(part, width_out)
    yield from _layer(part, width_out, width_out, 3, 3)
    if width_in != width_out:
        yield from _layer(part, width_out, width_in, 1, 1)


def _vae(config: Mapping[str, Any]) -> Iterator[Weight]:
    """AutoencoderKLConv3D: encoder and decoder, both loaded for text to image."""
    part, channels = Part.VAE, list(config["block_out_channels"])
    latent, blocks = config["latent_channels"], config["layers_per_block"]
    spatial = config["ffactor_spatial"].bit_length() - 1
    temporal = config["ffactor_temporal"].bit_length() - 1
    yield from _layer(part, channels[0], config["in_channels"], 3, 3, 3)
    for level, width in enumerate(channels):
        yield from _resnet_blocks(width, blocks)
        if level < spatial:
            fold = 8 if level >= spatial - temporal else 4
            out = channels[level + 1] if config.get("downsample_match_channel", True) else width
            yield from _layer(part, out // fold, width, 3, 3, 3)
    yield from _vae_middle(channels[-1])
    yield from _layer(part, channels[-1])
    yield from _layer(part, 2 * latent, channels[-1], 3, 3, 3)

    channels.reverse()
    yield from _layer(part, channels[0], latent, 3, 3, 3)
    yield from _vae_middle(channels[0])
    for level, width in enumerate(channels):
        yield from _resnet_blocks(width, blocks + 1)
        if level < spatial:
            fold = 8 if level < temporal else 4
            out = channels[level + 1] if config.get("upsample_match_channel", True) else width
            yield from _layer(part, out * fold, width, 3, 3, 3)
    yield from _layer(part, channels[-1])
    yield from _layer(part, config["out_channels"], channels[-1], 3, 3, 3)


def _resnet_blocks(width: int, count: int) -> Iterator[Weight]:
    yield from _layer(Part.VAE, width, count=2 * count)
    yield from _layer(Part.VAE, width, width, 3, 3, 3, count=2 * count)


def _vae_middle(width: int) -> Iterator[Weight]:
    yield from _resnet_blocks(width, 2)
    yield from _layer(Part.VAE, width)
    yield from _layer(Part.VAE, width, width, count=4)


def _vit(config: Mapping[str, Any]) -> Iterator[Weight]:
    """Siglip2VisionTransformer."""
    part, hidden, layers = Part.VIT, config["hidden_size"], config["num_hidden_layers"]
    width = config["intermediate_size"]
    yield from _layer(part, hidden, config["num_channels"] * config["patch_size"] ** 2)
    yield Weight(part=part, rows=config["num_patches"], columns=hidden)
    yield Weight(part=part, rows=3 * hidden, columns=hidden, count=layers, split=Split.ROWS)
    yield Weight(part=part, rows=3 * hidden, count=layers, split=Split.ROWS)
    yield Weight(part=part, rows=hidden, columns=hidden, count=layers, split=Split.COLUMNS)
    yield Weight(part=part, rows=width, columns=hidden, count=layers, split=Split.ROWS)
    yield Weight(part=part, rows=width, count=layers, split=Split.ROWS)
    yield Weight(part=part, rows=hidden, columns=width, count=layers, split=Split.COLUMNS)
    yield Weight(part=part, rows=hidden, count=2 * layers)  # biases that a row-parallel layer keeps whole
    yield from _layer(part, hidden, count=2 * layers)
    yield from _layer(part, hidden)


def _aligner(config: Mapping[str, Any]) -> Iterator[Weight]:
    """LightProjector, from the vision tower's width to the transformer's."""
    yield from _layer(Part.VIT, config["n_embed"], config["input_dim"])
    if config["projector_type"] == "mlp_gelu":
        yield from _layer(Part.VIT, config["n_embed"], config["n_embed"], count=config["depth"] - 1)
