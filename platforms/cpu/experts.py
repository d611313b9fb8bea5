# SPDX-License-Identifier: Apache-2.0
"""Routed experts on CPU: only the (token, slot) pairs whose expert lives on this rank.

Shape suffixes: T tokens after dispatch, K slots per token (top-k), P local pairs, H hidden,
I expert intermediate, E experts on this rank.
"""

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey


def local_pairs_by_expert(
    topk_ids_TK: torch.Tensor, expert_map: torch.Tensor | None, num_local_experts: int
) -> tuple[torch.Tensor, list[int]]:
    """Group the (token, slot) pairs of this rank's experts, expert by expert.

    Args:
        topk_ids_TK: global expert id of every slot; -1 for a slot without an expert.
        expert_map: ``[global experts]``, the local slot of each expert or -1; ``None`` when
            every expert is local.
        num_local_experts: E.

    Returns:
        ``pairs_P``, indices into the flattened ``[T * K]`` slots in expert order and, within
        an expert, in token order; and the number of pairs of each of the E experts.
    """
    ids = topk_ids_TK.reshape(-1).long()
    # vLLM marks a slot without an expert by id -1, which would index the map's last entry.
    local = ids if expert_map is None else torch.where(ids < 0, -1, expert_map.to(torch.long)[ids])
    kept = torch.nonzero(local >= 0).squeeze(1)
    order = torch.argsort(local[kept], stable=True)
    counts = torch.bincount(local[kept], minlength=num_local_experts)
    if counts.numel() != num_local_experts:
        raise ValueError(
            f"a slot is routed to local expert {counts.numel() - 1}, but this rank holds "
            f"{num_local_experts}; "
            "the expert map does not belong to these weights"
        )
    return kept[order], counts.tolist()


class GroupedCpuExperts(mk.FusedMoEExpertsModular):
    """vLLM modular-kernel experts in plain PyTorch; correct under any expert map.

    vLLM's own CPU experts call a kernel that the accelerator wheel lacks, and where the kernel
    exists they ignore ``expert_map`` and read out of bounds under EP
    (``fused_moe/experts/cpu_moe.py:242-288``).
    """

    #: (token, slot) pairs computed since the layer was made: the unit of expert arithmetic.
    pairs_computed: int = 0

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        # apply() has already weighted and summed the slots of every token.
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No scratch buffers of vLLM's are used; the output is ``[M, K]``."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write each token's weighted sum over its local experts.

        Args:
            output: ``[T, H]``, zero where no expert of a token is local.
            hidden_states: ``[T, H]``.
            w1: ``[E, 2I, H]``, gate rows first.
            w2: ``[E, H, I]``.
            topk_weights, topk_ids: ``[T, K]``.
            expert_map: ``[global_num_experts]`` or ``None``.

        The slots of a token are added up in float32, whatever the weights' dtype.
        """
        num_slots = topk_ids.shape[1]
        pairs_P, counts = local_pairs_by_expert(topk_ids, expert_map, w1.shape[0])
        self.pairs_computed += len(pairs_P)
        tokens_P = pairs_P // num_slots
        weights_P = topk_weights.reshape(-1)[pairs_P].float()
        total_TH = torch.zeros(hidden_states.shape, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            rows = tokens_P[start : start + count]
            weight = weights_P[start : start + count, None]
            x = hidden_states.index_select(0, rows)
            gate, up = F.linear(x, w1[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, w2[expert]).float()
            # A token meets an expert at most once, so rows are unique within this call.
            total_TH.index_add_(0, rows, y if apply_router_weight_on_input else y * weight)
            start += count
        output.copy_(total_TH)


class CpuUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's unquantized MoE method with the experts above (registered out of tree)."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        # Not super().__init__: it would ask vLLM's oracle, which offers the CPU kernels only.
        FusedMoEMethodBase.__init__(self, moe)
        supported, reason = GroupedCpuExperts.is_supported_config(
            GroupedCpuExperts, moe, None, None, GroupedCpuExperts.activation_format()
        )
        if not supported:
            raise NotImplementedError(f"omni-ep's CPU experts cannot run this MoE layer: {reason}")
        self.unquantized_backend = UnquantizedMoeBackend.CPU
        self.experts_cls = GroupedCpuExperts
