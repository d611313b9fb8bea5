# SPDX-License-Identifier: Apache-2.0
"""Changes to vLLM and vLLM-Omni that have no hook and that CPU ranks cannot do without.

Each one names the upstream line that forces it; ``tests/unit/test_patches.py`` fails when
upstream no longer needs it. Applied once per process, only while the CPU platform is active.
"""

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers import utils as layer_utils
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

logger = init_logger(__name__)


def _pack_outputs_without_stream(self: WorkerProc) -> None:
    """Pack finished outputs into shared memory; CPU memory has no stream to order against."""
    while (item := self._async_output_queue.get()) is not None:
        output, async_output_id, _ = item
        error = None
        try:
            pack_diffusion_output_shm(output)
        except Exception as exc:
            logger.exception("packing the output %s failed", async_output_id)
            output, error = None, f"packing the output into shared memory failed: {exc}"
        try:
            self._enqueue_result(
                AsyncDiffusionOutput(
                    kind=AsyncOutputKind.OUTPUT_READY,
                    async_output_id=async_output_id,
                    output=output,
                    error=error,
                )
            )
        finally:
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()


def _never_packed(n: int, k: int, dtype: torch.dtype) -> bool:
    """No weight may be packed for a kernel that is not there; vLLM then takes its next best."""
    return False


def apply() -> None:
    """Apply every patch of this module; a second call changes nothing.

    - ``WorkerProc._async_output_loop`` (``diffusion/worker/diffusion_worker.py:1268``) asks
      ``torch.accelerator`` for a device that does not exist on CPU. Its thread dies and the
      request then waits for ever.
    - ``check_cpu_sgl_kernel`` (vLLM's ``model_executor/layers/utils.py:426``, asked in line 530) looks
      at the processor only. On one with AMX it sends small bf16 and fp16 weights to
      ``torch.ops._C.convert_weight_packed``, which the accelerator wheel does not have on CPU.
    """
    WorkerProc._async_output_loop = _pack_outputs_without_stream
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        layer_utils.check_cpu_sgl_kernel = _never_packed
