# SPDX-License-Identifier: Apache-2.0
"""The numbers of a mixture-of-experts model that expert parallelism depends on.

Model families name them differently and give some per layer. Reading them in one place, from the plain config
dictionary, lets validation and planning run before any weight is read and without importing the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_ep.errors import ConfigurationError

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
TOP_K_KEYS = ("moe_topk", "num_experts_per_tok", "moe_top_k", "top_k", "num_activated_experts")
INTERMEDIATE_KEYS = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
SKIPPED_LAYER_KEYS = ("moe_layer_num_skipped", "first_k_dense_replace")
LAYER_COUNT_KEYS = ("num_hidden_layers", "num_layers", "n_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEGeometry:
    """Shape of a (possibly dense) transformer. Widths are numbers of elements; tuples run over
    ``moe_layers``.

    A dense model has ``num_experts`` 0 or 1 and empty tuples.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    """Indices of the layers that have routed experts, ascending."""
    num_experts: int
    top_k: tuple[int, ...]
    hidden_size: int
    intermediate_sizes: tuple[int, ...]
    """Width of one routed expert."""
    num_shared_experts: tuple[int, ...]
    shared_intermediate_size: tuple[int, ...]
    """Width of all shared experts of a layer together; 0 where there are none."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def is_moe(self) -> bool:
        """Whether there is more than one expert to route between."""
        return self.num_experts > 1

    @property
    def expert_parameter_count(self) -> tuple[int, ...]:
        """Parameters of one routed expert, per MoE layer: ``3 * hidden * intermediate`` (gate, up, down)."""
        return tuple(3 * self.hidden_size * width for width in self.intermediate_sizes)

    @property
    def routed_parameters(self) -> int:
        """Of all routed experts: ``num_experts * sum over MoE layers (3 * hidden * intermediate)``."""
        return self.num_experts * sum(self.expert_parameter_count)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MoEGeometry:
        """Read a Hugging Face config dictionary, whatever its keys are called.

        ``text_config`` is looked into when the top level has no expert count of its own.

        Raises:
            ConfigurationError: if a needed key is missing or malformed, if experts are counted under a key
                that is not known, or if the number of experts differs between layers.
        """
        nested = config.get("text_config")
        if _find(config, EXPERT_COUNT_KEYS)[0] is None and isinstance(nested, Mapping):
            config = {**config, **nested}
        num_layers = _whole_number(config, LAYER_COUNT_KEYS)
        hidden_size = _whole_number(config, ("hidden_size",))
        heads = _whole_number(config, ("num_attention_heads",))
        moe_layers, num_experts = _experts(config, num_layers)
        num_shared, shared_width = _shared_experts(config, moe_layers, num_layers)
        top_k = _per_layer(config, TOP_K_KEYS, moe_layers, num_layers)
        for layer, k in zip(moe_layers, top_k, strict=True):
            if not 1 <= k <= num_experts:
                raise ConfigurationError(
                    f"layer {layer} routes each token to top-k={k} of {num_experts} experts; top-k must be "
                    f"between 1 and {num_experts}"
                )
        return cls(
            num_layers=num_layers,
            moe_layers=moe_layers,
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_sizes=_per_layer(config, INTERMEDIATE_KEYS, moe_layers, num_layers),
            num_shared_experts=num_shared,
            shared_intermediate_size=shared_width,
            num_attention_heads=heads,
            num_key_value_heads=_whole_number(config, ("num_key_value_heads",), default=heads),
            head_dim=_whole_number(config, ("head_dim", "attention_head_dim"), default=hidden_size // heads),
        )


def _find(config: Mapping[str, Any], keys: Sequence[str]) -> tuple[str | None, Any]:
    """First of ``keys`` that has a value, with the value."""
    return next(((key, config[key]) for key in keys if config.get(key) is not None), (None, None))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole_number(config: Mapping[str, Any], keys: Sequence[str], default: int | None = None) -> int:
    key, value = _find(config, keys)
    if key is None and default is not None:
        return default
    if key is None:
        raise ConfigurationError(f"the model config has none of the keys {', '.join(keys)}")
    if not _is_int(value) or value < 1:
        raise ConfigurationError(
            f"the model config's {key} must be a whole number of at least 1, got {value!r}"
        )
    return int(value)


def _spread(key: str, value: Any, num_layers: int) -> list[int]:
    """``value`` per layer of the model, whether it was given once or as a list."""
    if isinstance(value, (list, tuple)):
        if len(value) < num_layers:
            raise ConfigurationError(
                f"the model config's {key} lists {len(value)} values for {num_layers} layers; one per layer "
                "is needed"
            )
        values = list(value[:num_layers])
    else:
        values = [value] * num_layers
    for item in values:
        if not _is_int(item) or item < 0:
            raise ConfigurationError(f"the model config's {key} must hold whole numbers, got {item!r}")
    return values


def _per_layer(
    config: Mapping[str, Any], keys: Sequence[str], moe_layers: Sequence[int], num_layers: int
) -> tuple[int, ...]:
    if not moe_layers:
        return ()
    key, value = _find(config, keys)
    if key is None:
        raise ConfigurationError(
            f"the model config has experts but none of the keys {', '.join(keys)} that would complete them"
        )
    values = _spread(key, value, num_layers)
    return tuple(values[layer] for layer in moe_layers)


def _experts(config: Mapping[str, Any], num_layers: int) -> tuple[tuple[int, ...], int]:
    """``(layers that have experts, number of experts)``."""
    key, value = _find(config, EXPERT_COUNT_KEYS)
    if key is None:
        unknown = [
            name
            for name, item in config.items()
            if "expert" in name.lower() and item and (_is_int(item) or isinstance(item, (list, tuple)))
        ]
        if unknown:
            raise ConfigurationError(
                f"the model config mentions experts under {', '.join(sorted(unknown))} but gives their "
                f"number under none of the known keys {', '.join(EXPERT_COUNT_KEYS)}"
            )
        return (), 0
    counts = _spread(key, value, num_layers)
    skipped_key, skipped = _find(config, SKIPPED_LAYER_KEYS)
    first = 0 if skipped_key is None else _spread(skipped_key, skipped, num_layers)[0]
    layers = tuple(
        layer for layer in range(first, num_layers) if counts[layer] > 1 and _is_sparse(config, layer)
    )
    found = sorted({counts[layer] for layer in layers})
    if len(found) > 1:
        raise ConfigurationError(
            f"the model config's {key} gives different layers {' and '.join(map(str, found))} experts; "
            "expert parallelism needs the same number in every MoE layer"
        )
    return layers, found[0] if found else min(1, max(counts, default=0))


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Qwen's and DeepSeek's ways of leaving single layers dense; absent keys leave all layers sparse."""
    frequency = config.get("moe_layer_freq") or 1
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
        and (bool(frequency[layer]) if isinstance(frequency, (list, tuple)) else layer % frequency == 0)
    )


