# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's CUDA platform with omni-ep's ops."""

from collections.abc import Mapping
from typing import ClassVar

from vllm_omni.platforms.cuda.platform import CudaOmniPlatform as StockCudaOmniPlatform

from omni_ep.ops import HUNYUAN_FUSED_MOE
from omni_ep.platforms.interface import ExpertParallelPlatform


class CudaOmniPlatform(ExpertParallelPlatform, StockCudaOmniPlatform):
    """Everything but the ops is vLLM-Omni's; `is_cuda()` stays true."""

    omni_ep_platform = "cuda"
    diffusion_op_impls: ClassVar[Mapping[str, str]] = {
        HUNYUAN_FUSED_MOE: "omni_ep.platforms.gpu.fused_moe.GpuHunyuanFusedMoE",
    }
