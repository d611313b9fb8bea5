# SPDX-License-Identifier: Apache-2.0
"""`hunyuan_fused_moe` on Ascend NPUs: vllm-ascend's experts behind vLLM's FusedMoE.

vLLM-Omni's NPU platform prepares them: when its adapter asks for the op "fused_moe" it registers
vllm-ascend's MoERunner and RoutedExperts in place of vLLM's, makes the `_MC2` group over the EP ranks, and a
hook sets the communication method and `max_tokens_across_dp` on the forward context from vLLM's DP group.
That group is the folded one, and the experts are built with a PCP size of 1, so that vllm-ascend gathers
tokens over SP×CFG×DP once and skips its PCP gather.

No NPU was available: contract tests with stubbed `torch_npu` and `vllm_ascend` are all that covers this file.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from omni_ep.errors import ConfigurationError
from omni_ep.platforms.fused_moe import build_fused_moe

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_NEEDED_MODULE = "vllm_ascend.ops.fused_moe.routed_experts"


def require_vllm_ascend_moe() -> None:
    """Check that vllm-ascend carries the MoE modules which vLLM-Omni 0.30's NPU file imports.

    Raises:
        ConfigurationError: it does not, as is the case for its releases up to 0.26.0rc1.
    """
    try:
        import_module(_NEEDED_MODULE)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("vllm_ascend"):
            raise
        raise ConfigurationError(
            f"{_installed_vllm_ascend()} has no module {_NEEDED_MODULE}, which vLLM-Omni 0.30's experts need "
            f"on an NPU. Releases up to 0.26.0rc1 lack it; vllm-ascend's main branch has it since August "
            f"2026. Install vllm-ascend from its main branch, built against this vLLM."
        ) from error


class NpuHunyuanFusedMoE:
    """Constructing it returns vllm-ascend's MoE runner. Arguments, shapes and errors: `build_fused_moe`.

    Raises:
        ConfigurationError: vLLM built a runner of another class, so vllm-ascend's was not registered.
    """

    def __new__(  # type: ignore[misc]
        cls,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        renormalize: bool,
        shared_experts: "nn.Module | None",
        quant_config: "QuantizationConfig | None" = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> "nn.Module":
        require_vllm_ascend_moe()
        runner = build_fused_moe(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            renormalize=renormalize,
            shared_experts=shared_experts,
            quant_config=quant_config,
            prefix=prefix,
            **kwargs,
        )
        _require_ascend_runner(runner)
        return runner


def _require_ascend_runner(runner: object) -> None:
    # vLLM's own runner would be built without a word, and its CUDA kernels fail far from here.
    from vllm_ascend.ops.fused_moe.fused_moe import AscendMoERunner

    if not isinstance(runner, AscendMoERunner):
        found = f"{type(runner).__module__}.{type(runner).__qualname__}"
        raise ConfigurationError(
            f"the experts were built as {found}; needed vllm-ascend's AscendMoERunner. Another package has "
            f"claimed 'MoERunner' in vLLM's registry of out-of-tree ops: uninstall it, or exclude it with "
            f"VLLM_PLUGINS."
        )


def _installed_vllm_ascend() -> str:
    try:
        return f"vllm-ascend {version('vllm-ascend')}"
    except PackageNotFoundError:
        return "the vllm-ascend on this machine (no version recorded)"
