# SPDX-License-Identifier: Apache-2.0
"""Expert load: figures worked out by hand, what is refused, and which tokens a rank counts."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from omni_ep.config import RunRequest
from omni_ep.errors import ConfigurationError
from omni_ep.expert_load import ExpertLoad, check_countable, over_mean
from omni_ep.placement import ExpertPlacement

#: [step, layer, expert]: two steps, two layers, four experts.
COUNTS = np.array([[[4, 0, 2, 2], [1, 1, 3, 3]], [[2, 2, 2, 2], [0, 0, 0, 8]]], dtype=np.int64)


def load(ep_size: int = 2, counts: np.ndarray = COUNTS, layers: tuple[int, ...] = (3, 5)) -> ExpertLoad:
    placement = ExpertPlacement.linear(counts.shape[2], ep_size)
    return ExpertLoad(counts=counts, layers=layers, placement=placement)


def test_experts_by_hand() -> None:
    assert load().per_layer.tolist() == [[6, 2, 4, 4], [1, 1, 3, 11]]
    assert load().relative.tolist() == [[1.5, 0.5, 1, 1], [0.25, 0.25, 0.75, 2.75]]
    assert load().busiest_expert == (5, 3, 2.75)


def test_ranks_by_hand() -> None:
    assert load().rank_tokens.tolist() == [[[4, 4], [2, 6]], [[4, 4], [0, 8]]]
    assert load().rank_relative.tolist() == [[6 / 8, 10 / 8], [4 / 8, 12 / 8]]
    assert load().rank_max_over_mean.tolist() == [1.25, 1.5]
    assert load().busiest_rank == (1, 22 / 16)
    assert load(4).rank_tokens.tolist() == COUNTS.tolist()


def test_layers_do_not_make_up_for_one_another() -> None:
    """Each rank is idle in one layer: together they look balanced, but each layer waits for one rank."""
    counts = np.array([[[8, 0], [0, 8]]], dtype=np.int64)
    assert load(2, counts).rank_max_over_mean.tolist() == [1.0]
    assert load(2, counts).layer_by_layer.tolist() == [2.0]
    assert load().layer_by_layer.tolist() == [10 / 8, 12 / 8]


def test_ranks_hold_the_experts_that_placement_gives_them() -> None:
    counts = np.random.default_rng(0).integers(0, 100, (3, 2, 24))
    measured = load(8, counts)
    for rank in range(8):
        local = list(measured.placement.local_experts(rank))
        assert np.array_equal(measured.rank_tokens[:, :, rank], counts[:, :, local].sum(axis=2))


def test_nothing_routed_is_balance() -> None:
    assert over_mean(np.zeros((2, 3))).tolist() == [[1, 1, 1], [1, 1, 1]]
    empty = load(2, np.zeros((1, 2, 4), dtype=np.int64))
    assert empty.layer_by_layer.tolist() == [1.0]
    assert "NaN" not in json.dumps(empty.to_dict())


def test_sentence() -> None:
    assert load().sentence() == (
        "busiest expert 2.75x the mean (layer 5, expert 3); busiest rank 1.38x the mean (rank 1)"
    )
    assert load(1).sentence() == (
        "busiest expert 2.75x the mean (layer 5, expert 3); one rank holds all experts"
    )


def test_report() -> None:
    told = json.loads(json.dumps(load().to_dict()))
    assert told["steps"] == 2
    assert told["layers"][1] == {"layer": 5, "tokens_per_expert": [1, 1, 3, 11], "max_over_mean": 2.75}
    assert told["busiest_expert"] == {"layer": 5, "expert": 3, "over_mean": 2.75}
    assert told["busiest_rank"] == {"rank": 1, "over_mean": 1.375}
    assert told["per_step"][1] == {"tokens_per_rank": [4, 12], "max_over_mean": 1.5, "layer_by_layer": 1.5}


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (COUNTS.astype(np.int32), "must be int64"),
        (COUNTS[0], r"got int64 of shape \[2, 4\]"),
        (COUNTS[:, :1], r"\[steps, 2 layers, 4 experts\], got int64 of shape \[2, 1, 4\]"),
        (-COUNTS, "negative"),
    ],
)
def test_malformed_counts(counts: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertLoad(counts=counts, layers=(3, 5), placement=ExpertPlacement.linear(4, 2))


CONFIG = {
    **{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8},
    **{"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 8},
}


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tensor_parallel_size": 2},
        {"ulysses_degree": 2, "cfg_parallel_size": 2, "enable_expert_parallel": True},
    ],
)
def test_countable(sizes: dict[str, Any]) -> None:
    check_countable(RunRequest(**sizes), CONFIG, flag="--flag")


@pytest.mark.parametrize("sizes", [{"ulysses_degree": 2}, {"cfg_parallel_size": 2, "data_parallel_size": 2}])
def test_tokens_split_without_expert_parallelism(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"--flag on \d ranks .* needs --enable-expert-"):
        check_countable(RunRequest(**sizes), CONFIG, flag="--flag")


def test_dense_model() -> None:
    dense = {key: value for key, value in CONFIG.items() if "moe" not in key and key != "num_experts"}
    with pytest.raises(ConfigurationError, match="--flag needs a mixture-of-experts model"):
        check_countable(RunRequest(), dense, flag="--flag")


def test_arithmetic_needs_no_torch() -> None:
    heavy = "{'torch', 'vllm', 'matplotlib'}"
    program = f"import sys, omni_ep.expert_load_plot; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("sp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("prompt", [0, 5])
def test_each_token_is_counted_on_one_sp_rank(sp_size: int, prompt: int) -> None:
    from omni_ep.models.hunyuan_image3.expert_load import counted_positions

    for image in range(1, 20):
        shard = -(-image // sp_size)
        padded = [*range(prompt, prompt + image), *[-1] * (shard * sp_size - image)]
        counted: list[int] = []
        for rank in range(sp_size):
            sequence = [*range(prompt), *padded[rank * shard : (rank + 1) * shard]]
            # Without sequence parallelism the model does not compute a shard at all.
            positions = counted_positions(
                len(sequence),
                shard=shard if sp_size > 1 else 0,
                padding=shard * sp_size - image if sp_size > 1 else 0,
                sp_rank=rank,
                sp_size=sp_size,
            )
            counted += sequence[positions]
        assert counted == list(range(prompt + image))


def _layers(*, monolithic: bool = False) -> tuple[Any, list[Any]]:
    from torch import nn

    captured: list[Any] = []
    layers = [nn.Module(), nn.Module()]
    layers[0].mlp = nn.Identity()  # a dense layer
    layers[1].mlp = nn.Module()
    router = SimpleNamespace(global_num_experts=4, set_capture_fn=captured.append)
    object.__setattr__(layers[1].mlp, "experts", SimpleNamespace(router=router, is_monolithic=monolithic))
    return layers, captured


def _counter(layers: Any) -> Any:
    from omni_ep.layout import ParallelLayout
    from omni_ep.models.hunyuan_image3.expert_load import ExpertLoadCounter

    return ExpertLoadCounter(layers, layout=ParallelLayout(), rank=0, branches_split=lambda: True)


def test_kernel_without_router_is_refused() -> None:
    layers, captured = _layers(monolithic=True)
    with pytest.raises(NotImplementedError, match="layer 1 chooses the experts without vLLM's router"):
        _counter(layers)
    assert captured == []
    assert not layers[0]._forward_pre_hooks


def test_gathered_tokens_are_an_error_and_dense_layers_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from omni_ep.models.hunyuan_image3 import expert_load

    layers, captured = _layers()
    counter = _counter(layers)
    assert counter.layers == (1,)
    [capture] = captured
    arguments = {"hidden_states": torch.zeros(2, 3, 8), "shard_image_size": 0, "shard_padding_size": 0}
    ids = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [0, 1]], dtype=torch.int32)

    step = SimpleNamespace(denoise_step_idx=None)
    monkeypatch.setattr(expert_load, "get_forward_context", lambda: step)
    counter._begin_step(layers[0], (), arguments)
    capture(ids)
    assert counter.counts() is None, "only denoising steps count"

    step.denoise_step_idx = 1
    counter._begin_step(layers[0], (), arguments)
    capture(ids)
    assert counter.counts().tolist() == [[[0, 0, 0, 0]], [[4, 4, 2, 2]]]
    with pytest.raises(RuntimeError, match="layer 1 was given 12 tokens, but this rank has 6"):
        capture(torch.cat([ids, ids]))
