# SPDX-License-Identifier: Apache-2.0
"""What may be chosen about a random checkpoint, and which choices the model cannot run."""

from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from omni_ep.errors import ConfigurationError

NORM_GROUPS = 32
"""Groups of every GroupNorm in the model: the VAE's, the patch embedding's and the final layer's."""

VAE_FACTOR = 16
"""Pixels per latent along height and width."""

VAE_TEMPORAL_FACTOR = 4
"""Frames per latent; images use one frame, but the factor shapes the resampling convolutions."""

DTYPE_BYTES = {"bf16": 2, "fp32": 4}


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class CheckpointSpec:
    """Sizes of a random HunyuanImage-3.0 checkpoint; each field's `help` metadata says what it is.

    Raises:
        ConfigurationError: a value the model cannot run, in one sentence.
    """

    num_layers: int = _setting(2, "transformer layers")
    hidden_size: int = _setting(128, "width of the transformer, a multiple of 32")
    num_attention_heads: int = _setting(4, "query heads")
    num_key_value_heads: int = _setting(2, "key and value heads, a divisor of the query heads")
    head_dim: int = _setting(32, "width of one head, a multiple of 4")
    num_experts: int = _setting(8, "routed experts per layer")
    top_k: int = _setting(2, "experts each token is sent to")
    moe_intermediate_size: int = _setting(64, "width of one expert")
    num_shared_experts: int = _setting(1, "shared experts per layer, 0 for none")
    patch_embed_hidden_dim: int = _setting(
        32, "channels inside patch embedding and final layer, as hidden_size"
    )
    image_base_size: int = _setting(64, "side of the square picture in pixels, a multiple of 16")
    vae_block_channels: tuple[int, ...] = _setting(
        (32, 32, 32, 32, 32), "channels of the five VAE levels, multiples of 32"
    )
    vae_latent_channels: int = _setting(16, "channels of a latent")
    vae_layers_per_block: int = _setting(1, "residual blocks per VAE encoder level; the decoder has one more")
    dtype: str = _setting("bf16", "number format of the weights")
    num_shards: int = _setting(3, "safetensors files to spread the weights over")
    seed: int = _setting(0, "seed of the random weights")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            least = 0 if setting.name in ("num_shared_experts", "vae_layers_per_block", "seed") else 1
            if setting.type is int and (type(value) is not int or value < least):
                raise ConfigurationError(
                    f"{setting.name} must be a whole number from {least} up, not {value!r}."
                )
        self._check_transformer()
        self._check_vae()
        if self.dtype not in DTYPE_BYTES:
            raise ConfigurationError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}.")

    def _check_transformer(self) -> None:
        if self.num_experts < 2:
            raise ConfigurationError(
                "num_experts must be at least 2, not 1: the model builds a dense MLP instead of one expert."
            )
        if self.top_k > self.num_experts:
            raise ConfigurationError(
                f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigurationError(
                f"num_attention_heads ({self.num_attention_heads}) must be divisible by "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim % 4:
            raise ConfigurationError(
                f"head_dim must be a multiple of 4 for the 2-D rotary embedding, not {self.head_dim}."
            )
        for name in ("hidden_size", "patch_embed_hidden_dim"):
            if getattr(self, name) % NORM_GROUPS:
                raise ConfigurationError(
                    f"{name} must be a multiple of {NORM_GROUPS} for GroupNorm, not {getattr(self, name)}."
                )
        # Narrower than 32 and the tallest aspect ratio (half as wide, twice as high) has no latent column.
        if self.image_base_size % VAE_FACTOR or self.image_base_size < 2 * VAE_FACTOR:
            raise ConfigurationError(
                f"image_base_size must be a multiple of {VAE_FACTOR} and at least {2 * VAE_FACTOR}, "
                f"not {self.image_base_size}."
            )

    def _check_vae(self) -> None:
        channels = self.vae_block_channels
        if not isinstance(channels, tuple) or len(channels) != 5:
            raise ConfigurationError(
                f"vae_block_channels must be five numbers, one per VAE level, not {channels!r}."
            )
        for width in channels:
            if type(width) is not int or width < 1 or width % NORM_GROUPS:
                raise ConfigurationError(
                    f"vae_block_channels must be multiples of {NORM_GROUPS} for GroupNorm, not {width!r}."
                )
        for level, (finer, coarser) in enumerate(pairwise(channels)):
            # Each resampling step folds pixels into channels and averages the surplus away for its shortcut.
            if finer * downsample_fold(level) % coarser:
                raise ConfigurationError(
                    f"vae_block_channels[{level}] ({finer}) times {downsample_fold(level)} must be divisible "
                    f"by vae_block_channels[{level + 1}] ({coarser}) for the VAE's shortcut."
                )
        if channels[-1] % (2 * self.vae_latent_channels):
            raise ConfigurationError(
                f"the last of vae_block_channels ({channels[-1]}) must be divisible by twice "
                f"vae_latent_channels ({self.vae_latent_channels})."
            )


def downsample_fold(level: int) -> int:
    """How many values encoder level `level` (0 to 3) folds into one: 4 in space, 8 in space and time."""
    spatial_only_levels = (VAE_FACTOR // VAE_TEMPORAL_FACTOR).bit_length() - 1
    return 4 if level < spatial_only_levels else 8
