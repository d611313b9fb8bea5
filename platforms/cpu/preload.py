# SPDX-License-Identifier: Apache-2.0
"""Imported by the fork server: everything a CPU rank of HunyuanImage-3 needs."""

import vllm_omni.diffusion.diffusion_engine
import vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_hunyuan
import vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3
import vllm_omni.diffusion.worker.diffusion_worker  # noqa: F401

import omni_ep.platforms.cpu.attention
import omni_ep.platforms.cpu.communicator
import omni_ep.platforms.cpu.fused_moe
import omni_ep.platforms.cpu.worker
from omni_ep.platforms.cpu.forkserver import check_single_threaded

check_single_threaded()
