# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-3's VAE in plain PyTorch: a video VAE (3-D convolutions) that pictures pass through.

A picture enters the encoder as four equal frames and leaves the decoder as the last of four. Training
on that would cost twelve times what a picture needs, so a module can run `flat`: one frame, only the
middle time tap of every kernel. `make_flat_` brings the weights to the form in which both ways are the
same function (the other taps are zero, both frames of every temporal upsampling are equal).

Shapes: B pictures, C channels, T frames, H, W.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

GROUPS = 32
FRAMES = 4


class Conv(nn.Conv3d):
    """A 3-D convolution that preserves the size; on one frame it may use its middle time tap alone."""

    flat = False

    def __init__(self, channels_in: int, channels_out: int, kernel: int = 3) -> None:
        super().__init__(channels_in, channels_out, kernel, padding=kernel // 2)

    def forward(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        if not self.flat:
            return super().forward(x_BCTHW)
        middle = self.weight[:, :, self.kernel_size[0] // 2]
        y_BCHW = functional.conv2d(x_BCTHW[:, :, 0], middle, self.bias, padding=self.padding[1:])
        return y_BCHW[:, :, None]


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(channels), Conv(channels, channels)
        self.norm2, self.conv2 = _norm(channels), Conv(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(functional.silu(self.norm1(x)))
        return x + self.conv2(functional.silu(self.norm2(h)))


class AttnBlock(nn.Module):
    """Attention with one head over all positions of all frames."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (Conv(channels, channels, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (project(h).flatten(2).transpose(1, 2) for project in (self.q, self.k, self.v))
        h = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(h)


def fold(x_BCTHW: torch.Tensor, time: int) -> torch.Tensor:
    """Every `time`×2×2 block of positions into channels, position before channel."""
    b, c, t, h, w = x_BCTHW.shape
    x = x_BCTHW.reshape(b, c, t // time, time, h // 2, 2, w // 2, 2)
    return x.permute(0, 3, 5, 7, 1, 2, 4, 6).reshape(b, time * 4 * c, t // time, h // 2, w // 2)


def unfold(x_BCTHW: torch.Tensor, time: int) -> torch.Tensor:
    """The inverse of `fold`."""
    b, c, t, h, w = x_BCTHW.shape
    x = x_BCTHW.reshape(b, time, 2, 2, c // (time * 4), t, h, w)
    return x.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(b, c // (time * 4), t * time, h * 2, w * 2)


class Downsample(nn.Module):
    """Halves height and width (and time), with the folded input, averaged in groups, as its shortcut."""

    flat = False

    def __init__(self, channels_in: int, channels_out: int, temporal: bool) -> None:
        super().__init__()
        self.time = 2 if temporal else 1
        self.channels_out = channels_out
        self.conv = Conv(channels_in, channels_out // (4 * self.time))

    def _fold(self, x: torch.Tensor) -> torch.Tensor:
        if self.flat:  # the frames that would be folded are all equal
            return fold(x, 1).repeat(1, self.time, 1, 1, 1)
        return fold(x, self.time)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = self._fold(x)
        b, _, t, h, w = shortcut.shape
        return self._fold(self.conv(x)) + shortcut.reshape(b, self.channels_out, -1, t, h, w).mean(2)


class Upsample(nn.Module):
    """Doubles height and width (and time), with the repeated input, unfolded, as its shortcut."""

    flat = False

    def __init__(self, channels_in: int, channels_out: int, temporal: bool) -> None:
        super().__init__()
        self.time = 2 if temporal else 1
        self.repeats = 4 * self.time * channels_out // channels_in
        self.conv = Conv(channels_in, channels_out * 4 * self.time)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, shortcut = self.conv(x), x.repeat_interleave(self.repeats, dim=1)
        if self.flat:  # the last frame only
            last = slice(h.shape[1] - h.shape[1] // self.time, None)
            return unfold(h[:, last], 1) + unfold(shortcut[:, last], 1)
        return unfold(h, self.time) + unfold(shortcut, self.time)

    @torch.no_grad()
    def make_frames_equal_(self) -> None:
        """Let the first of two frames be the last one: its own shortcut taken out, the last one's put in."""
        if self.time == 1:
            return
        half = self.conv.out_channels // 2
        source = torch.arange(self.conv.out_channels) // self.repeats
        self.conv.bias[:half] = self.conv.bias[half:]  # type: ignore[index]
        self.conv.weight[:half] = self.conv.weight[half:]
        middle = self.conv.weight[:, :, 1, 1, 1]
        rows = torch.arange(half)
        middle[rows, source[half:]] += 1
        middle[rows, source[:half]] -= 1


class Level(nn.Module):
    """Residual blocks at one resolution, then the step to the next, if one is added."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.block = nn.Sequential(*(ResnetBlock(channels) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


class Middle(nn.Module):
    """The coarsest level."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1, self.attn_1 = ResnetBlock(channels), AttnBlock(channels)
        self.block_2 = ResnetBlock(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    def __init__(self, channels: Sequence[int], latent: int, blocks: int) -> None:
        super().__init__()
        self.latent = latent
        self.conv_in = Conv(3, channels[0])
        self.down = nn.ModuleList()
        for level, width in enumerate(channels):
            down = Level(width, blocks)
            if level + 1 < len(channels):
                down.downsample = Downsample(width, channels[level + 1], temporal=level >= 2)
            self.down.append(down)
        self.mid = Middle(channels[-1])
        self.norm_out = _norm(channels[-1])
        self.conv_out = Conv(channels[-1], 2 * latent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv_in(x)
        for down in self.down:
            h = down(h)
        h = self.mid(h)
        b, _, t, height, width = h.shape
        shortcut = h.reshape(b, 2 * self.latent, -1, t, height, width).mean(2)
        return self.conv_out(functional.silu(self.norm_out(h))) + shortcut


class Decoder(nn.Module):
    def __init__(self, channels: Sequence[int], latent: int, blocks: int) -> None:
        super().__init__()
        self.repeats = channels[0] // latent
        self.conv_in = Conv(latent, channels[0])
        self.mid = Middle(channels[0])
        self.up = nn.ModuleList()
        for level, width in enumerate(channels):
            up = Level(width, blocks + 1)
            if level + 1 < len(channels):
                up.upsample = Upsample(width, channels[level + 1], temporal=level < 2)
            self.up.append(up)
        self.norm_out = _norm(channels[-1])
        self.conv_out = Conv(channels[-1], 3)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        h = self.conv_in(z) + z.repeat_interleave(self.repeats, dim=1)
        h = self.mid(h)
        for up in self.up:
            h = up(h)
        return self.conv_out(functional.silu(self.norm_out(h)))


class VAE(nn.Module):
    """Pictures `[B, 3, H, W]` in -1..1 to latents `[B, latent, H/16, W/16]` and back.

    Args:
        channels: width of the five levels, finest first.
        latent: channels of a latent.
        blocks: residual blocks per encoder level; the decoder has one more.
    """

    def __init__(self, channels: Sequence[int], latent: int, blocks: int) -> None:
        super().__init__()
        self.encoder = Encoder(channels, latent, blocks)
        self.decoder = Decoder(channels[::-1], latent, blocks)
        self.frames = FRAMES

    def flat_(self, flat: bool = True) -> "VAE":
        """Compute on one frame from here on, or on all again."""
        for module in self.modules():
            if isinstance(module, Conv | Downsample | Upsample):
                module.flat = flat
        self.frames = 1 if flat else FRAMES
        return self

    @torch.no_grad()
    def make_flat_(self) -> "VAE":
        """Change the weights so that all frames give what one frame gives."""
        for module in self.modules():
            if isinstance(module, Conv) and module.kernel_size[0] == 3:
                module.weight[:, :, ::2] = 0
        for module in self.modules():
            if isinstance(module, Upsample):
                module.make_frames_equal_()
        return self

    def encode(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and logarithm of the variance of the latents, not scaled."""
        moments = self.encoder(pictures[:, :, None].expand(-1, -1, self.frames, -1, -1))[:, :, 0]
        mean, log_variance = moments.chunk(2, dim=1)
        return mean, log_variance.clamp(-30, 20)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pictures of latents that are not scaled."""
        return self.decoder(latents[:, :, None])[:, :, -1]
