# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer with HunyuanImage-3.0's special tokens: small, and needs no training."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_RATIOS = 40
"""`<img_ratio_i>` tokens; the model's resolution group uses 37 of them."""

_BOS, _EOS, _PAD = "<|startoftext|>", "<|endoftext|>", "<pad>"
_MARKS = (
    *("<boi>", "<eoi>", "<img>", "<cfg>", "<timestep>", "<guidance>", "<timestep_r>", "<joint_img_sep>"),
    *("<answer>", "</answer>", "<think>", "</think>", "<recaption>", "</recaption>"),
)


def special_tokens(image_base_size: int) -> tuple[str, ...]:
    """All special tokens in the order of their ids, which start at 256, after the bytes."""
    ratios = (f"<img_ratio_{index}>" for index in range(NUM_RATIOS))
    return (_BOS, _EOS, _PAD, *_MARKS, f"<img_size_{image_base_size}>", *ratios)


def special_ids() -> dict[str, int]:
    """The ids that `config.json` repeats; they are the same for every base size."""
    return {token: 256 + index for index, token in enumerate((_BOS, _EOS, _PAD, *_MARKS))}


def build_tokenizer(image_base_size: int) -> Tokenizer:
    """One token per byte of UTF-8, no merges, and the special tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens(image_base_size)]
    )
    return tokenizer


def write_tokenizer(folder: Path, image_base_size: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`; `AutoTokenizer` needs no remote code."""
    build_tokenizer(image_base_size).save(str(folder / "tokenizer.json"))
    config = {
        "backend": "tokenizers",
        "bos_token": _BOS,
        "eos_token": _EOS,
        "extra_special_tokens": list(special_tokens(image_base_size)[3:]),
        "model_max_length": 1_000_000_000,
        "pad_token": _PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
