# SPDX-License-Identifier: Apache-2.0
"""Sizes and tokenizer of the demo model, and its weights as a checkpoint in HunyuanImage-3's layout."""

import json
from collections.abc import Sequence as Texts
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo_model.model import DemoModel
from examples.demo_model.pictures import SIDE
from omni_ep.checkpoint import CheckpointSpec, tensors
from omni_ep.checkpoint.config_files import generation_config, model_config
from omni_ep.checkpoint.tokenizer import special_tokens, write_tokenizer

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained weights."""

SPEC = CheckpointSpec(
    num_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=16,
    top_k=4,
    moe_intermediate_size=128,
    patch_embed_hidden_dim=128,
    image_base_size=SIDE,
    vae_block_channels=(64, 64, 64, 64, 64),
    # Most of a VAE's time goes into its finest level; flat shapes need no more than the decoder's one block.
    vae_layers_per_block=0,
)
VOCAB_SIZE = 512
"""Bytes, about 190 merges (every word of the captions is one token) and the special tokens."""

FLOW_SHIFT = 2.0
STEPS = 20
GUIDANCE = 3.0


def build_tokenizer(captions: Texts[str]) -> Tokenizer:
    """Byte-level BPE on the captions; any other text still has its bytes."""
    special = special_tokens(SIDE)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(captions, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def config(tokenizer: Tokenizer, scaling_factor: float) -> dict[str, Any]:
    """The content of `config.json`."""
    content = model_config(SPEC)
    ids = {
        "bos_token_id": "<|startoftext|>",
        "eos_token_id": "<|endoftext|>",
        "pad_token_id": "<pad>",
        "pad_id": "<pad>",
        "image_token_id": "<img>",
        "im_start_id": "<boi>",
        "im_end_id": "<eoi>",
    }
    content |= {key: tokenizer.token_to_id(token) for key, token in ids.items()}
    content["vocab_size"] = VOCAB_SIZE
    content["vae"]["scaling_factor"] = scaling_factor
    return content


def write(folder: Path, model: DemoModel, tokenizer: Tokenizer) -> None:
    """Write the checkpoint folder: bf16 weights in one file; the vision tower, which only reads, is zero."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = config(tokenizer, model.config.vae_scaling_factor)
    write_tokenizer(folder, SIDE)
    tokenizer.save(str(folder / "tokenizer.json"))
    generation = generation_config(SPEC) | {key: settings[key] for key in ("bos_token_id", "pad_token_id")}
    generation |= {
        "eos_token_id": [settings["eos_token_id"]],
        "diff_infer_steps": STEPS,
        "diff_guidance_scale": GUIDANCE,
        "flow_shift": FLOW_SHIFT,
    }
    trained = model.state_dict()
    weights = {}
    for name, shape in tensors(SPEC):
        if name.startswith("vision_"):
            weights[name] = torch.zeros(shape, dtype=torch.bfloat16)
        else:
            weights[name] = trained.pop(name).to(torch.bfloat16).contiguous()
    if trained:
        raise ValueError(f"the layout has no tensor {min(trained)}")
    file = "model-0001-of-0001.safetensors"
    save_file(weights, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(w.numel() * 2 for w in weights.values())},
        "weight_map": dict.fromkeys(weights, file),
    }
    for name, content in (
        ("config.json", settings),
        ("generation_config.json", generation),
        ("model.safetensors.index.json", index),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
