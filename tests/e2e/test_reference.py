# SPDX-License-Identifier: Apache-2.0
"""Every topology paints the picture of an independent float32 implementation, and EP what one rank paints.

The ground truth in ``tests/data/reference`` is the model authors' own code on CPU.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_ep.layout import ParallelLayout
from omni_ep.planner import Workload
from omni_ep.quality import LOSSY, PARITY, compare
from tests.e2e.capture import max_error
from tests.e2e.engines import ranks
from tests.topologies import TOPOLOGIES, run_request

pytestmark = pytest.mark.engine

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
SIZES = {"base": (64, 64), "wide": (48, 80)}
MAX_LATENT_ERROR = 1e-4

#: Two KV heads cannot be split over TP and Ulysses at once; this topology has its own checkpoint.
NEEDS_MORE_HEADS = "tp2*sp2+ep"
#: Expert parameters of the tiny checkpoint in float32: 2 layers × 8 experts × 3 × 128 × 64 × 4 bytes.
TINY_EXPERT_BYTES = 2 * 8 * 3 * 128 * 64 * 4
TOP_K = 2
PROMPT_TOKENS = len("a red cube on a table")
"""The checkpoint's tokenizer makes one token of a byte."""


@pytest.fixture(scope="module")
def load_of_one_rank() -> np.ndarray:
    """Tokens of each expert, [step, layer, expert], over the pictures of ``SIZES``."""
    with ranks(run_request("one rank"), dtype=torch.float32) as live:
        live.call("omni_ep_count_expert_load")
        for height, width in SIZES.values():
            live.paint(height=height, width=width)
        counts = np.array(live.call("omni_ep_expert_load")["counts"])
    works = [Workload(height=h, width=w, prompt_tokens=PROMPT_TOKENS) for h, w in SIZES.values()]
    first = sum(work.first_step(ParallelLayout()).total for work in works)
    later = sum(work.later_step(ParallelLayout()).total for work in works)
    assert counts.shape == (4, 2, 8)
    assert counts.sum(axis=2).tolist() == [[tokens * TOP_K] * 2 for tokens in (first, later, later, later)]
    return counts


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != NEEDS_MORE_HEADS])
def test_float32_equals_ground_truth(topology: str, load_of_one_rank: np.ndarray) -> None:
    """The picture, the bytes of experts, and the tokens that each expert got."""
    request = run_request(topology)
    with ranks(request, dtype=torch.float32) as live:
        live.call("omni_ep_count_expert_load")
        for name, (height, width) in SIZES.items():
            painted = live.paint(height=height, width=width)
            with np.load(REFERENCE / f"{name}.npz") as truth:
                for step, latents in enumerate(painted["latents"]):
                    error = max_error(latents, truth[f"latents_{step}"])
                    assert error <= MAX_LATENT_ERROR, f"{name}, step {step}: {error:.2e} of the maximum"
                assert PARITY.verdict(compare(truth["image"], painted["image"])) == []
        assert np.array_equal(live.call("omni_ep_expert_load")["counts"], load_of_one_rank)
    _check_expert_bytes(painted, request, TINY_EXPERT_BYTES)


def _check_expert_bytes(painted: dict[str, Any], request: Any, whole: int) -> None:
    memory = painted["memory"]
    assert [entry["rank"] for entry in memory] == list(range(request.layout.world_size))
    # Without EP the experts are split by TP, which divides the same bytes.
    share = request.layout.ep_size if request.enable_expert_parallel else request.layout.tp
    assert [entry["expert_bytes"] for entry in memory] == [whole // share] * request.layout.world_size


def test_tp_with_ulysses_equals_one_rank(tmp_path: Path) -> None:
    from omni_ep.checkpoint import CheckpointSpec, inventory, make_checkpoint

    spec = CheckpointSpec(num_attention_heads=8, num_key_value_heads=4, head_dim=16, num_experts=8, top_k=4)
    make_checkpoint(tmp_path / "model", spec)
    with ranks(run_request("one rank"), model=tmp_path / "model", dtype=torch.float32) as live:
        alone = live.paint()
    request = run_request(NEEDS_MORE_HEADS)
    with ranks(request, model=tmp_path / "model", dtype=torch.float32) as live:
        together = live.paint()
    assert max_error(together["latents"][-1], alone["latents"][-1]) <= MAX_LATENT_ERROR
    assert PARITY.verdict(compare(alone["image"], together["image"])) == []
    _check_expert_bytes(together, request, inventory(spec).expert_parameters * 4)


def test_bf16_stays_close_to_one_rank() -> None:
    """bf16 partial sums of different topologies round differently; thresholds, not equality."""
    with ranks(run_request("one rank"), dtype=torch.bfloat16) as live:
        alone = live.paint(guidance_scale=1.5)
    assert alone["dtype"] == "torch.bfloat16"
    for topology in ("tp2+ep", "cfg2*sp2+ep"):
        with ranks(run_request(topology), dtype=torch.bfloat16) as live:
            together = live.paint(guidance_scale=1.5)
        assert LOSSY.verdict(compare(alone["image"], together["image"])) == [], topology


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_without_ep_it_is_stock(dtype: torch.dtype) -> None:
    """EP off, or one rank: vLLM-Omni's own pipeline class paints the same bits."""
    with ranks(run_request("one rank", enable_expert_parallel=True), dtype=dtype) as live:
        with_flag = live.paint()
        assert with_flag["moe_block"] == "omni_ep.models.hunyuan_image3.moe"
    for topology in ("one rank", "tp2"):
        with ranks(run_request(topology), dtype=dtype) as live:
            ours = live.paint()
            assert ours["moe_block"].startswith("vllm_omni.")
            assert live.call("use_stock_pipeline").startswith("vllm_omni.")
            stock = live.paint()
        assert np.array_equal(ours["latents"][-1], stock["latents"][-1]), topology
        assert np.array_equal(ours["image"], stock["image"]), topology
        if topology == "one rank":
            assert np.array_equal(with_flag["latents"][-1], stock["latents"][-1])
            assert np.array_equal(with_flag["image"], stock["image"])
