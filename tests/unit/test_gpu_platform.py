# SPDX-License-Identifier: Apache-2.0
"""Contract tests of the GPU platforms without a GPU.

vLLM's CUDA and ROCm modules load their kernels and ask the driver when they are imported, so this file runs
itself in one process of its own, with those stubbed, and the tests judge what that process reports.
"""

import json
import subprocess
import sys
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
    "prefix": "layers.0.mlp.experts",
}


class FakeNvml:
    """libnvidia-ml with one device, for vLLM's pynvml and for our probe."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlInitWithFlags(self, flags: Any) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 1
        return 0


def report() -> dict[str, Any]:
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    import vllm_omni.platforms as omni_platforms

    from omni_ep.platforms.gpu.cuda import CudaOmniPlatform, StockCudaOmniPlatform

    result: dict[str, Any] = {"rocm_imported_with_cuda": "omni_ep.platforms.gpu.rocm" in sys.modules}
    cuda = CudaOmniPlatform()
    result["cuda"] = describe(cuda, StockCudaOmniPlatform)

    import torch

    device = SimpleNamespace(gcnArchName="gfx942", multi_processor_count=1, total_memory=1)
    torch.cuda.get_device_properties = lambda *args: device
    from omni_ep.platforms.gpu.rocm import RocmOmniPlatform, StockRocmOmniPlatform

    # Its constructor patches GroupNorm for real ROCm devices.
    result["rocm"] = describe(object.__new__(RocmOmniPlatform), StockRocmOmniPlatform)
    result["factory"] = build(cuda)
    result["detection"] = detect(omni_platforms)
    return result


def describe(platform: Any, stock: type) -> dict[str, Any]:
    kinds = ("cuda", "rocm", "npu", "xpu", "musa", "cuda_alike", "cpu")
    return {
        "is": [kind for kind in kinds if getattr(platform, f"is_{kind}")()],
        "impl": platform.get_diffusion_model_impl_qualname("hunyuan_fused_moe"),
        "worker": platform.get_diffusion_worker_cls() == stock.get_diffusion_worker_cls(),
        "key": platform.omni_ep_platform,
        "subclass": isinstance(platform, stock),
    }


def build(platform: Any) -> dict[str, Any]:
    """Resolve the op and build it; vLLM's factory is replaced by one that keeps its arguments."""
    import torch
    import vllm.model_executor.layers.fused_moe as vllm_moe
    import vllm_omni.diffusion.layers.fused_moe as adapter
    import vllm_omni.platforms as omni_platforms

    from omni_ep.ops import resolve_op

    prepared: list[str] = []
    groups: Any = ModuleType("omni_ep.groups")
    groups.prepare_expert_parallel = lambda: prepared.append("groups")
    sys.modules["omni_ep.groups"] = groups
    omni_platforms._current_omni_platform = platform
    adapter.current_omni_platform = platform
    received: dict[str, Any] = {}

    class Runner(torch.nn.Module):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            received.update(kwargs)

    vllm_moe.FusedMoEFactory = Runner
    op = resolve_op("hunyuan_fused_moe")
    runner = op(**ARGUMENTS, enable_eplb=False)
    try:
        op(**ARGUMENTS, pcp_size=2)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "op": op.__name__,
        "prepared": prepared,
        "returns_runner": type(runner) is Runner,
        "hooks": len(runner._forward_pre_hooks),
        "received": received,
        "refused": refused,
    }


def detect(omni_platforms: Any) -> dict[str, Any]:
    """Give vLLM-Omni's detector and our probe the same driver and compare their answers."""
    import ctypes

    import vllm.third_party.pynvml as pynvml

    from omni_ep.platforms import detection, selection

    without = detection._cuda(), omni_platforms.cuda_omni_platform_plugin()
    load = ctypes.CDLL

    def load_with_driver(name: Any, *args: Any, **kwargs: Any) -> Any:
        return FakeNvml() if name == "libnvidia-ml.so.1" else load(name, *args, **kwargs)

    ctypes.CDLL = pynvml.CDLL = load_with_driver
    detection.detected_accelerators.cache_clear()
    return {
        "without_driver": without,
        "ours": sorted(detection.detected_accelerators()),
        "stock": omni_platforms.cuda_omni_platform_plugin(),
        "selected": selection.omni_platform_qualname(),
        "cpu_for_vllm": selection.cpu_platform_requested_and_possible(),
    }


@pytest.fixture(scope="module")
def gpu() -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_cuda_platform_still_counts_as_cuda(gpu: dict[str, Any]) -> None:
    assert gpu["cuda"]["is"] == ["cuda", "cuda_alike"]
    assert gpu["cuda"]["subclass"]
    assert gpu["cuda"]["worker"]


def test_rocm_platform_still_counts_as_rocm(gpu: dict[str, Any]) -> None:
    assert gpu["rocm"]["is"] == ["rocm", "cuda_alike"]
    assert gpu["rocm"]["subclass"]
    assert gpu["rocm"]["worker"]


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_op_is_the_gpu_implementation(gpu: dict[str, Any], name: str) -> None:
    assert gpu[name]["key"] == name
    assert gpu[name]["impl"] == "omni_ep.platforms.gpu.fused_moe.GpuHunyuanFusedMoE"


def test_cuda_module_does_not_import_rocm(gpu: dict[str, Any]) -> None:
    assert not gpu["rocm_imported_with_cuda"]


def test_experts_are_built_with_sp_folded_into_dp(gpu: dict[str, Any]) -> None:
    factory = gpu["factory"]
    assert factory["op"] == "GpuHunyuanFusedMoE"
    assert factory["prepared"] == ["groups"]
    assert factory["received"] == ARGUMENTS | {"quant_config": None, "pcp_size": 1, "enable_eplb": False}


def test_runner_comes_back_with_vllm_omnis_hooks(gpu: dict[str, Any]) -> None:
    assert gpu["factory"]["returns_runner"]
    assert gpu["factory"]["hooks"] == 2


def test_another_pcp_size_is_refused(gpu: dict[str, Any]) -> None:
    assert gpu["factory"]["refused"] == (
        "pcp_size=2 passed to the experts 'layers.0.mlp.experts'; needed 1, because sequence parallelism is "
        "folded into vLLM's DP group. Leave the argument out."
    )


def test_our_probe_agrees_with_vllm_omnis_detector(gpu: dict[str, Any]) -> None:
    detection = gpu["detection"]
    ours, stock = detection["without_driver"]
    assert ours == (stock is not None)
    assert detection["ours"] == ["cuda"]
    assert detection["stock"] == "vllm_omni.platforms.cuda.platform.CudaOmniPlatform"
    assert detection["selected"] == "omni_ep.platforms.gpu.cuda.CudaOmniPlatform"
    assert not detection["cpu_for_vllm"]


if __name__ == "__main__":
    print(json.dumps(report()))
