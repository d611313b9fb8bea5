# SPDX-License-Identifier: Apache-2.0
"""PyTorch SDPA as a diffusion attention backend on CPU.

``AttentionImpl.forward`` has a branch per accelerator and none for CPU
(``diffusion/attention/backends/abstract.py:280-299``); the implementation below it is
device-neutral.
"""

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSdpaBackend(SDPABackend):
    """SDPA backend that resolves to the CPU implementation."""

    @staticmethod
    def get_impl_cls() -> type["AttentionImpl"]:
        return CpuSdpaImpl


class CpuSdpaImpl(SDPAImpl):
    """SDPA on CPU tensors, ``[batch, tokens, heads, head_dim]`` in and out."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        return self._forward_impl(query, key, value, attn_metadata)
