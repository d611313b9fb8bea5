# SPDX-License-Identifier: Apache-2.0
"""Entry points: names things, computes nothing.

vLLM and vLLM-Omni call these in the orchestrator, the stage process and every worker.
``OMNI_EP_PLATFORM=none`` keeps omni-ep's platforms out; ``VLLM_PLUGINS`` selects plugins.
"""


def vllm_platform() -> str | None:
    """vLLM's platform where no accelerator is present, else ``None``."""
    from omni_ep.platforms.interface import cpu_platform_requested_and_possible

    if cpu_platform_requested_and_possible():
        return "omni_ep.platforms.cpu.vllm_platform.CpuVllmPlatform"
    return None


def omni_platform() -> str | None:
    """vLLM-Omni's platform for the hardware found, or ``None`` to leave stock in place."""
    from omni_ep.platforms.interface import omni_platform_qualname

    return omni_platform_qualname()


def register() -> None:
    """Register the pipelines that replace vLLM-Omni's.

    A pipeline is imported when it is used; until then vLLM-Omni is as it was.
    """
    from vllm_omni.diffusion.registry import register_diffusion_model

    register_diffusion_model(
        "HunyuanImage3ForCausalMM",
        module_name="omni_ep.models.hunyuan_image3.pipeline",
        class_name="HunyuanImage3Pipeline",
    )


def register_configs() -> None:
    """Make transformers read our models' configs without their code, in this process.

    Pipelines do this when they are used. vLLM-Omni's engine reads a config before that, and
    complains twice, two seconds apart, about code that nothing needs.
    """
    from importlib import import_module

    import_module("omni_ep.models.hunyuan_image3.config").register_config()
