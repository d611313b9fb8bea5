# SPDX-License-Identifier: Apache-2.0
"""What a run reports from inside its workers: memory and loading per rank, step times, tokens per expert.

vLLM-Omni puts a ``worker_extension_cls`` first among the worker's bases, and its methods can
be called over the engine's collective RPC.
"""

import resource
from typing import Any

import torch.distributed as dist
from torch import nn

#: vLLM keeps a layer's routed experts in a submodule of this name.
_ROUTED_EXPERTS = ".routed_experts."


def parameter_bytes(module: nn.Module) -> tuple[int, int]:
    """Bytes of all parameters and of the routed experts among them; shared storage counts once."""
    total = experts = 0
    for name, parameter in module.named_parameters():
        size = parameter.numel() * parameter.element_size()
        total += size
        if _ROUTED_EXPERTS in f".{name}":
            experts += size
    return total, experts


def of_every_rank(value: Any) -> list[Any]:
    """Each rank's value, in rank order; every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    from vllm_omni.diffusion.distributed.parallel_state import get_world_group

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=get_world_group().cpu_group)
    return values


class ExpertParallelWorkerExtension:
    """Mixed into every worker by ``omni_ep.painting``."""

    def omni_ep_report(self) -> dict[str, Any]:
        """Memory and loading of every rank, step times of the last picture; rank 0's answer is used.

        Returns:
            ``memory``: one entry per rank with ``rank``, ``expert_bytes``, ``parameter_bytes``
            and ``peak_rss_bytes``; ``loading``: one entry per rank with ``rank``, ``bytes_needed``,
            ``bytes_read``, ``bytes_skipped`` and ``seconds``, empty if vLLM-Omni loaded by itself;
            ``loading_warning``: a sentence or ``None``; ``step_seconds``: of rank 0; ``has_nan``: whether
            the last picture held NaN on any rank.
        """
        pipeline = self.model_runner.pipeline  # type: ignore[attr-defined]
        total, experts = parameter_bytes(pipeline)
        mine = {
            "rank": self.rank,  # type: ignore[attr-defined]
            "expert_bytes": experts,
            "parameter_bytes": total,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        loading = getattr(pipeline, "loading_report", None)
        answers = of_every_rank((mine, loading, getattr(pipeline.pipeline, "has_nan", False)))
        return {
            "memory": [memory for memory, _, _ in answers],
            "loading": [{"rank": memory["rank"], **loading} for memory, loading, _ in answers if loading],
            "loading_warning": getattr(pipeline, "loading_warning", None),
            "step_seconds": getattr(pipeline.pipeline, "step_seconds", []),
            "has_nan": any(has_nan for _, _, has_nan in answers),
        }

    def omni_ep_count_expert_load(self) -> None:
        """Count on every rank, from now on, how many tokens each expert gets."""
        self.model_runner.pipeline.count_expert_load()  # type: ignore[attr-defined]

    def omni_ep_expert_load(self) -> dict[str, Any]:
        """The counts of all ranks added up; every rank answers the same.

        Returns:
            ``layers``: numbers of the counted layers; ``counts``: [step][layer][expert], summed over
            the pictures since counting began, empty if no router has reported.
        """
        layers, mine = self.model_runner.pipeline.expert_load()  # type: ignore[attr-defined]
        counted = [counts for counts in of_every_rank(mine) if counts is not None]
        return {"layers": list(layers), "counts": sum(counted).tolist() if counted else []}
