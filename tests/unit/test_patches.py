# SPDX-License-Identifier: Apache-2.0
"""What omni-ep changes or replaces upstream is still needed, done once, and undone where it should be.

A test that fails with "upstream has changed" names what to remove; it is good news.
"""

import ast
import inspect
import json
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.device_communicators import all2all
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import activation
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm_omni.diffusion import vllm_config as omni_vllm_config
from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl
from vllm_omni.diffusion.data import AsyncOutputKind
from vllm_omni.diffusion.distributed import parallel_state as omni_ps
from vllm_omni.diffusion.models.hunyuan_image3 import hunyuan_image3_transformer as transformer
from vllm_omni.diffusion.models.hunyuan_image3 import pipeline_hunyuan_image3 as stock
from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

from omni_ep.models.hunyuan_image3 import patches, precision
from omni_ep.models.hunyuan_image3.config import MODEL_TYPE, load_config
from omni_ep.models.hunyuan_image3.moe import HunyuanSparseMoeBlock
from omni_ep.platforms.cpu import layers
from omni_ep.platforms.cpu import patches as cpu_patches
from tests.workers import TINY

#: As imported: applying the patch in this process replaces it for the tests after it.
UPSTREAM_OUTPUT_LOOP = WorkerProc._async_output_loop
UPSTREAM_KERNEL_CHECK = layer_utils.check_cpu_sgl_kernel


def changed(remove: str) -> str:
    return f"upstream has changed: remove {remove}"


def calls(function: Any, name: str) -> list[str]:
    """Source of every call of `name` (its last part) in a function or class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in found if ast.unparse(call.func).split(".")[-1] == name]


# --- platforms/cpu/patches.py


@pytest.fixture
def upstream_unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProc, "_async_output_loop", UPSTREAM_OUTPUT_LOOP)
    monkeypatch.setattr(layer_utils, "check_cpu_sgl_kernel", UPSTREAM_KERNEL_CHECK)


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AMX, whichever this one is."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


def bf16_layer() -> torch.nn.Module:
    layer = torch.nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    layer.requires_grad_(False)
    return layer


without_kernels = pytest.mark.skipif(
    hasattr(torch.ops._C, "convert_weight_packed"), reason="needs a vLLM wheel without CPU kernels"
)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_the_output_thread_still_dies_without_an_accelerator() -> None:
    if UPSTREAM_OUTPUT_LOOP.__module__ != WorkerProc.__module__:
        pytest.fail("the output loop was patched in this process before this module was imported")
    worker = SimpleNamespace(gpu_id=0, _async_output_queue=SimpleNamespace(get=lambda: None))
    try:
        UPSTREAM_OUTPUT_LOOP(worker)
    except (AttributeError, RuntimeError):
        return
    pytest.fail(changed("_pack_outputs_without_stream from platforms/cpu/patches.py"))


@without_kernels
def test_an_amx_processor_is_still_taken_for_its_kernel(upstream_unpatched: None, amx: None) -> None:
    try:
        layer_utils.dispatch_cpu_unquantized_gemm(bf16_layer(), remove_weight=False)
    except AttributeError:
        return
    pytest.fail(changed("_never_packed from platforms/cpu/patches.py"))


@without_kernels
def test_a_bf16_layer_works_on_an_amx_processor(upstream_unpatched: None, amx: None) -> None:
    cpu_patches.apply()
    layer, x = bf16_layer(), torch.ones(3, 32, dtype=torch.bfloat16)
    layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    assert torch.equal(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.T)


def test_the_output_patch_is_applied_once(upstream_unpatched: None) -> None:
    cpu_patches.apply()
    once = WorkerProc._async_output_loop
    assert once.__module__ == cpu_patches.__name__
    cpu_patches.apply()
    assert WorkerProc._async_output_loop is once


def test_the_patched_thread_delivers_outputs_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(output: str) -> None:
        if output == "broken":
            raise OSError("no space")

    monkeypatch.setattr(cpu_patches, "pack_diffusion_output_shm", pack)
    queue = [("good", "1", None), ("broken", "2", None), None]
    sent: list[Any] = []
    worker: Any = SimpleNamespace(
        _async_output_queue=SimpleNamespace(get=lambda: queue.pop(0)),
        _enqueue_result=sent.append,
        _async_output_done=threading.Condition(),
        _async_output_pending=2,
    )
    cpu_patches._pack_outputs_without_stream(worker)
    assert [(item.kind, item.async_output_id, item.output) for item in sent] == [
        (AsyncOutputKind.OUTPUT_READY, "1", "good"),
        (AsyncOutputKind.OUTPUT_READY, "2", None),
    ]
    assert [item.error for item in sent] == [
        None,
        "packing the output into shared memory failed: no space",
    ]
    assert worker._async_output_pending == 0


# --- models/hunyuan_image3/patches.py


@pytest.mark.parametrize(
    "place", [stock.get_hunyuan_image_3_pre_process_func, stock.HunyuanImage3Pipeline.__init__]
)
def test_remote_code_is_still_hard_coded(place: Callable[..., Any]) -> None:
    assert [call for call in calls(place, "get_config") if "trust_remote_code=True" in call], changed(
        f"config_from_json from models/hunyuan_image3/patches.py (around {place.__qualname__})"
    )


def test_the_decoder_layer_still_names_its_moe_block() -> None:
    assert calls(transformer.HunyuanImage3DecoderLayer, "HunYuanSparseMoeBlock"), changed(
        "expert_parallel_moe_block from models/hunyuan_image3/patches.py"
    )


SUBSTITUTIONS: dict[str, tuple[Any, str, Callable[[], AbstractContextManager[None]]]] = {
    "config": (stock, "get_config", lambda: patches.config_from_json(trust_remote_code=False)),
    "block": (transformer, "HunYuanSparseMoeBlock", patches.expert_parallel_moe_block),
}


@pytest.mark.parametrize("name", SUBSTITUTIONS)
def test_a_substitution_lasts_for_its_block(name: str) -> None:
    """Also where the body raises, and where blocks are nested."""
    module, attribute, substitute = SUBSTITUTIONS[name]
    original = getattr(module, attribute)
    assert original.__module__.startswith("vllm")
    with substitute():
        inside = getattr(module, attribute)
        assert inside.__module__.startswith("omni_ep.")
        with substitute():
            pass
        assert getattr(module, attribute) is inside
    assert getattr(module, attribute) is original
    with pytest.raises(ZeroDivisionError), substitute():
        raise ZeroDivisionError
    assert getattr(module, attribute) is original


def test_what_the_substitutions_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with patches.expert_parallel_moe_block():
        assert transformer.HunYuanSparseMoeBlock is HunyuanSparseMoeBlock
    trusted: list[bool] = []
    monkeypatch.setattr(
        patches, "load_config", lambda model, trust_remote_code: trusted.append(trust_remote_code)
    )
    for user_trusts in (False, True):
        with patches.config_from_json(trust_remote_code=user_trusts):
            # The user's choice counts, whatever upstream passes.
            stock.get_config("model", trust_remote_code=True)
    assert trusted == [False, True]


def test_our_config_class_is_still_needed() -> None:
    """transformers does not know the model, and its generic config lacks what vLLM-Omni reads."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    raw = json.loads((TINY / "config.json").read_text())
    ours, generic = load_config(str(TINY), trust_remote_code=False), PretrainedConfig(**raw)
    for name in ("rope_theta", "rope_scaling", "use_cache"):
        assert getattr(ours, name) == raw[name]
    assert MODEL_TYPE not in CONFIG_MAPPING_NAMES, changed("register_config from hunyuan_image3/config.py")
    assert not hasattr(generic, "rope_theta"), changed("HunyuanImage3Config from hunyuan_image3/config.py")


