# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-3 for vLLM-Omni with expert parallelism, registered in place of stock.

With expert parallelism off this is vLLM-Omni's pipeline and its modules, bit for bit.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.models.hunyuan_image3 import pipeline_hunyuan_image3 as stock
from vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3 import (
    get_hunyuan_image3_post_process_func,
    get_hunyuan_image_3_prefix_cache_func,
)
from vllm_omni.platforms import current_omni_platform

from omni_ep.config import RunRequest, validate_layout
from omni_ep.groups import live_layout
from omni_ep.loading import LoadingSettings, check_against_config, read_checkpoint
from omni_ep.loading.reader import refuse_non_finite
from omni_ep.models.hunyuan_image3 import patches, precision
from omni_ep.models.hunyuan_image3.config import register_config
from omni_ep.models.hunyuan_image3.denoising import EpText2ImagePipeline
from omni_ep.models.hunyuan_image3.expert_load import ExpertLoadCounter
from omni_ep.models.hunyuan_image3.loading import AskedFor, OwnedWeights, log_on_first_rank

__all__ = [
    "HunyuanImage3Pipeline",
    "get_hunyuan_image3_post_process_func",
    "get_hunyuan_image_3_pre_process_func",
    "get_hunyuan_image_3_prefix_cache_func",
]


def get_hunyuan_image_3_pre_process_func(od_config: OmniDiffusionConfig) -> Any:
    """vLLM-Omni's request preprocessing, configured without the checkpoint's code.

    The engine asks for it in its own process before it starts a worker
    (``diffusion/diffusion_engine.py:270``), so a layout that cannot work is refused here.

    Raises:
        ConfigurationError: the layout does not fit the model, or a setting is not known.
    """
    register_config()
    LoadingSettings.from_additional_config(od_config.additional_config)
    if od_config.parallel_config.enable_expert_parallel:
        refuse_impossible_layout(od_config)
    use_platform_executor(od_config)
    with patches.config_from_json(trust_remote_code=od_config.trust_remote_code):
        return stock.get_hunyuan_image_3_pre_process_func(od_config)


def use_platform_executor(od_config: OmniDiffusionConfig) -> None:
    """Start ranks with omni-ep's executor where its platform has one and the user has not chosen another.

    vLLM-Omni asks no platform for an executor (``diffusion/executor/abstract.py:31``), and looks for one
    after the preprocessing.
    """
    executor = getattr(current_omni_platform, "diffusion_executor_backend", None)
    if executor is not None and od_config.distributed_executor_backend is None:
        od_config.distributed_executor_backend = executor()


def refuse_impossible_layout(od_config: OmniDiffusionConfig) -> None:
    """Check an expert-parallel layout against the checkpoint's config, and a local checkpoint's headers.

    Raises:
        ConfigurationError: the first rule that is broken, with what would fit.
    """
    parallel = od_config.parallel_config
    request = RunRequest(
        tensor_parallel_size=parallel.tensor_parallel_size,
        ulysses_degree=parallel.ulysses_degree,
        ring_degree=parallel.ring_degree,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        cfg_parallel_size=parallel.cfg_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        enable_expert_parallel=parallel.enable_expert_parallel,
        use_hsdp=parallel.use_hsdp,
    )
    config, _ = PretrainedConfig.get_config_dict(od_config.model)
    validate_layout(request, config)
    if Path(od_config.model).is_dir():
        check_against_config(read_checkpoint(od_config.model), config)


# The name is upstream's: TeaCache and the NPU platform look pipelines up by class name.
class HunyuanImage3Pipeline(stock.HunyuanImage3Pipeline):
    """vLLM-Omni's pipeline with omni-ep's MoE block, float32 on request, no remote code."""

    def __init__(self, od_config: OmniDiffusionConfig) -> None:
        register_config()
        expert_parallel = od_config.parallel_config.enable_expert_parallel
        moe_block = patches.expert_parallel_moe_block() if expert_parallel else nullcontext()
        with patches.config_from_json(trust_remote_code=od_config.trust_remote_code), moe_block:
            super().__init__(od_config)
        self._denoising: EpText2ImagePipeline | None = None
        self.loading_report: dict[str, float] | None = None
        self.loading_warning: str | None = None
        self._expert_load: ExpertLoadCounter | None = None
        device_type = get_local_device().type
        self.runs_in_float32 = od_config.dtype == torch.float32
        if self.runs_in_float32:
            precision.keep_rotary_in_float32(self.model)
        if self.runs_in_float32 or device_type == "cpu":
            precision.run_vae_in_float32(self.vae, device_type)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load this rank's share and nothing else; without expert parallelism, load as vLLM-Omni does.

        Raises:
            ConfigurationError: the checkpoint is damaged or incomplete.
        """
        settings = LoadingSettings.from_additional_config(self.od_config.additional_config)
        if self.od_config.parallel_config.enable_expert_parallel and settings.filter_weights:
            owned = OwnedWeights(self, settings)
            loaded = owned.load(weights, super().load_weights)
            self.loading_report, self.loading_warning = owned.report, owned.warning
            return loaded
        if settings.check_weights:
            weights = refuse_non_finite(iter(weights), self.od_config.model)
        asked = AskedFor(self, weights)
        loaded = super().load_weights(asked)
        self.loading_warning = asked.warning
        log_on_first_rank(asked.warning)
        return loaded

    @property
    def pipeline(self) -> EpText2ImagePipeline:
        """The denoising loop; made on first use, like upstream's."""
        if self._denoising is None:
            # Upstream's property also makes the scheduler, which other code finds on the model.
            scheduler = super().pipeline.scheduler
            self._denoising = EpText2ImagePipeline(model=self, scheduler=scheduler, vae=self.vae)
            self._denoising.float32 = self.runs_in_float32
        return self._denoising

    def forward_call(self, *args: Any, **kwargs: Any) -> Any:
        """One forward of the transformer; in float32, upstream's bf16 autocast is off."""
        forward_call = super().forward_call
        if self.runs_in_float32:
            forward_call = precision.without_autocast(forward_call, self.device.type)
        return forward_call(*args, **kwargs)

    def count_expert_load(self) -> None:
        """Count from now on how many tokens each expert gets; a second call does nothing.

        Raises:
            NotImplementedError: the platform's kernels choose experts by themselves.
        """
        if self._expert_load is not None:
            return
        guided = not getattr(self.model.config, "cfg_distilled", False)
        self._expert_load = ExpertLoadCounter(
            self.model.layers,
            layout=live_layout(),
            rank=dist.get_rank(),
            branches_split=lambda: guided and self.pipeline.do_classifier_free_guidance,
        )

    def expert_load(self) -> tuple[tuple[int, ...], np.ndarray | None]:
        """Numbers of the counted layers, and this rank's part of the counts, int64 [step, layer, expert].

        Raises:
            RuntimeError: nobody has asked to count.
        """
        if self._expert_load is None:
            raise RuntimeError("tokens per expert are not counted; call count_expert_load() before painting")
        return self._expert_load.layers, self._expert_load.counts()
