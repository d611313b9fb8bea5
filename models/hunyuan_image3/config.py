# SPDX-License-Identifier: Apache-2.0
"""HunyuanImage-3's configuration without code from the checkpoint folder.

The checkpoint carries ``auto_map`` and a Python file, and vLLM-Omni asks for them
unconditionally (``pipeline_hunyuan_image3.py:187,377``). Everything the pipeline needs stands
in ``config.json``; the Python file runs only if the user asked for it.
"""

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

MODEL_TYPE = "hunyuan_image_3_moe"


class HunyuanImage3Config(PretrainedConfig):
    """The keys of ``config.json`` as attributes.

    transformers 5 folds ``rope_theta`` and ``rope_scaling`` into ``rope_parameters``; the
    pipeline reads them, and ``use_cache``, as plain attributes.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        rope_theta: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.use_cache = use_cache
        super().__init__(**kwargs)


def register_config() -> None:
    """Make transformers resolve the model type to the class above, in this process.

    Without it, loading the tokenizer asks on the terminal whether to run the checkpoint's code.
    """
    AutoConfig.register(MODEL_TYPE, HunyuanImage3Config, exist_ok=True)


def load_config(model: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read the configuration of a checkpoint folder or hub name.

    Args:
        model: folder or hub name.
        trust_remote_code: use the class that the checkpoint ships, which runs its code.
    """
    if trust_remote_code:
        raw, _ = PretrainedConfig.get_config_dict(model)
        if reference := raw.get("auto_map", {}).get("AutoConfig"):
            remote_class: type[PretrainedConfig] = get_class_from_dynamic_module(reference, model)
            return remote_class.from_pretrained(model)
    return HunyuanImage3Config.from_pretrained(model)