# --- models/hunyuan_image3/precision.py and denoising.py


def _rotate(embedder: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(2, 5, 8, generator=generator)
    q, k = (torch.randn(10, heads * 16, generator=generator) for heads in (4, 2))
    rotated: tuple[torch.Tensor, torch.Tensor] = embedder(
        q, k, q, (angles.cos(), angles.sin()), mode="gen_image", first_step=True, query_lens=[5, 5]
    )
    return rotated


def test_upstream_still_rounds_q_and_k_to_bf16() -> None:
    """And ours is upstream's embedder but for the rounding."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    with set_current_vllm_config(VllmConfig()):
        theirs = _rotate(transformer.HunYuanRotary2DEmbedder(**sizes))
        ours = _rotate(precision.Float32Rotary2DEmbedder(**sizes))
    for upstream, float32 in zip(theirs, ours, strict=True):
        assert upstream.dtype == torch.bfloat16, changed("Float32Rotary2DEmbedder from precision.py")
        assert float32.dtype == torch.float32
        assert torch.equal(float32.to(torch.bfloat16), upstream)


@pytest.mark.parametrize(
    ("place", "name", "argument", "remove"),
    [
        (transformer.HunyuanImage3Text2ImagePipeline.__call__, "prepare_latents", "dtype=torch.bfloat16",
         "EpText2ImagePipeline.prepare_latents from denoising.py"),
        (transformer.HunyuanImage3Text2ImagePipeline.__call__, "autocast", "dtype=torch.bfloat16",
         "HunyuanImage3Pipeline.forward_call from pipeline.py"),
        (transformer.HunyuanImage3Text2ImagePipeline.__call__, "autocast", "dtype=torch.float16",
         "run_vae_in_float32 from precision.py"),
        (stock.HunyuanImage3Pipeline.vae_encode, "autocast", "dtype=torch.float16",
         "encode_float32 from precision.py"),
    ],
)  # fmt: skip
def test_precision_is_still_hard_coded(
    place: Callable[..., Any], name: str, argument: str, remove: str
) -> None:
    assert [call for call in calls(place, name) if argument in call], changed(remove)


def test_autocast_is_off_inside_and_on_again_outside() -> None:
    seen = []
    function = precision.without_autocast(lambda: seen.append(torch.is_autocast_enabled("cpu")), "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        function()
        seen.append(torch.is_autocast_enabled("cpu"))
    assert seen == [False, True]


def test_the_vae_runs_in_float32_under_autocast() -> None:
    class Vae(torch.nn.Linear):
        def decode(self, latents: torch.Tensor) -> torch.Tensor:
            return self(latents)

        encode = decode

    vae: Any = Vae(2, 2, dtype=torch.bfloat16)
    precision.run_vae_in_float32(vae, "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert vae.decode(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
        assert vae.encode(torch.ones(1, 2)).dtype == torch.float32


# --- platforms/cpu/layers.py and experts.py


@pytest.fixture
def nothing_registered() -> Iterator[None]:
    before = dict(op_registry_oot)
    op_registry_oot.clear()
    with set_current_vllm_config(VllmConfig()):
        yield
    op_registry_oot.update(before)


@pytest.mark.parametrize("name", [name for name in layers._REPLACEMENTS])
def test_stock_activations_cannot_be_made_here(nothing_registered: None, name: str) -> None:
    kernel = layers._REPLACEMENTS[name][1]
    if hasattr(torch.ops._C, kernel):
        pytest.skip("this vLLM brings CPU kernels; the replacement steps aside")
    try:
        getattr(activation, name)()
    except AttributeError:
        return
    pytest.fail(changed(f"Native{name} from platforms/cpu/layers.py"))


def test_stock_cpu_experts_cannot_run_here() -> None:
    """Their kernel is missing, and their code ignores the expert map."""
    source = inspect.getsource(cpu_moe.CPUUnquantizedExperts.apply)
    body = ast.parse(textwrap.dedent(source)).body[0]
    uses_map = any(isinstance(node, ast.Name) and node.id == "expert_map" for node in ast.walk(body))
    has_kernel = hasattr(torch.ops._C, "cpu_fused_moe")
    assert not (uses_map and has_kernel), changed("GroupedCpuExperts from platforms/cpu/experts.py")


# --- platforms/cpu/attention.py and communicator.py


def test_upstreams_sdpa_still_has_no_cpu_branch() -> None:
    implementation = SDPAImpl(num_heads=1, head_size=8, softmax_scale=1.0)
    try:
        implementation.forward(*[torch.zeros(1, 2, 1, 8)] * 3)
    except NotImplementedError:
        return
    pytest.fail(changed("CpuSdpaImpl from platforms/cpu/attention.py"))


@pytest.mark.parametrize("collective", ["all_gatherv", "reduce_scatterv"])
def test_upstreams_cpu_communicator_still_lacks(collective: str) -> None:
    remove = changed(f"CpuEpCommunicator.{collective} from platforms/cpu/communicator.py")
    assert getattr(CpuCommunicator, collective) is getattr(DeviceCommunicatorBase, collective), remove
    try:
        getattr(CpuCommunicator, collective)(object.__new__(CpuCommunicator), torch.zeros(1))
    except NotImplementedError:
        return
    pytest.fail(remove)


# --- omni_ep/groups.py


def test_dispatch_still_leaves_sp_out_when_dp_has_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause of the silent wrong picture: one of DP and PCP is gathered over, never both."""
    groups = {name: SimpleNamespace(name=name) for name in ("dp", "pcp", "ep")}
    for name, group in groups.items():
        monkeypatch.setattr(all2all, f"get_{name}_group", lambda group=group: group)
    # No constructor: it needs live process groups, and the question is which of them it asks.
    manager = object.__new__(all2all.AgRsAll2AllManager)
    manager.dp_world_size = 2
    used = manager._get_comm_group(is_sequence_parallel=False)
    assert used is groups["dp"], changed("the fold of SP into DP from omni_ep/groups.py")


def test_vllm_omni_still_maps_sp_to_pcp() -> None:
    """See also `test_prepared_groups`, which compares the live groups."""
    remove = changed("the fold of SP into DP from omni_ep/groups.py")
    configure = inspect.getsource(omni_vllm_config.configure_diffusion_vllm_config)
    assert "prefill_context_parallel_size = parallel_config.sequence_parallel_size" in configure, remove
    made = calls(omni_ps._initialize_model_parallel, "init_vllm_model_parallel_group")
    assert [call for call in made if "sp_group_ranks" in call and "group_name='pcp'" in call], remove
    assert [call for call in made if "'cfg-dp'" in call and "group_name='dp'" in call], remove
