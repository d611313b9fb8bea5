# SPDX-License-Identifier: Apache-2.0
"""How many tokens a rank handles in a denoising step.

HunyuanImage-3's sequence is ``<bos> prompt <boi> <size> <ratio> <timestep> image <eoi>``. The first step runs
it whole; later steps run only ``<timestep> image`` against the cached rest
(``hunyuan_image3_transformer.py:2500-2625``). Sequence parallelism splits the part from ``<timestep>`` on,
padded to equal shards, and repeats the part before it on every rank.
"""

from dataclasses import dataclass

from omni_ep.layout import ParallelLayout, require_positive_int

TEXT_MARKS = 4
"""``<bos> <boi> <img_size> <img_ratio>`` around the prompt's own tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Tokens on one rank, over all its sequences."""

    sequences: int
    repeated: int
    """Prompt tokens, which every SP rank computes again."""
    split: int
    """Tokens of the part that SP splits, padding included."""
    context: int
    """Length of one whole sequence, which attention looks back on."""

    @property
    def total(self) -> int:
        """What the MoE layers of this rank see."""
        return self.repeated + self.split


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One request. Sizes are in pixels; tokens are counted per sequence.

    Raises:
        ConfigurationError: if a size is not a whole number of at least 1.
    """

    height: int = 1024
    width: int = 1024
    pixels_per_token: int = 16
    """Side of the square that one image token stands for."""
    prompt_tokens: int = 128
    batch: int = 1
    guidance: bool = True
    """Classifier-free guidance: a second sequence without the prompt."""
    image_tokens_override: int | None = None
    """Tokens of the split part where they do not follow from a picture's size (language models, video)."""

    def __post_init__(self) -> None:
        for name in ("height", "width", "pixels_per_token", "prompt_tokens", "batch"):
            require_positive_int(f"the workload's {name.replace('_', ' ')}", getattr(self, name))

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture."""
        if self.image_tokens_override is not None:
            return self.image_tokens_override
        return (self.height // self.pixels_per_token) * (self.width // self.pixels_per_token)

    def first_step(self, layout: ParallelLayout) -> StepTokens:
        """The step that also runs the prompt."""
        prompt = self.prompt_tokens + TEXT_MARKS
        return self._step(layout, prompt, self.image_tokens + 2)

    def later_step(self, layout: ParallelLayout) -> StepTokens:
        """Every step after the first."""
        return self._step(layout, 0, self.image_tokens + 1)

    def _step(self, layout: ParallelLayout, prompt: int, split: int) -> StepTokens:
        branches = 2 if self.guidance and layout.cfg == 1 else 1
        sequences = self.batch * branches
        return StepTokens(
            sequences=sequences,
            repeated=sequences * prompt,
            split=sequences * -(-split // layout.sp),
            context=self.prompt_tokens + TEXT_MARKS + self.image_tokens + 2,
        )
