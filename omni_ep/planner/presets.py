# SPDX-License-Identifier: Apache-2.0
"""Published models that can be planned by name, without their files.

A preset is the part of a model's ``config.json`` that the planner reads. ``source`` says where the figures
come from; ``unchecked`` says which of them could not be compared with the model's own config when the preset
was written, because that file was out of reach. Give the real ``config.json`` to be sure.
"""

from dataclasses import dataclass
from typing import Any

from omni_ep.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model by name."""

    name: str
    config: dict[str, Any]
    source: str
    unchecked: str
    dtype: str = "bf16"
    """Number format the figures were published in."""


_HUNYUAN_IMAGE3 = Preset(
    name="hunyuan-image-3",
    config={
        "architectures": ["HunyuanImage3ForCausalMM"],
        "model_type": "hunyuan_image_3_moe",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "use_qk_norm": True,
        "attention_bias": False,
        "num_experts": 64,
        "moe_topk": 8,
        "moe_intermediate_size": 3072,
        "intermediate_size": 3072,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "moe_layer_num_skipped": 0,
        "vocab_size": 133120,
        "patch_size": 1,
        "patch_embed_hidden_dim": 1024,
        "image_base_size": 1024,
        "vae_downsample_factor": [16, 16],
        "vae": {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 32,
            "block_out_channels": [128, 256, 512, 1024, 1024],
            "layers_per_block": 2,
            "ffactor_spatial": 16,
            "ffactor_temporal": 4,
            "sample_size": 384,
            "downsample_match_channel": True,
            "upsample_match_channel": True,
        },
        "vit": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "num_channels": 3,
            "patch_size": 16,
            "num_patches": 256,
        },
        "vit_aligner": {"projector_type": "mlp_gelu", "input_dim": 1152, "n_embed": 4096, "depth": 2},
    },
    source="transformer: the model card (80B parameters; 32 layers, 64 experts top-8) and a public port of "
    "its config (width, heads, expert and shared widths, vocabulary, patch embedding); VAE: the published "
    "config of the same AutoencoderKLConv3D class; ViT: siglip2-so400m-patch16-naflex",
    unchecked="the VAE's channels and blocks and the ViT against HunyuanImage-3.0's own config.json",
)

_LINGBOT_VIDEO = Preset(
    name="lingbot-video-moe",
    config={
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "n_shared_experts": 1,
    },
    source="SGLang pull request 37357 (LingBot-Video MoE 30B-A3B): layers, width, experts, top-k, one shared "
    "expert",
    unchecked="all of it against the model's config.json; the number of heads is the default of the public "
    "transformer class; attention, embeddings, VAE and text encoder are not counted",
)

_QWEN36 = Preset(
    name="qwen3.6-35b-a3b-moe",
    config={
        "num_hidden_layers": 30,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    source="the published expert-parallel override for 4 x 32 GiB cards: 256 experts, width 2048, expert "
    "width 512, 30 MoE layers, fp16; 22.5 GiB of experts per card at TP=2",
    unchecked="30 MoE layers is the override's figure; public ports of the model have 40 layers, all with "
    "experts, of which 30 use linear attention, which would make it a third more; attention and embeddings "
    "are not counted",
    dtype="fp16",
)

_DEEPSEEK_V2 = Preset(
    name="deepseek-v2",
    config={
        "num_hidden_layers": 60,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
    },
    source="the DeepSeek-V2 paper (arXiv 2405.04434, section 3.1.2) and a public training recipe made from "
    "its config.json, which agree",
    unchecked="vocab_size and qk_nope_head_dim against config.json itself",
)

_MIXTRAL = Preset(
    name="mixtral-8x7b",
    config={
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 14336,
        "vocab_size": 32000,
    },
    source="the Mixtral paper (arXiv 2401.04088, table 1)",
    unchecked="nothing beyond the paper against config.json itself",
)

PRESETS = {
    preset.name: preset for preset in (_HUNYUAN_IMAGE3, _LINGBOT_VIDEO, _QWEN36, _DEEPSEEK_V2, _MIXTRAL)
}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigurationError: naming the ones there are.
    """
    if name not in PRESETS:
        raise ConfigurationError(
            f"{name!r} is neither a checkpoint folder, nor a config.json, nor a preset; presets: "
            f"{', '.join(PRESETS)}"
        )
    return PRESETS[name]
