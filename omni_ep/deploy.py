# SPDX-License-Identifier: Apache-2.0
"""The deploy configuration that runs HunyuanImage-3's diffusion stage alone.

The checkpoint's model type selects vLLM-Omni's two-stage pipeline, an autoregressive stage
before the diffusion stage (``config/pipeline_registry.py:168``). Text-to-image needs the
second only; vLLM-Omni takes that choice from a deploy file.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from omni_ep.config import RunRequest


def dit_deploy_config(request: RunRequest, *, vae_use_tiling: bool = False) -> dict[str, Any]:
    """The content of a deploy file for one diffusion stage with the request's parallel sizes."""
    layout = request.layout
    return {
        "pipeline": "hunyuan_image3_dit",
        "async_chunk": False,
        "stages": [
            {
                "stage_id": 0,
                "max_num_seqs": 1,
                "enforce_eager": True,
                "devices": ",".join(str(rank) for rank in range(layout.world_size)),
                "vae_use_tiling": vae_use_tiling,
                "parallel_config": {
                    "pipeline_parallel_size": layout.pp,
                    "data_parallel_size": layout.dp,
                    "tensor_parallel_size": layout.tp,
                    "enable_expert_parallel": request.enable_expert_parallel,
                    "sequence_parallel_size": layout.sp,
                    "ulysses_degree": request.ulysses_degree,
                    "ring_degree": request.ring_degree,
                    "cfg_parallel_size": layout.cfg,
                    "use_hsdp": request.use_hsdp,
                },
            }
        ],
    }


@contextmanager
def deploy_file(config: dict[str, Any]) -> Iterator[str]:
    """The configuration as a file that exists while the ``with`` block runs."""
    handle, path = tempfile.mkstemp(prefix="omni-ep-deploy-", suffix=".yaml")
    try:
        with os.fdopen(handle, "w") as file:
            yaml.safe_dump(config, file)
        yield path
    finally:
        os.unlink(path)
