# SPDX-License-Identifier: Apache-2.0
"""Tokens per expert, counted on real gloo ranks, against the gate's choice for the whole sequence.

The decoder layers are stand-ins that get the sequence split as vLLM-Omni splits it; blocks, routers, groups
and hooks are the real ones.
"""

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.test_moe_block import EXPERTS, HIDDEN, _block
from tests.ranks import run_on_ranks
from tests.topologies import TOPOLOGIES, run_request

TOP_K, LAYERS = 2, 2
#: (prompt tokens, image tokens) of each step; with SP 2 there is padding, once a shard of nothing else.
STEPS = [(5, 7), (0, 7), (0, 1)]
BRANCHES = 2


def _sequence(step: int) -> torch.Tensor:
    """Both branches of guidance, [branch, token, hidden]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BRANCHES, sum(STEPS[step]), HIDDEN, generator=generator)


def _gate(layer: int) -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(50 + layer))


class _Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.mlp = _block(TOP_K, with_shared=False, prefix=f"layers.{number}.mlp")

    def forward(self, *, hidden_states: torch.Tensor, **_: Any) -> None:
        # What the experts compute is not of interest, so every layer sees the same tokens.
        self.mlp(hidden_states)


def _share(step: int, layout: Any, rank: int, *, split: bool) -> tuple[torch.Tensor, dict[str, int]]:
    """The rank's tokens, and what vLLM-Omni tells its decoder layers about them."""
    place = layout.coordinates(rank)
    x = _sequence(step)
    if split and layout.cfg > 1:
        x = x[place.cfg : place.cfg + 1]
    if layout.sp == 1:
        return x, {"shard_image_size": 0, "shard_padding_size": 0}
    prompt, image = STEPS[step]
    shard = -(-image // layout.sp)
    padding = shard * layout.sp - image
    padded = torch.cat([x[:, prompt:], torch.zeros(x.shape[0], padding, HIDDEN)], dim=1)
    mine = padded[:, place.sp * shard : (place.sp + 1) * shard]
    return torch.cat([x[:, :prompt], mine], dim=1), {
        "shard_image_size": shard,
        "shard_padding_size": padding,
    }


def _count(rank: int, od_config: Any, request: Any, split: bool) -> np.ndarray | None:
    from vllm.forward_context import set_forward_context
    from vllm_omni.diffusion.forward_context import set_forward_context_denoise_step_idx

    from omni_ep.models.hunyuan_image3.expert_load import ExpertLoadCounter
    from tests.workers import worker

    layout = request.layout
    with torch.no_grad(), worker(rank, od_config) as live:
        torch.set_default_dtype(torch.float32)
        layers = [_Layer(number) for number in range(LAYERS)]
        for number, layer in enumerate(layers):
            layer.mlp.gate.weight.data.copy_(_gate(number))
            for module in layer.modules():
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
        counter = ExpertLoadCounter(layers, layout=layout, rank=rank, branches_split=lambda: split)
        assert counter.layers == (0, 1)
        for step in range(len(STEPS)):
            set_forward_context_denoise_step_idx(step)
            x, sizes = _share(step, layout, rank, split=split)
            for layer in layers:
                with set_forward_context(None, live.vllm_config):
                    layer(hidden_states=x, **sizes)
        counts: np.ndarray | None = counter.counts()
        return counts


def _expected() -> np.ndarray:
    """Top-k of the gate for every token of the undivided sequence."""
    counts = np.zeros((len(STEPS), LAYERS, EXPERTS), dtype=np.int64)
    for step in range(len(STEPS)):
        for layer in range(LAYERS):
            chosen = (_sequence(step).reshape(-1, HIDDEN) @ _gate(layer).T).topk(TOP_K).indices
            counts[step, layer] = np.bincount(chosen.flatten().numpy(), minlength=EXPERTS)
    return counts


def _check(topology: str, *, split: bool = True) -> None:
    from tests.workers import diffusion_config

    request = run_request(topology)
    od_config = diffusion_config(request, dtype=torch.float32)
    results = run_on_ranks(_count, request.layout.world_size, od_config, request, split)
    total = sum(counts for counts in results if counts is not None)
    tokens = [BRANCHES * sum(step) for step in STEPS]
    assert total.sum(axis=2).tolist() == [[count * TOP_K] * LAYERS for count in tokens]
    assert np.array_equal(total, _expected())


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_token_counts_once(topology: str) -> None:
    _check(topology)


def test_idle_guidance_ranks_count_nothing() -> None:
    """Without a second branch both CFG ranks run the whole batch."""
    _check("cfg2+ep", split=False)