def _shared_experts(
    config: Mapping[str, Any], moe_layers: Sequence[int], num_layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``(shared experts, their joint width)`` per MoE layer.

    HunyuanImage3 counts them in ``num_shared_expert``, switches them with ``use_mixed_mlp_moe`` and makes
    each ``intermediate_size`` wide; DeepSeek counts ``n_shared_experts`` of ``moe_intermediate_size``; Qwen
    has one of ``shared_expert_intermediate_size``.
    """
    none = (0,) * len(moe_layers)
    key, value = _find(config, ("num_shared_expert", "n_shared_experts", "num_shared_experts"))
    own_width = _find(config, ("shared_expert_intermediate_size",))[1]
    if key is None:
        return (
            (none, none) if not own_width else ((1,) * len(moe_layers), (int(own_width),) * len(moe_layers))
        )
    if not moe_layers or not config.get("use_mixed_mlp_moe", key != "num_shared_expert"):
        return none, none
    counts = tuple(_spread(key, value, num_layers)[layer] for layer in moe_layers)
    if own_width:
        widths: tuple[int, ...] = (int(own_width),) * len(moe_layers)
    else:
        width_keys = ("intermediate_size",) if key == "num_shared_expert" else INTERMEDIATE_KEYS
        widths = _per_layer(config, width_keys, moe_layers, num_layers)
    return counts, tuple(count * width for count, width in zip(counts, widths, strict=True))
