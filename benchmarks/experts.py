# SPDX-License-Identifier: Apache-2.0
"""How much of a MoE block's time on CPU one expert-parallel rank needs, against one rank with all experts.

The experts are omni-ep's `GroupedCpuExperts`, called as vLLM's modular kernel calls them, with the
expert map of every rank of every EP size. No process group is made: what is measured is arithmetic, not
communication. Each rank sees all tokens, as it does after dispatch (or under TP, where nothing is
dispatched).

Two times per rank: the routed experts alone, and the block without its shared expert, which adds the gate
and the top-k routing. Both include picking the pairs that belong to the rank. All figures are medians of
interleaved repeats in this one process, so only their ratios mean something elsewhere. The number of
(token, slot) pairs is checked exactly; no time is.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from omni_ep.placement import ExpertPlacement

if TYPE_CHECKING:
    import torch

    from omni_ep.platforms.cpu.experts import GroupedCpuExperts

GOAL = 0.6
"""The share of the time of all experts that one EP=2 rank may take."""

MAX_RELATIVE_ERROR = 1e-5
"""Of the ranks' outputs, added up, against one rank with all experts."""


@dataclass
class Rank:
    """One rank's experts and what they took."""

    ep_size: int
    ep_rank: int
    experts: int
    pairs: int = 0
    experts_s: list[float] = field(default_factory=list)
    block_s: list[float] = field(default_factory=list)
    select_s: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """The median of every kind of time, in seconds."""
        return {
            f"median_{kind}": median(getattr(self, kind)) for kind in ("experts_s", "block_s", "select_s")
        }


