# SPDX-License-Identifier: Apache-2.0
"""Contract tests of the NPU platform without an NPU.

`torch_npu`, `acl`, `mooncake` and `vllm_ascend` are stubbed in a process of its own, in which this file runs
itself; vLLM and vLLM-Omni are the real ones. The tests judge what that process reports.
"""

import enum
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ARGUMENTS = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "renormalize": True,
    "shared_experts": None,
    "prefix": "experts",
}
EP_RANKS = [[0, 1, 2, 3]]


class MoECommType(enum.Enum):
    ALLGATHER = 0
    MC2 = 1
    ALLTOALL = 2


class AscendDeviceType(enum.Enum):
    A2 = 0
    A3 = 1
    _310P = 2
    A5 = 3


def stub(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def install_stubs() -> None:
    import torch
    from vllm.platforms import Platform

    class AscendMoERunner(torch.nn.Module):
        pass

    class AscendRoutedExperts(torch.nn.Module):
        pass

    torch.npu = SimpleNamespace(device_count=lambda: 0, is_available=lambda: True)  # type: ignore[attr-defined]
    for name in ("torch_npu", "acl", "mooncake", "vllm_ascend", "vllm_ascend.ops", "vllm_ascend.distributed"):
        stub(name)
    stub("vllm_ascend.platform", NPUPlatform=type("NPUPlatform", (Platform,), {"device_type": "npu"}))
    stub("vllm_ascend.ascend_forward_context", MoECommType=MoECommType)
    stub("vllm_ascend.utils", AscendDeviceType=AscendDeviceType, get_ascend_device_type=lambda: None)
    stub("vllm_ascend.distributed.parallel_state", _MC2=None)
    stub("vllm_ascend.ops.fused_moe")
    methods = {kind: f"{kind.name} method" for kind in MoECommType}
    stub("vllm_ascend.ops.fused_moe.moe_comm_method", _MoECommMethods=methods)
    stub("vllm_ascend.ops.fused_moe.fused_moe", AscendMoERunner=AscendMoERunner)
    stub("vllm_ascend.ops.fused_moe.routed_experts", AscendRoutedExperts=AscendRoutedExperts)


def report() -> dict[str, Any]:
    import vllm_omni  # noqa: F401  before vllm_ascend exists, as vLLM-Omni resolves its platform here

    install_stubs()
    groups: Any = ModuleType("omni_ep.groups")
    sys.modules["omni_ep.groups"] = groups
    prepared: list[str] = []
    groups.prepare_expert_parallel = lambda: prepared.append("groups")

    import vllm_omni.platforms as omni_platforms

    from omni_ep.platforms.npu.platform import NpuOmniPlatform

    # Its constructor patches models for real NPU devices.
    platform: Any = object.__new__(NpuOmniPlatform)
    omni_platforms._current_omni_platform = platform
    result: dict[str, Any] = {
        "is": [kind for kind in ("cuda", "rocm", "npu", "xpu", "musa") if getattr(platform, f"is_{kind}")()],
        "impl": platform.get_diffusion_model_impl_qualname("hunyuan_fused_moe"),
        "missing": missing_module(platform, prepared),
        "packed": packed_modules(platform),
        "selection": selection(),
    }
    result |= build(platform, prepared)
    return result


def missing_module(platform: Any, prepared: list[str]) -> dict[str, Any]:
    """Ask for the op with a vllm-ascend that lacks the module, as its releases do."""
    module = sys.modules.pop("vllm_ascend.ops.fused_moe.routed_experts")
    try:
        platform.prepare_diffusion_op_runtime("hunyuan_fused_moe")
        text = ""
    except ValueError as error:
        text = str(error)
    sys.modules[module.__name__] = module
    return {"text": text, "prepared": list(prepared)}


def packed_modules(platform: Any) -> list[Any]:
    import torch

    stock = type("HunyuanImage3Pipeline", (torch.nn.Module,), {})
    ours = type("HunyuanImage3EpPipeline", (stock,), {})
    other = type("OtherPipeline", (torch.nn.Module,), {})
    return [platform.get_diffusion_packed_modules_mapping(model) for model in (stock, ours, other)]


def selection() -> dict[str, str]:
    """The communication method that vLLM-Omni chooses per device, with EP over 4 ranks, over 1, and off."""
    import vllm_omni.platforms.npu.layers.fused_moe as layer

    chosen = {}
    for device in AscendDeviceType:
        layer.get_ascend_device_type = lambda device=device: device
        for case, (enabled, size) in {"ep4": (True, 4), "ep1": (True, 1), "off": (False, 4)}.items():
            layer.get_ep_group = lambda size=size: SimpleNamespace(world_size=size)
            config = SimpleNamespace(parallel_config=SimpleNamespace(enable_expert_parallel=enabled))
            chosen[f"{device.name.strip('_')} {case}"] = layer._select_moe_comm_method(config).name
    return chosen


def build(platform: Any, prepared: list[str]) -> dict[str, Any]:
    """Resolve the op and build it as on an A3 with EP=4; only process groups and vLLM's factory are stand-
    ins."""
    import torch
    import vllm.forward_context as forward_context
    import vllm.model_executor.layers.fused_moe as vllm_moe
    import vllm_ascend.distributed.parallel_state as ascend_state
    import vllm_omni.diffusion.layers.fused_moe as adapter
    import vllm_omni.platforms.npu.layers.fused_moe as layer
    from vllm.model_executor.custom_op import op_registry_oot

    from omni_ep.ops import resolve_op

    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_expert_parallel=True))
    layer.omni_get_ctx = lambda: SimpleNamespace(vllm_config=config)
    layer.get_world_group = lambda: SimpleNamespace(device_group=None, local_rank=0)
    layer.get_expert_parallel_group_ranks = lambda: EP_RANKS
    layer.get_ep_group = lambda: SimpleNamespace(world_size=4)
    layer.get_ascend_device_type = lambda: AscendDeviceType.A3
    layer.vllm_init_model_parallel_group = lambda ranks, *args, **kwargs: {"ranks": ranks, **kwargs}
    torch.distributed.get_backend = lambda group: "hccl"
    adapter.current_omni_platform = platform
    received: dict[str, Any] = {}

    def factory(**kwargs: Any) -> torch.nn.Module:
        # vLLM's MoERunner becomes the class that is registered under its name.
        received.update(kwargs)
        return op_registry_oot["MoERunner"]()

    vllm_moe.FusedMoEFactory = factory
    op = resolve_op("hunyuan_fused_moe")
    runner = op(**ARGUMENTS)

    context = SimpleNamespace(dp_metadata=None)
    forward_context.get_forward_context = lambda: context
    layer.fused_moe_forward_context_pre_hook(runner, (), {})

    op_registry_oot["MoERunner"] = type("MoERunner", (torch.nn.Module,), {})
    try:
        op(**ARGUMENTS)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "op": op.__name__,
        "prepared": prepared,
        "received": received,
        "runner": type(runner).__name__,
        "registered_experts": op_registry_oot["RoutedExperts"].__name__,
        "mc2": ascend_state._MC2,
        "context_fields": sorted(set(forward_context.ForwardContext.__annotations__)),
        "comm": [context.moe_comm_type.name, context.moe_comm_method],
        "refused": refused,
    }


