# SPDX-License-Identifier: Apache-2.0
"""Bytes on the wire of one MoE layer, by back-end.

"Bytes on the wire of a rank" are **the bytes it receives from other ranks**. What a rank keeps for itself
does not count. Ranks of one layout bring equally many tokens, so each sends as much as it receives.

| collective | received by one of n ranks |
|---|---|
| all-gather of s bytes per rank | (n - 1) s |
| reduce-scatter to s bytes per rank | (n - 1) s, the partial sums of its own rows |
| all-reduce of s bytes | 2 (n - 1) s / n, the volume of a ring: reduce-scatter, then all-gather |

Symbols: T tokens of a rank, H hidden size, k experts per token, b bytes per activation, D = SP x CFG x DP
ranks that hold different tokens, E experts. Activations travel unquantised, routing weights as float32 and
expert ids as int32 (``vllm/model_executor/layers/fused_moe/prepare_finalize/naive_dp_ep.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from omni_ep.geometry import MoEGeometry
from omni_ep.layout import ParallelLayout
from omni_ep.planner.workload import StepTokens

ALLGATHER = "allgather_reducescatter"
ALL_TO_ALL = "all_to_all"
TP_WITHOUT_EP = "tp_without_ep"
BACKENDS = (ALLGATHER, ALL_TO_ALL, TP_WITHOUT_EP)

ROUTING_BYTES = 8
"""Of one (token, slot) pair: a float32 weight and an int32 expert id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELayer:
    """What the traffic of one MoE layer depends on."""

    hidden_size: int
    num_experts: int
    top_k: int
    activation_bytes: int

    @property
    def token_bytes(self) -> int:
        """One token's activation: H b."""
        return self.hidden_size * self.activation_bytes

    @property
    def dispatched_bytes(self) -> int:
        """One token on its way to the experts: H b + 8 k."""
        return self.token_bytes + self.top_k * ROUTING_BYTES


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Received by each of ``ranks`` ranks in a ring all-reduce of ``size`` bytes."""
    return 2 * (ranks - 1) * size // ranks


def allgather_bytes(layer: MoELayer, token_counts: Sequence[int], rank: int, tp: int) -> int:
    """Allgather/reducescatter dispatch, and the one all-reduce over TP that ends the layer.

    ``sum of the others' tokens x (H b + 8 k) + (D - 1) x own tokens x H b + all-reduce(own tokens x H b)``

    Args:
        token_counts: tokens that each dispatch rank brings; they may differ.
        rank: position in the dispatch group.
        tp: tensor-parallel ranks.
    """
    mine = token_counts[rank]
    gathered = (sum(token_counts) - mine) * layer.dispatched_bytes
    scattered = (len(token_counts) - 1) * mine * layer.token_bytes
    return gathered + scattered + all_reduce_bytes(mine * layer.token_bytes, tp)


def chance_of_visit(layer: MoELayer, local_experts: int) -> Fraction:
    """Probability that a token needs a rank with ``local_experts`` experts, its k experts drawn evenly.

    ``1 - C(E - e, k) / C(E, k)``: the k experts of a token are different ones, so this is exact, not the
    approximation ``1 - (1 - e/E)^k``.
    """
    missed = comb(layer.num_experts - local_experts, layer.top_k)
    return 1 - Fraction(missed, comb(layer.num_experts, layer.top_k))


def all_to_all_bytes(layer: MoELayer, tokens: int, dispatch_ranks: int, ep_size: int, tp: int) -> int:
    """Expected for an all-to-all that sends each token once per destination rank, rounded down.

    Of the D ranks that hold different tokens, each of the D - 1 others receives a token if it holds one of
    the token's experts; it returns one partial sum. Routing is taken as even: it depends on the
    picture.

    ``T x P(visit) x (D - 1) x (H b + 8 k + H b) + 2 x 4 x (D - 1) + all-reduce(T x H b)``; the middle term is
    the int32 counts exchanged first, on the way out and for the way back.
    """
    others = dispatch_ranks - 1
    visits = tokens * others * chance_of_visit(layer, layer.num_experts // ep_size)
    counts = 2 * 4 * others
    moved = int(visits * (layer.dispatched_bytes + layer.token_bytes))
    return moved + counts + all_reduce_bytes(tokens * layer.token_bytes, tp)


def layer_traffic(
    layer: MoELayer, layout: ParallelLayout, tokens: int, *, fits_ep: bool = True
) -> dict[str, int | None]:
    """Bytes received per rank in one MoE layer, by back-end; the EP ones are None without ``fits_ep``."""
    dispatch_ranks = layout.ep_size // layout.tp
    counts = [tokens] * dispatch_ranks
    return {
        ALLGATHER: allgather_bytes(layer, counts, 0, layout.tp) if fits_ep else None,
        ALL_TO_ALL: all_to_all_bytes(layer, tokens, dispatch_ranks, layout.ep_size, layout.tp)
        if fits_ep
        else None,
        TP_WITHOUT_EP: all_reduce_bytes(tokens * layer.token_bytes, layout.tp),
    }


def attention_bytes(
    geometry: MoEGeometry, layout: ParallelLayout, tokens: StepTokens, activation_bytes: int
) -> int:
    """Received per rank in one attention layer: the TP all-reduce and Ulysses' all-to-alls.

    Ulysses exchanges query, key, value and output of the split part, keys and values repeated to the number
    of query heads (``hunyuan_image3_transformer.py:1218``), and gathers the prompt's output over its heads.
    """
    width = geometry.num_attention_heads // layout.tp * geometry.head_dim * activation_bytes
    reduced = all_reduce_bytes(tokens.total * geometry.hidden_size * activation_bytes, layout.tp)
    exchanged = 4 * (layout.sp - 1) * tokens.split * width // layout.sp
    gathered = (layout.sp - 1) * tokens.repeated * width // layout.sp
    return reduced + exchanged + gathered
