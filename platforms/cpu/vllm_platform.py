# SPDX-License-Identifier: Apache-2.0
"""What vLLM itself sees on a machine without an accelerator.

vLLM's accelerator wheel resolves to an unspecified platform when no driver is present. This
class is a plain ``CpuPlatform``: a platform that called itself out-of-tree would make vLLM's
MoE oracle pick its OOT backend (``fused_moe/oracle/unquantized.py:219``), which has no kernel.
"""

import importlib.util
import os

from vllm.platforms.cpu import CpuPlatform

# vLLM imports a kernel library (humming/ops/utils.py:151, humming/utils/nvrtc.py:140) that starts
# two more Python processes in every process that imports it, to build CUDA code with nvcc. Without
# an accelerator they achieve nothing and cost as much as the import itself.
os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")


class CpuVllmPlatform(CpuPlatform):
    """vLLM's CPU platform, runnable from the wheel built for accelerators."""

    # Inductor would need a C++ compiler on the user's machine, and 3 s per rank, for an
    # embedding's index arithmetic (layers/vocab_parallel_embedding.py, get_masked_input_and_mask).
    simple_compile_backend: str = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """Load vLLM's CPU kernels where the wheel carries them; they are optional here.

        Upstream warns when they are missing (``vllm/platforms/cpu.py:595``). Every kernel that
        the diffusion path needs has a native replacement, so there is nothing to act on.
        """
        if importlib.util.find_spec("vllm._C_AVX2") or importlib.util.find_spec("vllm._C"):
            super().import_kernels()

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The communicator that also has the variable-size collectives EP dispatch uses."""
        return "omni_ep.platforms.cpu.communicator.CpuEpCommunicator"
