# SPDX-License-Identifier: Apache-2.0
"""`config.json` and `generation_config.json` with the published checkpoint's keys, and no remote code."""

from typing import Any

from omni_ep.checkpoint import inventory
from omni_ep.checkpoint.spec import VAE_FACTOR, VAE_TEMPORAL_FACTOR, CheckpointSpec
from omni_ep.checkpoint.tokenizer import special_ids

_TORCH_DTYPE = {"bf16": "bfloat16", "fp32": "float32"}


def model_config(spec: CheckpointSpec) -> dict[str, Any]:
    """The content of `config.json`."""
    ids = special_ids()
    return {
        "architectures": ["HunyuanImage3ForCausalMM"],
        "model_type": "hunyuan_image_3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.moe_intermediate_size,
        "moe_intermediate_size": [spec.moe_intermediate_size] * spec.num_layers,
        "moe_layer_num_skipped": 0,
        "moe_topk": [spec.top_k] * spec.num_layers,
        "num_experts": spec.num_experts,
        "num_shared_expert": [spec.num_shared_experts] * spec.num_layers,
        "use_mixed_mlp_moe": spec.num_shared_experts > 0,
        "norm_topk_prob": True,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "use_qk_norm": True,
        "use_cla": False,
        "cla_share_factor": 2,
        "max_position_embeddings": 22800,
        "mlp_bias": False,
        "norm_type": "rms",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "custom",
        },
        "vocab_size": inventory.VOCAB_SIZE,
        "tie_word_embeddings": False,
        "torch_dtype": _TORCH_DTYPE[spec.dtype],
        "initializer_range": 0.02,
        "use_cache": True,
        "img_proj_type": "unet",
        "patch_size": 1,
        "patch_embed_hidden_dim": spec.patch_embed_hidden_dim,
        "image_base_size": spec.image_base_size,
        "vae_downsample_factor": [VAE_FACTOR, VAE_FACTOR],
        "bos_token_id": ids["<|startoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<pad>"],
        "pad_id": ids["<pad>"],
        "image_token_id": ids["<img>"],
        "im_start_id": ids["<boi>"],
        "im_end_id": ids["<eoi>"],
        "vae": _vae_config(spec),
        "vae_type": "hunyuan-image-vae-v1",
        **_vision_config(spec),
    }


def _vae_config(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "_class_name": "AutoencoderKLConv3D",
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": spec.vae_latent_channels,
        "block_out_channels": list(spec.vae_block_channels),
        "layers_per_block": spec.vae_layers_per_block,
        "ffactor_spatial": VAE_FACTOR,
        "ffactor_temporal": VAE_TEMPORAL_FACTOR,
        "sample_size": 384,
        "sample_tsize": 96,
        "scaling_factor": 0.562679178327931,
        "downsample_match_channel": True,
        "upsample_match_channel": True,
    }


def _vision_config(spec: CheckpointSpec) -> dict[str, Any]:
    return {
        "vit": {
            "hidden_size": inventory.VIT_HIDDEN,
            "intermediate_size": inventory.VIT_INTERMEDIATE,
            "num_attention_heads": inventory.vision_heads(spec),
            "num_hidden_layers": inventory.VIT_LAYERS,
            "num_channels": 3,
            "patch_size": inventory.VIT_PATCH,
            "num_patches": inventory.VIT_PATCHES,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-06,
            "attention_dropout": 0.0,
            "model_type": "siglip2_vision_model",
        },
        "vit_type": "siglip2-so400m-patch16-naflex",
        "vit_aligner": {
            "projector_type": "mlp_gelu",
            "input_dim": inventory.VIT_HIDDEN,
            "n_embed": spec.hidden_size,
            "depth": 2,
        },
        "vit_processor": {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "max_num_patches": inventory.VIT_PATCHES,
            "patch_size": inventory.VIT_PATCH,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "image_processor_type": "Siglip2ImageProcessor",
        },
    }


def generation_config(spec: CheckpointSpec) -> dict[str, Any]:
    """The content of `generation_config.json`: few steps, because random weights paint no better in many."""
    ids = special_ids()
    image_tokens = (spec.image_base_size // VAE_FACTOR) ** 2
    return {
        "bos_token_id": ids["<|startoftext|>"],
        "eos_token_id": [ids["<|endoftext|>"]],
        "pad_token_id": ids["<pad>"],
        "do_sample": True,
        "top_k": 1024,
        "top_p": 0.95,
        "temperature": 0.6,
        "max_length": max(4096, 2 * image_tokens),
        "sequence_template": "pretrain",
        "diff_infer_steps": 4,
        "diff_guidance_scale": 5.0,
        "flow_shift": 3.0,
        "use_system_prompt": "None",
        "drop_think": False,
        "bot_task": "image",
    }
