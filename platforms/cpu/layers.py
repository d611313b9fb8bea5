# SPDX-License-Identifier: Apache-2.0
"""vLLM layers that need a compiled CPU kernel, replaced by their native forward.

Some activations look up ``torch.ops._C`` when they are constructed on CPU
(``layers/activation.py:135,431,561,594,627``); the accelerator wheel's library cannot be
loaded without a driver, so the look-up fails. vLLM's out-of-tree registration is the
documented way to replace such a layer. Where the kernels are present they stay.
"""

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import activation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from omni_ep.platforms.cpu.experts import CpuUnquantizedFusedMoEMethod


class NativeActivation(CustomOp):
    """Mixed in before an activation: construct it without looking for its kernel."""

    def __init__(self, *, compile_native: bool = False) -> None:
        CustomOp.__init__(self, compile_native=compile_native)

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_native(x)


class NativeSiluAndMul(NativeActivation, activation.SiluAndMul):
    pass


class NativeGeluAndMul(NativeActivation, activation.GeluAndMul):
    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GELU's approximation is 'none' or 'tanh', got {approximate!r}")
        super().__init__()
        self.approximate = approximate


class NativeNewGELU(NativeActivation, activation.NewGELU):
    pass


class NativeFastGELU(NativeActivation, activation.FastGELU):
    pass


class NativeQuickGELU(NativeActivation, activation.QuickGELU):
    pass


#: vLLM's class name → replacement, and the kernel whose absence makes it necessary.
_REPLACEMENTS: dict[str, tuple[type[CustomOp], str]] = {
    "SiluAndMul": (NativeSiluAndMul, "silu_and_mul"),
    "GeluAndMul": (NativeGeluAndMul, "gelu_and_mul"),
    "NewGELU": (NativeNewGELU, "gelu_new"),
    "FastGELU": (NativeFastGELU, "gelu_fast"),
    "QuickGELU": (NativeQuickGELU, "gelu_quick"),
}


def register_native_layers() -> None:
    """Register the replacements once; what somebody else registered is left alone."""
    for name, (replacement, kernel) in _REPLACEMENTS.items():
        if name not in op_registry_oot and not hasattr(torch.ops._C, kernel):
            CustomOp.register_oot(replacement, name=name)
    method = UnquantizedFusedMoEMethod.__name__
    if method not in op_registry_oot:
        CustomOp.register_oot(CpuUnquantizedFusedMoEMethod, name=method)
