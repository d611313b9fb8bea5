# SPDX-License-Identifier: Apache-2.0
"""One weight of a model: its whole shape, and how a rank's share is cut from it."""

from dataclasses import dataclass
from enum import Enum

from omni_ep.layout import ParallelLayout
from omni_ep.planner.precision import Precision

VOCAB_PADDING = 64
"""Rows that vLLM's VocabParallelEmbedding pads a vocabulary to (vocab_parallel_embedding.py:31)."""


class Split(Enum):
    """How vLLM divides a weight [rows = outputs, columns = inputs] among ranks."""

    REPLICATED = "whole on every rank"
    ROWS = "rows over TP (ColumnParallelLinear)"
    COLUMNS = "columns over TP (RowParallelLinear)"
    KV_ROWS = "rows over TP, KV heads replicated where TP exceeds them (QKVParallelLinear)"
    VOCAB_ROWS = "rows over TP, padded to 64 first (VocabParallelEmbedding)"
    EXPERT_ROWS = "whole experts over EP, or rows over TP without EP (FusedMoE w13)"
    EXPERT_COLUMNS = "whole experts over EP, or columns over TP without EP (FusedMoE w2)"


class Part(Enum):
    """What a byte of device memory is spent on, in the order of tables and plots."""

    ROUTED_EXPERTS = "routed experts"
    SHARED_EXPERTS = "shared experts"
    ROUTER = "router"
    ATTENTION = "attention"
    DENSE_MLP = "dense MLP layers"
    EMBEDDINGS = "embeddings"
    IMAGE_HEAD = "timestep and patch layers"
    VAE = "VAE"
    VIT = "ViT"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication buffers"


PARAMETER_PARTS = tuple(part for part in Part if part not in (Part.ACTIVATIONS, Part.COMMUNICATION))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """``count`` equal matrices [rows, columns], before any split; a vector has ``columns`` 1."""

    part: Part
    rows: int
    columns: int = 1
    count: int = 1
    split: Split = Split.REPLICATED
    heads: int = 0
    """Heads that the rows belong to, for ``KV_ROWS``."""
    quantizable: bool = False
    """Whether a quantised checkpoint quantises it: linear layers of the transformer, not its gate."""

    @property
    def elements(self) -> int:
        """Parameters before any split."""
        return self.count * self.rows * self.columns

    def local(self, layout: ParallelLayout, *, expert_parallel: bool) -> tuple[int, int, int]:
        """(count, rows, columns) on one rank; every rank of a layout holds the same amount."""
        count, rows, columns, tp = self.count, self.rows, self.columns, layout.tp
        if self.split in (Split.EXPERT_ROWS, Split.EXPERT_COLUMNS) and expert_parallel:
            return count // layout.ep_size, rows, columns
        if self.split in (Split.ROWS, Split.EXPERT_ROWS):
            rows //= tp
        elif self.split in (Split.COLUMNS, Split.EXPERT_COLUMNS):
            columns //= tp
        elif self.split is Split.KV_ROWS:
            rows //= min(tp, self.heads)
        elif self.split is Split.VOCAB_ROWS:
            rows = -(-rows // VOCAB_PADDING) * VOCAB_PADDING // tp
        return count, rows, columns

    def local_bytes(
        self, layout: ParallelLayout, precision: Precision, *, expert_parallel: bool, vae_bytes: int
    ) -> int:
        """Bytes on one rank.

        Args:
            vae_bytes: bytes per element of the VAE, whose format may differ from the transformer's.
        """
        count, rows, columns = self.local(layout, expert_parallel=expert_parallel)
        if self.quantizable:
            return count * precision.matrix_bytes(rows, columns)
        width = vae_bytes if self.part is Part.VAE else precision.compute_bytes
        return count * rows * columns * width
