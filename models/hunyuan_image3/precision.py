# SPDX-License-Identifier: Apache-2.0
"""float32 end to end, and a VAE that runs on CPU.

vLLM-Omni hard-codes bf16 in three places of HunyuanImage-3 (autocast around the transformer,
``hunyuan_image3_transformer.py:3333`` and ``pipeline_hunyuan_image3.py:2323``; the q/k cast,
``:887``; the noise, ``:3211``, see ``denoising.py``) and fp16 autocast around the VAE
(``:3397``), which fails on CPU for bf16 weights. Each is undone from outside by subclassing
or nesting.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.models.hunyuan_image3.hunyuan_image3_transformer import (
    HunyuanImage3Model,
    HunYuanRotary2DEmbedder,
)


class Float32Rotary2DEmbedder(HunYuanRotary2DEmbedder):
    """2-D rotary embedding whose q and k keep float32 (upstream casts them to bf16)."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        hidden_states: torch.Tensor,
        custom_pos_emb: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if kwargs.get("mode", "gen_text") != "gen_image":
            return q, k
        cos, sin = self._prepare_cos_sin(custom_pos_emb, kwargs.get("first_step", False), q.device)
        query_lens: list[int] = kwargs["query_lens"]
        rows = (len(query_lens), query_lens[0])
        rotated = []
        for states, num_heads in ((q, self.num_heads), (k, self.num_kv_heads)):
            by_head = states.reshape(*rows, num_heads, self.head_dim).float()
            rotated.append(self.rope(by_head, cos, sin).reshape(-1, num_heads * self.head_dim))
        return rotated[0], rotated[1]


def keep_rotary_in_float32(model: HunyuanImage3Model) -> None:
    """Replace the rotary embedder of every layer by the float32 one."""
    for layer in model.layers:
        attention = layer.self_attn
        embedder = attention.image_rope2d_emb
        attention.image_rope2d_emb = Float32Rotary2DEmbedder(
            num_heads=embedder.num_heads, num_kv_heads=embedder.num_kv_heads, head_dim=embedder.head_dim
        )


def without_autocast(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """``function`` with any surrounding autocast switched off."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type=device_type, enabled=False):
            return function(*args, **kwargs)

    return call


def run_vae_in_float32(vae: nn.Module, device_type: str) -> None:
    """Hold the VAE's weights in float32 and decode and encode without autocast."""
    vae.float()
    decode: Callable[..., Any] = vae.decode  # type: ignore[assignment]
    encode: Callable[..., Any] = vae.encode  # type: ignore[assignment]

    def decode_float32(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return without_autocast(decode, device_type)(latents.float(), *args, **kwargs)

    def encode_float32(pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return without_autocast(encode, device_type)(pixels.float(), *args, **kwargs)

    vae.decode, vae.encode = decode_float32, encode_float32  # type: ignore[assignment]
