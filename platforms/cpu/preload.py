# SPDX-License-Identifier: Apache-2.0
"""Imported by the fork server: everything a CPU rank of HunyuanImage-3 needs."""

import logging

# Nobody can act on "no CUDA runtime" here.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

import vllm_omni.diffusion.diffusion_engine
import vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_hunyuan
import vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3
import vllm_omni.diffusion.worker.diffusion_worker  # noqa: F401

from omni_ep.platforms.cpu.forkserver import check_single_threaded

check_single_threaded()
