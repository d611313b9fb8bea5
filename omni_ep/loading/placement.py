# SPDX-License-Identifier: Apache-2.0
"""Where a planned tensor's bytes go when they are read straight into a parameter.

vLLM's weight loaders copy from a tensor, so a tensor that is first read into a buffer costs a second copy and
the page faults of fresh memory, which on CPU are most of a load.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Some bytes of a tensor and the memory they belong in.

    Attributes:
        start, stop: bytes of the handed-out tensor (:attr:`omni_ep.loading.plan.Read.ranges`).
        target: contiguous, as many elements as the bytes hold; any device and dtype.
    """

    start: int
    stop: int
    target: torch.Tensor

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether the file's bytes are the target's own, so that a read may write them there."""
        return self.target.device.type == "cpu" and self.target.dtype == dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One planned tensor that no weight loader sees.

    Attributes:
        parts: cover what is read of the tensor.
        loads: ``(parameter, global expert id, shard id)`` of the weight-loader calls that this stands for.
    """

    parts: tuple[Destination, ...]
    loads: tuple[tuple[str, int | None, str | None], ...]