@pytest.fixture(scope="module")
def npu() -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_platform_still_counts_as_npu(npu: dict[str, Any]) -> None:
    assert npu["is"] == ["npu"]
    assert npu["impl"] == "omni_ep.platforms.npu.fused_moe.NpuHunyuanFusedMoE"


@pytest.mark.parametrize(
    ("device", "method"), [("A2", "ALLGATHER"), ("A3", "ALLTOALL"), ("A5", "ALLTOALL"), ("310P", "ALLGATHER")]
)
def test_communication_method_per_device(npu: dict[str, Any], device: str, method: str) -> None:
    assert npu["selection"][f"{device} ep4"] == method
    assert npu["selection"][f"{device} ep1"] == "ALLGATHER"
    assert npu["selection"][f"{device} off"] == "ALLGATHER"


def test_forward_context_gets_the_method(npu: dict[str, Any]) -> None:
    assert npu["comm"] == ["ALLTOALL", "ALLTOALL method"]
    needed = {"moe_comm_type", "moe_comm_method", "max_tokens_across_dp", "max_tokens_across_pcp"}
    assert needed <= set(npu["context_fields"])


def test_ascend_classes_and_mc2_group_are_in_place(npu: dict[str, Any]) -> None:
    assert npu["op"] == "NpuHunyuanFusedMoE"
    assert npu["prepared"] == ["groups"]
    assert npu["runner"] == "AscendMoERunner"
    assert npu["registered_experts"] == "AscendRoutedExperts"
    assert npu["mc2"] == {"ranks": EP_RANKS, "group_name": "mc2"}


def test_experts_are_built_with_sp_folded_into_dp(npu: dict[str, Any]) -> None:
    assert npu["received"] == ARGUMENTS | {"quant_config": None, "pcp_size": 1}


def test_foreign_runner_is_refused(npu: dict[str, Any]) -> None:
    assert "needed vllm-ascend's AscendMoERunner" in npu["refused"]
    assert "MoERunner;" in npu["refused"]


def test_vllm_ascend_without_the_module_is_refused_before_groups_are_made(npu: dict[str, Any]) -> None:
    assert npu["missing"]["prepared"] == []
    text = npu["missing"]["text"]
    assert "has no module vllm_ascend.ops.fused_moe.routed_experts" in text
    assert "Releases up to 0.26.0rc1 lack it; vllm-ascend's main branch has it since August 2026." in text
    assert "Install vllm-ascend from its main branch" in text


def test_subclassed_pipeline_keeps_vllm_omnis_packed_modules(npu: dict[str, Any]) -> None:
    stock, ours, other = npu["packed"]
    assert stock is not None
    assert ours == stock
    assert other is None


if __name__ == "__main__":
    print(json.dumps(report()))
