# SPDX-License-Identifier: Apache-2.0
"""The CPU platform is what both libraries see here, and everything it names exists and computes right."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import activation
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

from omni_ep.platforms.cpu.experts import CpuUnquantizedFusedMoEMethod
from omni_ep.platforms.cpu.layers import register_native_layers
from omni_ep.platforms.cpu.platform import CpuOmniPlatform
from omni_ep.platforms.cpu.vllm_platform import CpuVllmPlatform

# --- which platform is active


def test_vllm_runs_on_our_platform() -> None:
    """Through the real entry point of `vllm.platform_plugins`."""
    from vllm.platforms import current_platform

    assert type(current_platform) is CpuVllmPlatform
    assert current_platform.is_cpu()
    # An out-of-tree platform would get vLLM's OOT MoE backend, which has no kernel.
    assert not current_platform.is_out_of_tree()


def test_vllm_omni_runs_on_our_platform() -> None:
    """Through the real entry point of `vllm_omni.platform_plugins`."""
    from vllm_omni.platforms import current_omni_platform

    assert type(current_omni_platform) is CpuOmniPlatform


def test_neither_platform_claims_an_accelerator() -> None:
    for question in ("is_cuda", "is_rocm", "is_npu", "is_xpu", "is_musa", "is_cuda_alike", "is_tpu"):
        assert not getattr(CpuOmniPlatform(), question)(), question
    assert CpuOmniPlatform.device_type == "cpu"
    assert CpuOmniPlatform.dist_backend == "gloo"
    assert CpuOmniPlatform.get_torch_device(3) == torch.device("cpu")


def test_devices_are_the_cores_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuOmniPlatform.get_device_count() >= 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5})
    assert CpuOmniPlatform.get_device_count() == 3


def test_memory_is_counted_in_bytes_of_the_host() -> None:
    total = CpuOmniPlatform.get_device_total_memory()
    free, same_total = CpuOmniPlatform.get_device_memory()
    used = CpuOmniPlatform.memory_reserved()
    peaks = (CpuOmniPlatform.max_memory_reserved(), CpuOmniPlatform.max_memory_allocated())
    for size in (total, free, used, *peaks, CpuOmniPlatform.get_free_memory()):
        assert isinstance(size, int)
        assert 0 < size <= total
    assert same_total == total
    # torch and vLLM are imported, so a figure in KiB or MiB would show.
    assert used > 100e6
    assert min(peaks) > 100e6
    assert isinstance(CpuOmniPlatform.get_current_memory_usage(), float)


def test_what_does_nothing_on_cpu_can_be_called() -> None:
    CpuOmniPlatform.synchronize()
    CpuOmniPlatform.empty_cache()
    CpuOmniPlatform.reset_peak_memory_stats()
    CpuOmniPlatform.import_kernels()
    assert CpuOmniPlatform.get_device_version() is None
    assert not CpuOmniPlatform.supports_torch_inductor()
    assert not CpuOmniPlatform.supports_cpu_offload()


def test_named_classes_exist_and_fit() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
    from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

    def named(path: str) -> Any:
        return resolve_obj_by_qualname(path)

    assert issubclass(named(CpuOmniPlatform.get_diffusion_worker_cls()), DiffusionWorker)
    assert issubclass(named(CpuOmniPlatform.diffusion_executor_backend()), DiffusionExecutor)
    for op in CpuOmniPlatform.known_diffusion_ops():
        assert callable(named(CpuOmniPlatform.get_diffusion_model_impl_qualname(op)))
    # vLLM asks its own platform for the communicator, vLLM-Omni's groups ask vLLM-Omni's.
    for platform in (CpuVllmPlatform, CpuOmniPlatform):
        communicator = named(platform.get_device_communicator_cls())
        assert issubclass(communicator, CpuCommunicator)
        for collective in ("all_gatherv", "reduce_scatterv"):
            assert getattr(communicator, collective) is not getattr(CpuCommunicator, collective)


# --- layers


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    """vLLM's out-of-tree registry, empty for the test and as it was afterwards."""
    before = dict(op_registry_oot)
    op_registry_oot.clear()
    with set_current_vllm_config(VllmConfig()):
        yield op_registry_oot
    op_registry_oot.clear()
    op_registry_oot.update(before)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