class Block:
    """Weights of one MoE block and the steps of its forward. Shapes as in `omni_ep.platforms.cpu.experts`."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        generator = torch.Generator().manual_seed(args.seed)

        def normal(*shape: int) -> "torch.Tensor":
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        self.top_k = args.top_k
        self.tokens_TH = torch.randn((args.tokens, args.hidden), generator=generator)
        self.gate_EH = normal(args.experts, args.hidden)
        self.w13 = normal(args.experts, 2 * args.intermediate, args.hidden)
        self.w2 = normal(args.experts, args.hidden, args.intermediate)
        self.kernel = self._kernel(args)

    def _kernel(self, args: argparse.Namespace) -> "GroupedCpuExperts":
        import torch
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import (
            FUSED_MOE_UNQUANTIZED_CONFIG,
            FusedMoEConfig,
            FusedMoEParallelConfig,
            RoutingMethodType,
        )

        from omni_ep.platforms.cpu.experts import GroupedCpuExperts

        config = FusedMoEConfig(
            num_experts=args.experts,
            experts_per_token=args.top_k,
            hidden_dim=args.hidden,
            intermediate_size=args.intermediate,
            num_local_experts=args.experts,
            num_logical_experts=args.experts,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.float32,
        )
        return GroupedCpuExperts(config, FUSED_MOE_UNQUANTIZED_CONFIG)

    def route(self) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Gate and vLLM's CPU routing: weights and global expert ids, ``[T, K]``."""
        import torch.nn.functional as F
        from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

        logits = F.linear(self.tokens_TH, self.gate_EH)
        return select_experts(
            self.tokens_TH, logits, self.top_k, use_grouped_topk=False, renormalize=self.top_k > 1
        )

    def run_experts(
        self,
        local: range,
        expert_map: "torch.Tensor | None",
        weights_TK: "torch.Tensor",
        ids_TK: "torch.Tensor",
    ) -> "torch.Tensor":
        """The part of the routed experts' output that the rank with experts `local` adds, ``[T, H]``."""
        import torch
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        output = torch.empty_like(self.tokens_TH)
        nothing = self.tokens_TH.new_empty(0)
        self.kernel.apply(
            output=output,
            hidden_states=self.tokens_TH,
            w1=self.w13[local.start : local.stop],
            w2=self.w2[local.start : local.stop],
            topk_weights=weights_TK,
            topk_ids=ids_TK,
            activation=MoEActivation.SILU,
            global_num_experts=self.gate_EH.shape[0],
            expert_map=expert_map,
            a1q_scale=None,
            a2_scale=None,
            workspace13=nothing,
            workspace2=nothing,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return output


def timed(seconds: list[float], function: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = function()
    seconds.append(time.perf_counter() - started)
    return result


def expert_map_of(placement: ExpertPlacement, ep_rank: int) -> "torch.Tensor | None":
    """``[global experts]``, local slot or -1, as vLLM hands it to the experts; None on one rank."""
    import torch

    if placement.ep_size == 1:
        return None
    expert_map = torch.full((placement.num_experts,), -1, dtype=torch.int32)
    local = placement.local_experts(ep_rank)
    expert_map[local.start : local.stop] = torch.arange(len(local), dtype=torch.int32)
    return expert_map


def measure(args: argparse.Namespace, ep_sizes: list[int]) -> list[Rank]:
    """Time every rank of every EP size, one after the other, `args.repeats` times over.

    Raises:
        RuntimeError: pairs are missing or computed twice, or the ranks' outputs do not add up.
    """
    import torch

    from omni_ep.platforms.cpu.experts import local_pairs_by_expert

    block = Block(args)
    placements = {size: ExpertPlacement.linear(args.experts, size) for size in ep_sizes}
    ranks = [
        Rank(ep_size=size, ep_rank=rank, experts=placement.num_local)
        for size, placement in placements.items()
        for rank in range(size)
    ]
    weights_TK, ids_TK = block.route()
    whole = block.run_experts(range(args.experts), None, weights_TK, ids_TK)
    for repeat in range(args.repeats):
        sums = {size: torch.zeros_like(whole) for size in ep_sizes}
        for rank in ranks:
            placement = placements[rank.ep_size]
            local = placement.local_experts(rank.ep_rank)
            expert_map = expert_map_of(placement, rank.ep_rank)

            def whole_block(local: range = local, expert_map: Any = expert_map) -> "torch.Tensor":
                return block.run_experts(local, expert_map, *block.route())

            def experts_only(local: range = local, expert_map: Any = expert_map) -> "torch.Tensor":
                return block.run_experts(local, expert_map, weights_TK, ids_TK)

            def pairs_only(local: range = local, expert_map: Any = expert_map) -> Any:
                return local_pairs_by_expert(ids_TK, expert_map, len(local))

            before = block.kernel.pairs_computed
            sums[rank.ep_size] += timed(rank.experts_s, experts_only)
            rank.pairs = block.kernel.pairs_computed - before
            timed(rank.block_s, whole_block)
            timed(rank.select_s, pairs_only)
        for size, total in sums.items():
            error = float((total - whole).abs().max() / whole.abs().max())
            if not error <= MAX_RELATIVE_ERROR:
                raise RuntimeError(
                    f"the outputs of the EP={size} ranks add up to another result: {error:.1e}"
                )
        print(f"repeat {repeat + 1} of {args.repeats} done", file=sys.stderr, flush=True)
    for size in ep_sizes:
        pairs = sum(rank.pairs for rank in ranks if rank.ep_size == size)
        if pairs != args.tokens * args.top_k:
            raise RuntimeError(
                f"the EP={size} ranks computed {pairs} pairs; needed {args.tokens} tokens x top-{args.top_k} "
                f"= {args.tokens * args.top_k}"
            )
    return ranks


def summary(ranks: list[Rank], ep_size: int) -> dict[str, Any]:
    """Shares of one rank with all experts: of the slowest rank, and of the ranks added up."""

    def share(kind: str) -> dict[str, float]:
        alone = median(getattr(next(rank for rank in ranks if rank.ep_size == 1), kind))
        times = [median(getattr(rank, kind)) for rank in ranks if rank.ep_size == ep_size]
        return {"slowest_rank": max(times) / alone, "all_ranks": sum(times) / alone}

    return {"ep_size": ep_size, "experts_time": share("experts_s"), "block_time": share("block_s")}


def print_table(args: argparse.Namespace, ranks: list[Rank], summaries: list[dict[str, Any]]) -> None:
    print(
        f"{args.tokens} tokens, hidden {args.hidden}, {args.experts} experts top-{args.top_k}, expert "
        f"intermediate {args.intermediate}, float32, {args.threads} thread(s), median of {args.repeats}"
    )
    header = ("EP", "rank", "experts", "pairs", "pick pairs ms", "experts ms", "block ms")
    print("  ".join(f"{name:>13}" for name in header))
    for rank in ranks:
        times = [1e3 * median(seconds) for seconds in (rank.select_s, rank.experts_s, rank.block_s)]
        cells = [rank.ep_size, rank.ep_rank, rank.experts, rank.pairs, *(f"{value:.1f}" for value in times)]
        print("  ".join(f"{cell:>13}" for cell in cells))
    for entry in summaries:
        experts, block = entry["experts_time"], entry["block_time"]
        goal = f" (goal: at most {GOAL})" if entry["ep_size"] == 2 else ""
        print(
            f"EP={entry['ep_size']}: slowest rank takes {experts['slowest_rank']:.3f} of the routed experts' "
            f"time on one rank{goal}, {block['slowest_rank']:.3f} of the block's; all ranks together "
            f"{experts['all_ranks']:.3f} and {block['all_ranks']:.3f}"
        )
    print(f"pairs: every EP size computes exactly {args.tokens} x {args.top_k} = {args.tokens * args.top_k}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens that reach the experts")
    parser.add_argument("--hidden", type=int, default=1024, help="width of a token")
    parser.add_argument("--experts", type=int, default=64, help="routed experts over all ranks")
    parser.add_argument("--top-k", type=int, default=8, help="experts per token")
    parser.add_argument("--intermediate", type=int, default=512, help="width of one expert")
    parser.add_argument("--ep-sizes", type=int, nargs="+", default=[2, 4], help="EP sizes besides 1")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats; the median counts")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch and OpenMP")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument("--report", type=Path, default=None, metavar="FILE", help="write the figures as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    # Before torch is imported, which reads it once.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(args.threads)
    ep_sizes = sorted({1, *args.ep_sizes})
    load = os.getloadavg()[0]
    with torch.no_grad():
        ranks = measure(args, ep_sizes)
    summaries = [summary(ranks, size) for size in ep_sizes if size > 1]
    print_table(args, ranks, summaries)
    if args.report is not None:
        settings = {name: value for name, value in vars(args).items() if name != "report"}
        report = {
            "settings": settings,
            "ranks": [asdict(rank) | rank.medians() for rank in ranks],
            "shares": summaries,
            "goal": {"ep_size": 2, "experts_time": GOAL},
            "machine": {"cores": len(os.sched_getaffinity(0)), "load_average_1m": load},
            "versions": {name: version(name) for name in ("omni-ep", "vllm", "torch")},
        }
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
