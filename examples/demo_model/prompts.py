# SPDX-License-Identifier: Apache-2.0
"""Prompts to tokens, in the order HunyuanImage-3's template for pretraining puts them."""

from collections.abc import Sequence as Texts

import torch
from tokenizers import Tokenizer

from examples.demo_model.model import VAE_FACTOR, Sequence


def image_ratio(height: int, width: int, base: int) -> int:
    """Number of the `<img_ratio_i>` token for a picture of `height` and `width` pixels.

    The model counts the sizes between half as high and half as wide in steps of base / 16, widest first.
    """
    step = base // 16
    limits = base // 2, base * 2

    def walk(direction: int) -> list[float]:
        ratios, h, w = [], base, base
        while (h, w) != (limits[::-1] if direction > 0 else limits):
            h = min(max(h + direction * step, limits[0]), limits[1])
            w = min(max(w - direction * step, limits[0]), limits[1])
            ratios.append(h / w)
        return ratios

    ratios = sorted([1.0, *walk(1), *walk(-1)])
    return min(range(len(ratios)), key=lambda index: abs(ratios[index] - height / width))


def encode(
    tokenizer: Tokenizer, prompts: Texts[str], height: int, width: int, base: int, *, conditional: bool = True
) -> Sequence:
    """Tokens of prompts that are equally many tokens long, for pictures of `height` and `width` pixels.

    Args:
        conditional: False puts `<cfg>` in the place of every token of the prompt: the branch that
            guidance leads away from.

    Raises:
        ValueError: the prompts differ in length.
    """
    rows = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        raise ValueError(f"prompts of one batch must be equally long, not {sorted(lengths)} tokens")
    if not conditional:
        rows = [[special(tokenizer, "<cfg>")] * len(row) for row in rows]
    ratio = image_ratio(height, width, base)
    tokens = (height // VAE_FACTOR) * (width // VAE_FACTOR)
    before = [special(tokenizer, "<|startoftext|>")]
    names = ("<boi>", f"<img_size_{base}>", f"<img_ratio_{ratio}>", "<timestep>", *["<img>"] * tokens)
    after = [special(tokenizer, name) for name in names]
    ids = torch.tensor([before + row + after for row in rows])
    return Sequence(ids, ids.shape[1] - tokens, height // VAE_FACTOR, width // VAE_FACTOR)


def special(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return int(number)
