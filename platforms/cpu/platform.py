# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni on CPU ranks: the platform class that makes EP runnable without an accelerator."""

import os
import resource
from collections.abc import Mapping
from typing import Any, ClassVar

import psutil
import torch
from vllm.config import VllmConfig
from vllm.config.kernel import IrOpPriorityConfig
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from omni_ep.platforms.cpu.vllm_platform import CpuVllmPlatform
from omni_ep.platforms.interface import ExpertParallelPlatform


class CpuOmniPlatform(ExpertParallelPlatform, OmniPlatform, CpuVllmPlatform):
    """vLLM-Omni's platform interface on vLLM's CPU platform.

    Memory methods count host memory: a rank's "device memory" is its process's share of the
    machine, so that vLLM-Omni's reports stay meaningful.
    """

    # vLLM-Omni has no CPU in its enumeration; OOT is its value for platforms like this one.
    _omni_enum = OmniPlatformEnum.OOT
    omni_ep_platform = "cpu"
    diffusion_op_impls: ClassVar[Mapping[str, str]] = {
        "hunyuan_fused_moe": "omni_ep.platforms.cpu.fused_moe.CpuHunyuanFusedMoE",
    }

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "omni_ep.platforms.cpu.worker.CpuDiffusionWorker"

    @classmethod
    def diffusion_executor_backend(cls) -> str:
        """The executor whose ranks share one set of imports."""
        return "omni_ep.platforms.cpu.executor.ForkserverDiffusionExecutor"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """SDPA, the only backend on CPU; another explicit choice is an error."""
        if selected_backend is not None and selected_backend.upper() != "TORCH_SDPA":
            raise ValueError(
                f"The {selected_backend.upper()} diffusion attention backend does not run on CPU; "
                "use TORCH_SDPA or leave the choice to the platform."
            )
        return "omni_ep.platforms.cpu.attention.CpuSdpaBackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        # Compiling costs minutes per rank and needs a compiler the machine may not have.
        return False

    @classmethod
    def is_available(cls) -> bool:
        # Asked before tensors are moved to `device_type` or memory peaks are reset.
        return True

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def get_device_count(cls) -> int:
        """Cores this process may run on; ranks beyond that share them."""
        return len(os.sched_getaffinity(0))

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Nothing runs asynchronously on CPU."""

    @classmethod
    def empty_cache(cls) -> None:
        """The host allocator returns memory by itself."""

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return float(psutil.Process().memory_info().rss)

    @classmethod
    def memory_reserved(cls, device: torch.device | int | None = None) -> int:
        return psutil.Process().memory_info().rss

    @classmethod
    def max_memory_reserved(cls, device: Any = None) -> int:
        # Linux reports the peak resident set in KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @classmethod
    def max_memory_allocated(cls, device: Any = None) -> int:
        return cls.max_memory_reserved(device)

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        """The operating system's peak cannot be reset by an unprivileged process."""

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return False

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> IrOpPriorityConfig:
        return IrOpPriorityConfig.with_default(["native"])
