# SPDX-License-Identifier: Apache-2.0
"""What a run reports from inside its workers: memory per rank and seconds per step.

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


class ExpertParallelWorkerExtension:
    """Mixed into every worker by ``omni_ep.painting``."""

    def omni_ep_report(self) -> dict[str, Any]:
        """Memory of every rank and the step times of the last picture; rank 0's answer is used.

        Returns:
            ``memory``: one entry per rank with ``rank``, ``expert_bytes``, ``parameter_bytes``
            and ``peak_rss_bytes``; ``step_seconds``: of rank 0.
        """
        pipeline = self.model_runner.pipeline  # type: ignore[attr-defined]
        total, experts = parameter_bytes(pipeline)
        mine = {
            "rank": self.rank,  # type: ignore[attr-defined]
            "expert_bytes": experts,
            "parameter_bytes": total,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        memory: list[Any] = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            from vllm_omni.diffusion.distributed.parallel_state import get_world_group

            memory = [None] * dist.get_world_size()
            dist.all_gather_object(memory, mine, group=get_world_group().cpu_group)
        return {"memory": memory, "step_seconds": getattr(pipeline.pipeline, "step_seconds", [])}
