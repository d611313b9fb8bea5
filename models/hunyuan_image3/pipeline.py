# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-3 for vLLM-Omni with expert parallelism, registered in place of stock.

With expert parallelism off this is vLLM-Omni's pipeline and its modules, bit for bit.
"""

from contextlib import nullcontext
from typing import Any

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.models.hunyuan_image3 import pipeline_hunyuan_image3 as stock
from vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3 import (
    get_hunyuan_image3_post_process_func,
    get_hunyuan_image_3_prefix_cache_func,
)

from omni_ep.models.hunyuan_image3 import patches, precision
from omni_ep.models.hunyuan_image3.denoising import EpText2ImagePipeline

__all__ = [
    "HunyuanImage3Pipeline",
    "get_hunyuan_image3_post_process_func",
    "get_hunyuan_image_3_pre_process_func",
    "get_hunyuan_image_3_prefix_cache_func",
]


def get_hunyuan_image_3_pre_process_func(od_config: OmniDiffusionConfig) -> Any:
    """vLLM-Omni's request preprocessing, configured without the checkpoint's code."""
    with patches.config_from_json(trust_remote_code=od_config.trust_remote_code):
        return stock.get_hunyuan_image_3_pre_process_func(od_config)


# The name is upstream's: TeaCache and the NPU platform look pipelines up by class name.
class HunyuanImage3Pipeline(stock.HunyuanImage3Pipeline):
    """vLLM-Omni's pipeline with omni-ep's MoE block, float32 on request, no remote code."""

    def __init__(self, od_config: OmniDiffusionConfig) -> None:
        expert_parallel = od_config.parallel_config.enable_expert_parallel
        moe_block = patches.expert_parallel_moe_block() if expert_parallel else nullcontext()
        with patches.config_from_json(trust_remote_code=od_config.trust_remote_code), moe_block:
            super().__init__(od_config)
        device_type = get_local_device().type
        self.runs_in_float32 = od_config.dtype == torch.float32
        if self.runs_in_float32:
            precision.keep_rotary_in_float32(self.model)
        if self.runs_in_float32 or device_type == "cpu":
            precision.run_vae_in_float32(self.vae, device_type)

    @property
    def pipeline(self) -> EpText2ImagePipeline:
        """The denoising loop; made on first use, like upstream's."""
        if self._pipeline is None:
            upstream = super().pipeline
            self._pipeline = EpText2ImagePipeline(model=self, scheduler=upstream.scheduler, vae=self.vae)
            self._pipeline.float32 = self.runs_in_float32
        return self._pipeline

    def forward_call(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of the transformer; in float32, upstream's bf16 autocast is off."""
        forward_call = super().forward_call
        if self.runs_in_float32:
            forward_call = precision.without_autocast(forward_call, self.device.type)
        return forward_call(*args, **kwargs)
