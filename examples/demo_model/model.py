# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-3 for text to image in plain PyTorch, trainable, with the checkpoint's tensor names.

It shares no code with vLLM, vLLM-Omni or omni-ep, so it can judge them: on the same checkpoint, in
float32, it predicts what the pipeline predicts.

Shapes: B sequences, S tokens, D hidden, H query heads, K key/value heads, E experts, N head width.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from examples.demo_model.vae import VAE

FREQUENCIES = 256
"""Sine and cosine features of a timestep."""
VAE_FACTOR = 16
"""Pixels per latent, along height and width."""


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of `config.json` that this model needs; the names follow that file."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    num_shared_expert: int
    vocab_size: int
    patch_embed_hidden_dim: int
    latent_channels: int
    vae_channels: tuple[int, ...]
    vae_blocks: int
    vae_scaling_factor: float
    rope_theta: float
    rms_norm_eps: float

    @staticmethod
    def from_json(config: dict[str, Any]) -> "ModelConfig":
        """From a checkpoint's `config.json`, all of whose layers must be alike."""
        per_layer = {}
        for name in ("moe_topk", "moe_intermediate_size", "num_shared_expert"):
            values = set(config[name])
            if len(values) != 1:
                raise ValueError(f"{name} must be the same in every layer, not {config[name]}")
            per_layer[name] = values.pop()
        return ModelConfig(
            hidden_size=config["hidden_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["attention_head_dim"],
            num_experts=config["num_experts"],
            top_k=per_layer["moe_topk"],
            moe_intermediate_size=per_layer["moe_intermediate_size"],
            num_shared_expert=per_layer["num_shared_expert"] if config["use_mixed_mlp_moe"] else 0,
            vocab_size=config["vocab_size"],
            patch_embed_hidden_dim=config["patch_embed_hidden_dim"],
            latent_channels=config["vae"]["latent_channels"],
            vae_channels=tuple(config["vae"]["block_out_channels"]),
            vae_blocks=config["vae"]["layers_per_block"],
            vae_scaling_factor=config["vae"]["scaling_factor"],
            rope_theta=config["rope_theta"],
            rms_norm_eps=config["rms_norm_eps"],
        )


@dataclass(frozen=True)
class Sequence:
    """What a forward pass must know of a batch of equally long sequences.

    The sequences hold text, then the timestep's token at `image_start - 1`, then the image's
    `height * width` tokens. Tokens after the image are left away: nothing looks at them.
    """

    token_ids: torch.Tensor
    """`[B, S]`; whatever stands in the places of timestep and image is not looked at."""
    image_start: int
    height: int
    """Latents along the height."""
    width: int


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class TimestepEmbedder(nn.Module):
    """Timesteps in 0..1000, `[B]`, to `[B, D]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        half = FREQUENCIES // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half) / half)
        angles = timesteps[:, None] * frequencies
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=1))


class ResBlock(nn.Module):
    """2-D convolutions, scaled and shifted by the timestep's embedding between the two."""

    def __init__(self, channels_in: int, channels_out: int, embedding: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(32, channels_in), nn.SiLU(), nn.Conv2d(channels_in, channels_out, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embedding, 2 * channels_out))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(32, channels_out),
            nn.SiLU(),
            nn.Identity(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
        )
        same = channels_in == channels_out
        self.skip_connection = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x_BCHW: torch.Tensor, embedding_BD: torch.Tensor) -> torch.Tensor:
        scale, shift = self.emb_layers(embedding_BD)[:, :, None, None].chunk(2, dim=1)
        h = self.out_layers[0](self.in_layers(x_BCHW)) * (1 + scale) + shift
        return self.skip_connection(x_BCHW) + self.out_layers[1:](h)


