# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's ROCm platform with omni-ep's ops."""

from collections.abc import Mapping
from typing import ClassVar

from vllm_omni.platforms.rocm.platform import RocmOmniPlatform as StockRocmOmniPlatform

from omni_ep.ops import HUNYUAN_FUSED_MOE
from omni_ep.platforms.interface import ExpertParallelPlatform


class RocmOmniPlatform(ExpertParallelPlatform, StockRocmOmniPlatform):
    """Everything but the ops is vLLM-Omni's; `is_rocm()` stays true."""

    omni_ep_platform = "rocm"
    diffusion_op_impls: ClassVar[Mapping[str, str]] = {
        HUNYUAN_FUSED_MOE: "omni_ep.platforms.gpu.fused_moe.GpuHunyuanFusedMoE",
    }
