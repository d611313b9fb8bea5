# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's Ascend NPU platform with omni-ep's ops.

No NPU was available: contract tests with stubbed `torch_npu` and `vllm_ascend` are all that covers this file.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_omni.platforms.npu.platform import NPUOmniPlatform

from omni_ep.ops import HUNYUAN_FUSED_MOE
from omni_ep.platforms.interface import ExpertParallelPlatform
from omni_ep.platforms.npu.fused_moe import require_vllm_ascend_moe

if TYPE_CHECKING:
    from torch import nn


class NpuOmniPlatform(ExpertParallelPlatform, NPUOmniPlatform):
    """Everything but the ops is vLLM-Omni's; `is_npu()` stays true."""

    omni_ep_platform = "npu"
    diffusion_op_impls: ClassVar[Mapping[str, str]] = {
        HUNYUAN_FUSED_MOE: "omni_ep.platforms.npu.fused_moe.NpuHunyuanFusedMoE",
    }

    @classmethod
    def prepare_diffusion_op_runtime(cls, op_name: str, **kwargs: Any) -> None:
        """As the mixin's, after a check of vllm-ascend: an error must come before groups are made."""
        if op_name == HUNYUAN_FUSED_MOE:
            require_vllm_ascend_moe()
        super().prepare_diffusion_op_runtime(op_name, **kwargs)

    @classmethod
    def get_diffusion_packed_modules_mapping(
        cls, model_class: "type[nn.Module]"
    ) -> dict[str, list[str]] | None:
        """vLLM-Omni's mapping for the class, or for the nearest base that has one.

        vLLM-Omni looks a pipeline up by its class name, which a subclass need not share.
        """
        mappings = (
            super(NpuOmniPlatform, cls).get_diffusion_packed_modules_mapping(base)
            for base in model_class.__mro__
        )
        return next((mapping for mapping in mappings if mapping is not None), None)
