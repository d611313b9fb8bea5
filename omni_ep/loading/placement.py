# SPDX-License-Identifier: Apache-2.0
"""Where a planned tensor's bytes go when they are read straight into a parameter.

vLLM's weight loaders copy from a tensor, so a tensor that is first read into a buffer costs a second copy and
the page faults of fresh memory, which on CPU are most of a load.
"""

from typing import NamedTuple

import torch


class Destination(NamedTuple):
    """Some bytes of a tensor and the elements of a parameter they belong in.

    Attributes:
        start, stop: bytes of the handed-out tensor (:attr:`omni_ep.loading.plan.Read.ranges`).
        target: the whole parameter, contiguous; any device and dtype.
        first: the first element that is filled, counted in the order of memory.
    """

    start: int
    stop: int
    target: torch.Tensor
    first: int = 0

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether the file's bytes are the target's own, so that a read may write them there."""
        return self.target.dtype == dtype and self.target.device.type == "cpu"


class Placement(NamedTuple):
    """One planned tensor that no weight loader sees.

    Attributes:
        parts: cover what is read of the tensor.
        loads: ``(parameter, global expert id, shard id)`` of the weight-loader calls that this stands for.
    """

    parts: tuple[Destination, ...]
    loads: tuple[tuple[str, int | None, str | None], ...]
