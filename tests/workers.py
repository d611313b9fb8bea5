# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's real worker with real groups, without an engine around it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.utils.network_utils import get_open_port
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.forward_context import set_forward_context

from omni_ep import plugin
from omni_ep.config import RunRequest
from omni_ep.platforms.cpu.worker import CpuDiffusionWorker

TINY = Path(__file__).parent / "data" / "hunyuan_image3_tiny"


def diffusion_config(request: RunRequest, *, model: Path = TINY, **settings: Any) -> OmniDiffusionConfig:
    """The configuration that every rank of one engine shares; made once, in the parent."""
    plugin.register()
    layout = request.layout
    config = OmniDiffusionConfig(
        model=str(model),
        model_class_name="HunyuanImage3ForCausalMM",
        num_gpus=layout.world_size,
        master_port=get_open_port(),
        enforce_eager=True,
        enable_multithread_weight_load=True,
        parallel_config=DiffusionParallelConfig(
            tensor_parallel_size=layout.tp,
            sequence_parallel_size=layout.sp,
            ulysses_degree=request.ulysses_degree,
            ring_degree=request.ring_degree,
            cfg_parallel_size=layout.cfg,
            data_parallel_size=layout.dp,
            enable_expert_parallel=request.enable_expert_parallel,
        ),
        **settings,
    )
    config.enrich_config()
    return config


@contextmanager
def worker(
    rank: int, od_config: OmniDiffusionConfig, *, load_model: bool = False
) -> Iterator[CpuDiffusionWorker]:
    """A live worker inside the contexts that vLLM-Omni builds models in."""
    plugin.register()
    instance = CpuDiffusionWorker(
        local_rank=rank, rank=rank, od_config=od_config, skip_load_model=not load_model
    )
    try:
        with (
            set_forward_context(vllm_config=instance.vllm_config, omni_diffusion_config=od_config),
            set_current_vllm_config(instance.vllm_config),
        ):
            yield instance
    finally:
        instance.shutdown()
