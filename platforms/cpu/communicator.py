# SPDX-License-Identifier: Apache-2.0
"""Variable-size collectives for CPU ranks.

vLLM's allgather/reducescatter dispatch calls ``all_gatherv`` and ``reduce_scatterv``, which
its CPU communicator lacks (``base_device_communicator.py:272,313``). Ranks may bring different
numbers of tokens, for instance when guidance branches have prompts of different length, or none
at all; nothing is padded here.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class CpuEpCommunicator(CpuCommunicator):
    """vLLM's CPU communicator plus ``all_gatherv`` and ``reduce_scatterv`` over gloo."""

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate every rank's rows, in rank order.

        Args:
            input_: ``[sizes[rank], ...]``, or a list of such tensors.
            dim: 0, the only dimension tokens are gathered over.
            sizes: rows that each rank brings; equal counts when ``None``.

        Returns:
            ``[sum(sizes), ...]``, one tensor per input.
        """
        if dim != 0:
            raise NotImplementedError(f"all_gatherv gathers over dimension 0, got {dim}")
        if isinstance(input_, list):
            return [self._gather_rows(tensor, sizes) for tensor in input_]
        return self._gather_rows(input_, sizes)

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Add up every rank's tensor and keep this rank's rows.

        The sum runs in float32 and in rank order, so every rank rounds once and the result
        does not depend on which message arrives first.

        Args:
            input_: ``[sum(sizes), ...]``, a partial result on every rank.
            dim: 0, the only dimension tokens are scattered over.
            sizes: rows that each rank keeps; equal counts when ``None``.

        Returns:
            ``[sizes[rank], ...]`` in the input's dtype.
        """
        if dim != 0:
            raise NotImplementedError(f"reduce_scatterv scatters over dimension 0, got {dim}")
        counts = self._counts(input_.shape[0] // self.world_size, sizes)
        if self.world_size == 1:
            return input_
        mine = counts[self.rank_in_group]
        received = input_.new_empty((mine * self.world_size, *input_.shape[1:]))
        dist.all_to_all_single(
            received,
            input_.contiguous(),
            output_split_sizes=[mine] * self.world_size,
            input_split_sizes=counts,
            group=self.device_group,
        )
        partials = received.view(self.world_size, mine, *input_.shape[1:])
        # Not sum(dim=0): from 5 ranks on, torch regroups its terms by where a value stands.
        total = partials[0].float()
        for partial in partials[1:]:
            total = total + partial
        return total.to(input_.dtype)

    def _gather_rows(self, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        counts = self._counts(rows.shape[0], sizes)
        if counts[self.rank_in_group] != rows.shape[0]:
            raise ValueError(
                f"rank {self.rank_in_group} brings {rows.shape[0]} rows but announced "
                f"{counts[self.rank_in_group]}; the token counts of the ranks are {counts}"
            )
        if self.world_size == 1:
            return rows
        gathered = rows.new_empty((sum(counts), *rows.shape[1:]))
        if len(set(counts)) == 1:
            dist.all_gather_into_tensor(gathered, rows.contiguous(), group=self.device_group)
            return gathered
        # gloo's all-gather needs equal shapes; its all-to-all does not, so each rank sends
        # its own rows once to every rank.
        copies = torch.cat([rows] * self.world_size)
        dist.all_to_all_single(
            gathered,
            copies,
            output_split_sizes=counts,
            input_split_sizes=[rows.shape[0]] * self.world_size,
            group=self.device_group,
        )
        return gathered

    def _counts(self, rows: int, sizes: Sequence[int] | None) -> list[int]:
        counts = [rows] * self.world_size if sizes is None else list(sizes)
        if len(counts) != self.world_size:
            raise ValueError(f"got {len(counts)} sizes for a group of {self.world_size} ranks")
        return counts