class PatchEmbed(nn.Module):
    """Latents `[B, C, height, width]` to tokens `[B, height * width, D]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.patch_embed_hidden_dim
        self.model = nn.ModuleList(
            [
                nn.Conv2d(config.latent_channels, inner, 3, padding=1),
                ResBlock(inner, config.hidden_size, config.hidden_size),
            ]
        )

    def forward(self, latents: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return self.model[1](self.model[0](latents), embedding).flatten(2).transpose(1, 2)


class FinalLayer(nn.Module):
    """Tokens `[B, height * width, D]` to the velocity `[B, C, height, width]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.patch_embed_hidden_dim
        out = nn.Sequential(
            nn.GroupNorm(32, inner), nn.SiLU(), nn.Conv2d(inner, config.latent_channels, 3, padding=1)
        )
        self.model = nn.ModuleList([ResBlock(config.hidden_size, inner, config.hidden_size), out])

    def forward(self, tokens: torch.Tensor, embedding: torch.Tensor, height: int) -> torch.Tensor:
        x = tokens.transpose(1, 2).unflatten(2, (height, -1))
        return self.model[1](self.model[0](x, embedding))


def rotary_angles(sequence: Sequence, head_dim: int, theta: float) -> torch.Tensor:
    """Angles `[S, N/2]` of the 2-D rotary embedding: even frequencies turn with y, odd ones with x.

    Text counts on in both; the image is a grid around the diagonal point in its middle, so that it
    takes as many positions as it has tokens.
    """
    length = sequence.token_ids.shape[1]
    start, h, w = sequence.image_start, sequence.height, sequence.width
    positions_S2 = torch.arange(length).repeat(2, 1).T.clone()
    y = (start + (w * h - h) / 2 + torch.arange(h)).long()
    x = (start + (w * h - w) / 2 + torch.arange(w)).long()
    positions_S2[start : start + h * w] = torch.cartesian_prod(y, x)
    frequencies = 1 / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    return (positions_S2[:, None, :] * frequencies.reshape(-1, 2)).flatten(1)


def rotate(x_BSHN: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn each pair (n, n + N/2) of a head by its angle."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x_BSHN.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention_mask(sequence: Sequence) -> torch.Tensor:
    """`[S, S]`, true where a row may look: backwards, and image tokens at the whole image."""
    length, start = sequence.token_ids.shape[1], sequence.image_start
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    image = slice(start, start + sequence.height * sequence.width)
    mask[image, image] = True
    return mask


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        # Per key/value head: its query heads, then the key, then the value.
        self.qkv_proj = nn.Linear(
            config.hidden_size, self.kv_heads * (self.group + 2) * self.head_dim, bias=False
        )
        self.o_proj = nn.Linear(self.kv_heads * self.group * self.head_dim, config.hidden_size, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x_BSD: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, s, _ = x_BSD.shape
        qkv = self.qkv_proj(x_BSD).view(b, s, self.kv_heads, self.group + 2, self.head_dim)
        q, k, v = qkv.split([self.group, 1, 1], dim=3)
        q = self.query_layernorm(rotate(q.flatten(2, 3), angles))
        k = self.key_layernorm(rotate(k.flatten(2, 3), angles))
        k, v = (each.repeat_interleave(self.group, dim=2) for each in (k, v.flatten(2, 3)))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(width, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_and_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Gate(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wg = nn.Linear(config.hidden_size, config.num_experts, bias=False)


class MoE(nn.Module):
    """Softmax over all experts, the top k of them renormalised, and an expert for everything.

    Attributes:
        balance_loss: of the last forward pass, the load-balancing term of the Switch Transformer
            (Fedus et al. 2021, equation 4): E times the sum over experts of the share of pairs sent
            to it times its mean probability; 1 when even.
        load: of the last forward pass, the tokens sent to each expert, `[E]`.
    """

    balance_loss: torch.Tensor
    load: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, intermediate = config.top_k, config.moe_intermediate_size
        self.gate = Gate(config)
        self.shared_mlp = (
            MLP(config.hidden_size, intermediate * config.num_shared_expert)
            if config.num_shared_expert
            else None
        )
        self.experts = nn.ModuleList(MLP(config.hidden_size, intermediate) for _ in range(config.num_experts))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        x_TD = x_BSD.flatten(0, 1)
        probabilities_TE = self.gate.wg(x_TD).softmax(dim=-1)
        weights_TK, chosen_TK = probabilities_TE.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        experts = len(self.experts)
        self.load = torch.bincount(chosen_TK.flatten(), minlength=experts)
        share_E = self.load / chosen_TK.numel()
        self.balance_loss = experts * (share_E * probabilities_TE.mean(0)).sum()

        order = chosen_TK.flatten().argsort(stable=True)
        tokens_by_expert = (order // self.top_k).split(self.load.tolist())
        weights_by_expert = weights_TK.flatten()[order].split(self.load.tolist())
        out_TD = self.shared_mlp(x_TD) if self.shared_mlp is not None else torch.zeros_like(x_TD)
        routed = [
            expert(x_TD[tokens]) * weights[:, None]
            for expert, tokens, weights in zip(self.experts, tokens_by_expert, weights_by_expert, strict=True)
        ]
        out_TD = out_TD.index_add(0, order // self.top_k, torch.cat(routed))
        return out_TD.view_as(x_BSD)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        # Only text that is generated passes through it and `lm_head`; the layout has both.
        self.ln_f = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DemoModel(nn.Module):
    """The whole model without the vision tower, which only reads pictures."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.timestep_emb = TimestepEmbedder(config.hidden_size)
        self.time_embed = TimestepEmbedder(config.hidden_size)
        self.time_embed_2 = TimestepEmbedder(config.hidden_size)
        self.patch_embed = PatchEmbed(config)
        self.final_layer = FinalLayer(config)
        self.vae = VAE(config.vae_channels, config.latent_channels, config.vae_blocks)

    @staticmethod
    def from_checkpoint(folder: Path) -> "DemoModel":
        """Read a checkpoint folder, in float32.

        Raises:
            RuntimeError: a tensor is missing, or unknown and not part of the vision tower.
        """
        model = DemoModel(ModelConfig.from_json(json.loads((folder / "config.json").read_text())))
        weights = {}
        for shard in sorted(folder.glob("*.safetensors")):
            weights.update(load_file(shard))
        model.load_state_dict(
            {name: w.float() for name, w in weights.items() if not name.startswith("vision_")}
        )
        return model

    @property
    def moe_layers(self) -> list[MoE]:
        return [module for module in self.model.layers.modules() if isinstance(module, MoE)]

    def forward(self, sequence: Sequence, latents: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """The velocity, noise minus picture.

        Args:
            sequence: the tokens of B sequences.
            latents: `[B, C, height, width]`, scaled by the VAE's scaling factor.
            timesteps: `[B]`, 1000 times the share of noise.
        """
        x_BSD = self.model.wte(sequence.token_ids)
        start = sequence.image_start
        image = self.patch_embed(latents, self.time_embed(timesteps))
        timestep = self.timestep_emb(timesteps)[:, None]
        x_BSD = torch.cat([x_BSD[:, : start - 1], timestep, image], dim=1)
        angles = rotary_angles(sequence, self.config.head_dim, self.config.rope_theta)
        mask = attention_mask(sequence)
        for layer in self.model.layers:
            x_BSD = layer(x_BSD, angles, mask)
        return self.final_layer(x_BSD[:, start:], self.time_embed_2(timesteps), sequence.height)
