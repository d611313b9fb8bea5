# SPDX-License-Identifier: Apache-2.0
"""Weights of mixture-of-experts transformers that omni-ep does not run yet.

What the config does not settle is left out and said, never guessed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omni_ep.geometry import MoEGeometry
from omni_ep.planner.hunyuan_image3 import attention_weights, expert_weights, mlp_weights
from omni_ep.planner.weights import Part, Split, Weight

_OTHER_ATTENTION = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "layer_types",
    "full_attention_interval",
)


def transformer_weights(
    config: Mapping[str, Any], geometry: MoEGeometry, *, count_attention: bool = True
) -> tuple[tuple[Weight, ...], list[str]]:
    """``(weights, what is not counted)``.

    Attention is grouped-query attention, or multi-head latent attention where the config has
    ``kv_lora_rank``; embeddings are counted where it has ``vocab_size``.
    """
    text = {**config, **(config.get("text_config") or {})}
    weights = list(expert_weights(geometry))
    missing = []
    dense = geometry.num_layers - len(geometry.moe_layers)
    if dense and text.get("intermediate_size"):
        weights += mlp_weights(Part.DENSE_MLP, geometry.hidden_size, text["intermediate_size"], dense)
    elif dense:
        missing.append(f"the {dense} layers without experts")
    if not count_attention or any(text.get(key) for key in _OTHER_ATTENTION):
        missing.append("attention")
    elif text.get("kv_lora_rank"):
        weights += _latent_attention(text, geometry)
    else:
        weights += attention_weights(text, geometry, bias=bool(text.get("attention_bias")), qk_norm=False)
    if text.get("vocab_size"):
        weights += _embeddings(text, geometry.hidden_size)
    else:
        missing.append("embeddings")
    return tuple(weights), missing


def _embeddings(config: Mapping[str, Any], hidden: int) -> Iterator[Weight]:
    """Token embedding and language-model head, each split by vocabulary, and the final norm."""
    tables = 1 if config.get("tie_word_embeddings") else 2
    yield Weight(
        part=Part.EMBEDDINGS, rows=config["vocab_size"], columns=hidden, count=tables, split=Split.VOCAB_ROWS
    )
    yield Weight(part=Part.EMBEDDINGS, rows=hidden)


def _latent_attention(config: Mapping[str, Any], geometry: MoEGeometry) -> Iterator[Weight]:
    """DeepSeek's multi-head latent attention: down-projections on every rank, heads split over TP."""
    part, layers, hidden = Part.ATTENTION, geometry.num_layers, geometry.hidden_size
    heads, latent = geometry.num_attention_heads, config["kv_lora_rank"]
    rope, nope, value = (config[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query_rank = config.get("q_lora_rank")
    if query_rank:
        yield Weight(part=part, rows=query_rank, columns=hidden, count=layers, quantizable=True)
        yield Weight(part=part, rows=query_rank, count=layers)
    yield Weight(
        part=part,
        rows=heads * (nope + rope),
        columns=query_rank or hidden,
        count=layers,
        split=Split.ROWS,
        quantizable=True,
    )
    yield Weight(part=part, rows=latent + rope, columns=hidden, count=layers, quantizable=True)
    yield Weight(part=part, rows=latent, count=layers)
    yield Weight(
        part=part,
        rows=heads * (nope + value),
        columns=latent,
        count=layers,
        split=Split.ROWS,
        quantizable=True,
    )
    yield Weight(
        part=part, rows=hidden, columns=heads * value, count=layers, split=Split.COLUMNS, quantizable=True
    )
    yield Weight(part=part, rows=hidden, count=2 * layers)