#: The activations' definitions, for `x` of shape [tokens, 2 d]; gated ones multiply the halves.
FORMULAS: dict[str, tuple[type[nn.Module], dict[str, str], Any]] = {
    "SiluAndMul": (activation.SiluAndMul, {}, lambda a, b: a * sigmoid(a) * b),
    "GeluAndMul": (activation.GeluAndMul, {}, lambda a, b: gelu(a) * b),
    "GeluAndMul tanh": (activation.GeluAndMul, {"approximate": "tanh"}, lambda a, b: gelu_tanh(a) * b),
    "NewGELU": (activation.NewGELU, {}, lambda a, b: gelu_tanh(torch.cat([a, b], dim=-1))),
    "FastGELU": (activation.FastGELU, {}, lambda a, b: gelu_tanh(torch.cat([a, b], dim=-1))),
    "QuickGELU": (
        activation.QuickGELU,
        {},
        lambda a, b: torch.cat([a, b], dim=-1) * sigmoid(1.702 * torch.cat([a, b], dim=-1)),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_can_be_made_and_equal_their_formulas(registry: dict[str, Any], name: str) -> None:
    """vLLM's class name constructs the replacement: models need not know of it."""
    register_native_layers()
    layer_class, arguments, formula = FORMULAS[name]
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = layer_class(**arguments)(x)
    torch.testing.assert_close(got, formula(*x.chunk(2, dim=-1)), rtol=1e-5, atol=1e-5)


def test_the_two_gelus_differ(registry: dict[str, Any]) -> None:
    """Otherwise the test above would not notice an ignored `approximate`."""
    x = torch.linspace(-3, 3, 101)
    assert (gelu(x) - gelu_tanh(x)).abs().max() > 1e-4


def test_unknown_approximation_is_refused(registry: dict[str, Any]) -> None:
    register_native_layers()
    with pytest.raises(ValueError, match="GELU's approximation is 'none' or 'tanh', got 'sigmoid'"):
        activation.GeluAndMul(approximate="sigmoid")


def test_registration_is_idempotent(registry: dict[str, Any]) -> None:
    register_native_layers()
    once = dict(registry)
    register_native_layers()
    assert registry == once
    assert set(once) == {
        *("SiluAndMul", "GeluAndMul", "NewGELU", "FastGELU", "QuickGELU"),
        "UnquantizedFusedMoEMethod",
    }
    assert once["UnquantizedFusedMoEMethod"] is CpuUnquantizedFusedMoEMethod


@pytest.mark.parametrize("name", ["SiluAndMul", "UnquantizedFusedMoEMethod"])
def test_what_somebody_else_registered_is_left_alone(registry: dict[str, Any], name: str) -> None:
    class Theirs(nn.Module):
        pass

    CustomOp.register_oot(Theirs, name=name)
    register_native_layers()
    assert registry[name] is Theirs
    assert len(registry) == 6


def test_kernels_that_are_present_stay(registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops._C, "silu_and_mul", object(), raising=False)
    register_native_layers()
    assert "SiluAndMul" not in registry
    assert "GeluAndMul" in registry


# --- attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Softmax attention written out; [batch, tokens, heads, head_dim], `mask` True where a key is seen."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (states.repeat_interleave(repeat, dim=2) for states in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, dim=-1), v)


#: What the mask covers: nothing; padding keys of the second sequence [B, K]; any pair [B, 1, Q, K].
MASKS = {
    "no mask": (None, None),
    "padding": (
        torch.tensor([[True] * 6, [True] * 4 + [False] * 2]),
        torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None, None, :],
    ),
    "pairs": (torch.ones(2, 1, 6, 6).tril().bool(), torch.ones(2, 1, 6, 6).tril().bool()),
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("mask", "causal"), [*((mask, False) for mask in MASKS), ("no mask", True)])
def test_attention_equals_its_formula(kv_heads: int, mask: str, causal: bool) -> None:
    backend = resolve_obj_by_qualname(CpuOmniPlatform.get_diffusion_attn_backend_cls(None, 16))
    implementation = backend.get_impl_cls()(
        num_heads=4, head_size=16, softmax_scale=0.3, causal=causal, num_kv_heads=kv_heads
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 6, heads, 16, generator=generator) for heads in (4, kv_heads, kv_heads))
    given, seen = MASKS[mask]
    metadata = None if given is None else AttentionMetadata(attn_mask=given)
    got = implementation.forward(q, k, v, metadata)
    want = attention(q, k, v, seen, causal=causal, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", [None, "TORCH_SDPA", "torch_sdpa"])
def test_sdpa_is_the_backend(choice: str | None) -> None:
    path = CpuOmniPlatform.get_diffusion_attn_backend_cls(choice, 64)
    assert path == "omni_ep.platforms.cpu.attention.CpuSdpaBackend"


def test_another_explicit_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="FLASH_ATTN") as error:
        CpuOmniPlatform.get_diffusion_attn_backend_cls("flash_attn", 64)
    assert str(error.value) == (
        "The FLASH_ATTN diffusion attention backend does not run on CPU; "
        "use TORCH_SDPA or leave the choice to the platform."
    )
