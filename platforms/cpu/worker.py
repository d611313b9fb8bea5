# SPDX-License-Identifier: Apache-2.0
"""The diffusion worker on CPU: what the environment must hold before groups are made."""

import os

import torch
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

from omni_ep.platforms.cpu import patches
from omni_ep.platforms.cpu.layers import register_native_layers


class CpuDiffusionWorker(DiffusionWorker):
    """vLLM-Omni's worker; layers and environment fitted to CPU before anything is built."""

    def init_device(self) -> None:
        # vLLM's communicator reads this without a default once its shared-memory kernels exist
        # (cpu_communicator.py:244); every rank of one engine must name the same segment.
        os.environ.setdefault("VLLM_DIST_IDENT", f"omni-ep-{self.od_config.master_port}")
        # Nothing is compiled on CPU: it would need a C++ compiler and cost seconds per rank.
        torch.compiler.set_stance("force_eager")
        register_native_layers()
        patches.apply()
        super().init_device()
