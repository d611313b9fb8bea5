# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402, F401
"""Imported by the fork server: everything a CPU rank of HunyuanImage-3 needs."""

import atexit
import logging
import os
import signal
import warnings

_parent = os.getppid()


def _end_with_parent(*_: object) -> None:
    if os.getppid() != _parent:
        os._exit(1)


# The server looks for its parent only between requests, so a command that ends while the server
# still imports would leave it behind. A timer, because a thread would make forking unsafe.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGALRM, _end_with_parent)
signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)

# "No CUDA runtime" and renamed collectives: nothing that a user of CPU ranks could act on.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

import vllm_omni.diffusion.diffusion_engine
import vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_hunyuan
import vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3
import vllm_omni.diffusion.worker.diffusion_worker

import omni_ep.platforms.cpu.attention
import omni_ep.platforms.cpu.communicator
import omni_ep.platforms.cpu.fused_moe
import omni_ep.platforms.cpu.worker
from omni_ep.platforms.cpu.forkserver import check_single_threaded

# Taking apart an interpreter of this size takes seconds, in which the server would outlive its parent.
atexit.register(os._exit, 0)
signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
check_single_threaded()
