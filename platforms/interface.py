# SPDX-License-Identifier: Apache-2.0
"""What omni-ep adds to a vLLM-Omni platform class.

vLLM-Omni's platforms have a hook to prepare an op's runtime, but none that names an op's implementation. The
mixin adds it, so that a model can ask the platform instead of branching on the device.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from omni_ep.ops import platform_specific_ops, registered_ops, unknown_op_error
from omni_ep.platforms.detection import accelerator_present
from omni_ep.platforms.selection import (
    check_platform_request,
    cpu_platform_requested_and_possible,
    omni_platform_qualname,
    select_platform,
)

if TYPE_CHECKING:
    from vllm_omni.platforms.interface import OmniPlatform as _Base
else:
    # A mixin with vLLM-Omni's interface as a real base would drag torch into every platform plugin.
    _Base = object

__all__ = [
    "ExpertParallelPlatform",
    "accelerator_present",
    "check_platform_request",
    "cpu_platform_requested_and_possible",
    "omni_platform_qualname",
    "select_platform",
]


class ExpertParallelPlatform(_Base):
    """Mixin: goes before the vLLM-Omni platform class among the bases."""

    omni_ep_platform: ClassVar[str]
    """Key of the platform in `OMNI_EP_PLATFORM` and in the names of entry points, such as `cuda`."""

    diffusion_op_impls: ClassVar[Mapping[str, str]]
    """Op name → dotted path of its implementation on this platform."""

    @classmethod
    def known_diffusion_ops(cls) -> frozenset[str]:
        return frozenset(cls._impl_table())

    @classmethod
    def get_diffusion_model_impl_qualname(cls, op_name: str) -> str:
        """Dotted path of the implementation of `op_name`.

        In order: an installed package's `<this platform>.<op>`, this class's own table, a package's
        `any.<op>`. So a package replaces one of our implementations only by naming the platform.

        Raises:
            ConfigurationError: nobody implements the op here.
        """
        table = cls._impl_table()
        if op_name not in table:
            raise unknown_op_error(op_name, cls.omni_ep_platform, table)
        return table[op_name]

    @classmethod
    def prepare_diffusion_op_runtime(cls, op_name: str, **kwargs: Any) -> None:
        """Make what `op_name` needs before it is built. Idempotent.

        Ops known here are expert-parallel: they get vLLM's EP group and the folded DP group. Other names,
        such as vLLM-Omni's own "fused_moe", go to vLLM-Omni untouched.
        """
        super().prepare_diffusion_op_runtime(op_name, **kwargs)
        if op_name in cls.known_diffusion_ops():
            from omni_ep.groups import prepare_expert_parallel

            prepare_expert_parallel()

    @classmethod
    def _impl_table(cls) -> dict[str, str]:
        registered = registered_ops(cls.omni_ep_platform)
        overriding = platform_specific_ops(cls.omni_ep_platform)
        table = registered | dict(cls.diffusion_op_impls)
        return table | {op: registered[op] for op in overriding}
