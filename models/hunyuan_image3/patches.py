# SPDX-License-Identifier: Apache-2.0
"""Names that vLLM-Omni hard-codes while it builds HunyuanImage-3, replaced for that moment.

Each substitution lasts for one ``with`` block and names the upstream line that forces it;
``tests/unit/test_patches.py`` fails when upstream no longer needs it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from transformers import PretrainedConfig
from vllm_omni.diffusion.model_loader import diffusers_loader
from vllm_omni.diffusion.models.hunyuan_image3 import hunyuan_image3_transformer, pipeline_hunyuan_image3

from omni_ep.models.hunyuan_image3.config import load_config
from omni_ep.models.hunyuan_image3.moe import HunyuanSparseMoeBlock


@contextmanager
def _substitute(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def config_from_json(*, trust_remote_code: bool) -> Iterator[None]:
    """``get_config(..., trust_remote_code=True)`` is hard-coded at
    ``pipeline_hunyuan_image3.py:187`` and ``:377``."""

    def get_config(model: str, trust_remote_code: bool = trust_remote_code) -> PretrainedConfig:
        return load_config(model, trust_remote_code=user_trusts)

    user_trusts = trust_remote_code
    with _substitute(pipeline_hunyuan_image3, "get_config", get_config):
        yield


@contextmanager
def expert_parallel_moe_block() -> Iterator[None]:
    """The decoder layer names its MoE class at ``hunyuan_image3_transformer.py:1945``.

    Replacing the block after construction would allocate every layer's experts twice.
    """
    with _substitute(hunyuan_image3_transformer, "HunYuanSparseMoeBlock", HunyuanSparseMoeBlock):
        yield


@contextmanager
def weights_iterator(read: Callable[[Sequence[str], int], Iterator[Any]]) -> Iterator[None]:
    """``diffusers_loader.py:362`` and ``:375`` name the functions that go through every shard.

    vLLM-Omni hard-codes its loader class (``diffusion_model_runner.py:339``) and calls one of the two,
    multi-threaded or single, at the first tensor that ``load_weights`` asks for. Everything around
    them, from finding the files to checkpoint adapters for quantized weights, stays upstream's.

    Args:
        read: from shard paths and a number of threads to ``(name, tensor)`` pairs.
    """

    def multi_thread(files: Sequence[str], use_tqdm: bool, max_workers: int = 4) -> Iterator[Any]:
        return read(files, max_workers)

    def single_thread(files: Sequence[str], *args: Any, **kwargs: Any) -> Iterator[Any]:
        return read(files, 1)

    with (
        _substitute(diffusers_loader, "multi_thread_safetensors_weights_iterator", multi_thread),
        _substitute(diffusers_loader, "safetensors_weights_iterator", single_thread),
    ):
        yield
