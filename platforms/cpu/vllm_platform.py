# SPDX-License-Identifier: Apache-2.0
"""What vLLM itself sees on a machine without an accelerator.

vLLM's accelerator wheel resolves to an unspecified platform when no driver is present. This
class is a plain ``CpuPlatform``: a platform that called itself out-of-tree would make vLLM's
MoE oracle pick its OOT backend (``fused_moe/oracle/unquantized.py:222``), which has no kernel.
"""

from vllm.platforms.cpu import CpuPlatform


class CpuVllmPlatform(CpuPlatform):
    """vLLM's CPU platform, runnable from the wheel built for accelerators."""

    @classmethod
    def import_kernels(cls) -> None:
        """Load vLLM's CPU kernels where the wheel carries them; they are optional here.

        Upstream warns when they are missing (``vllm/platforms/cpu.py:581``). Every kernel that
        the diffusion path needs has a native replacement, so there is nothing to act on.
        """
        try:
            import vllm._C_AVX2  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            return

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The communicator that also has the variable-size collectives EP dispatch uses."""
        return "omni_ep.platforms.cpu.communicator.CpuEpCommunicator"
