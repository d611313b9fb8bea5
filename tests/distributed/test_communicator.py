# SPDX-License-Identifier: Apache-2.0
"""Variable-size collectives on real gloo ranks: rows in rank order, sums in float32 and in rank order."""

import pickle
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks

#: rows that each rank brings; from 5 ranks on, torch's own sum leaves rank order.
COUNTS = {
    "one rank": [3],
    "equal": [4, 4, 4],
    "uneven": [5, 1, 3],
    "a rank without rows": [2, 0, 3, 0],
    "only the last": [0, 0, 4],
    "nobody": [0, 0],
    "five ranks": [2, 3, 0, 1, 4],
}
DTYPES = (torch.bfloat16, torch.float32, torch.int64)
HIDDEN = 37


def _rows(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that name their rank and their place; exact in every dtype."""
    return (rank * 16 + torch.arange(count)[:, None] + torch.zeros(count, 3)).to(dtype)


def _partial(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of very different size, so that another order of addition gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    magnitude = 10.0 ** torch.randint(-3, 4, (rows, HIDDEN), generator=generator)
    return (torch.randn(rows, HIDDEN, generator=generator) * magnitude).to(dtype)


def _communicator(rank: int, world_size: int, port: int) -> Any:
    """The communicator as vLLM's group coordinator makes it, without an engine around it."""
    import torch.distributed as dist

    from omni_ep.platforms.cpu.communicator import CpuEpCommunicator

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    world = dist.group.WORLD
    return CpuEpCommunicator(world, torch.device("cpu"), world, unique_name="dp:0")


# Ranks answer in pickled bytes: a tensor on its own would be a handle to memory that ends with its rank.


def _gather(rank: int, counts: list[int], port: int) -> bytes:
    communicator = _communicator(rank, len(counts), port)
    mine = counts[rank]
    got: dict[str, Any] = {
        str(dtype): communicator.all_gatherv(_rows(rank, mine, dtype), sizes=counts) for dtype in DTYPES
    }
    got["list"] = communicator.all_gatherv([_rows(rank, mine, dtype) for dtype in DTYPES], sizes=counts)
    got["strided"] = communicator.all_gatherv(_rows(rank, 2 * mine, torch.float32)[::2], sizes=counts)
    if len(set(counts)) == 1:
        got["no sizes"] = communicator.all_gatherv(_rows(rank, mine, torch.float32))
    return pickle.dumps(got)


@pytest.mark.parametrize("case", COUNTS)
def test_gathered_rows_are_in_rank_order(case: str) -> None:
    from vllm.utils.network_utils import get_open_port

    counts = COUNTS[case]
    results = run_on_ranks(_gather, len(counts), counts, get_open_port())
    for got in map(pickle.loads, results):
        for position, dtype in enumerate(DTYPES):
            want = torch.cat([_rows(rank, count, dtype) for rank, count in enumerate(counts)])
            for gathered in (got[str(dtype)], got["list"][position]):
                assert gathered.dtype == dtype
                assert torch.equal(gathered, want)
        want = torch.cat([_rows(rank, 2 * count, torch.float32)[::2] for rank, count in enumerate(counts)])
        assert torch.equal(got["strided"], want)
        if "no sizes" in got:
            assert torch.equal(got["no sizes"], got[str(torch.float32)])


def _reduce(rank: int, counts: list[int], port: int) -> bytes:
    communicator = _communicator(rank, len(counts), port)
    repetitions = {
        str(dtype): [
            communicator.reduce_scatterv(_partial(rank, sum(counts), dtype), dim=0, sizes=counts)
            for _ in range(3)
        ]
        for dtype in (torch.bfloat16, torch.float32)
    }
    return pickle.dumps(repetitions)


@pytest.mark.parametrize("case", COUNTS)
def test_sums_run_in_float32_and_in_rank_order(case: str) -> None:
    """Bit for bit, in every repetition: rounded to the input's dtype once, at the end."""
    from vllm.utils.network_utils import get_open_port

    counts = COUNTS[case]
    results = [pickle.loads(got) for got in run_on_ranks(_reduce, len(counts), counts, get_open_port())]
    for dtype in (torch.bfloat16, torch.float32):
        total = _partial(0, sum(counts), dtype).float()
        for rank in range(1, len(counts)):
            total = total + _partial(rank, sum(counts), dtype).float()
        for got, want in zip(results, total.to(dtype).split(counts), strict=True):
            for repetition in got[str(dtype)]:
                assert repetition.dtype == dtype
                assert torch.equal(repetition, want)


def test_the_partials_would_show_another_order() -> None:
    """Otherwise the test above proves nothing about order or precision."""
    partials = [_partial(rank, 10, torch.float32) for rank in range(5)]
    assert not torch.equal(sum(partials[1:], partials[0]), sum(partials[-2::-1], partials[-1]))
    rounded = [_partial(rank, 10, torch.bfloat16) for rank in range(3)]
    in_float32 = sum((partial.float() for partial in rounded[1:]), rounded[0].float())
    assert not torch.equal(sum(rounded[1:], rounded[0]), in_float32.bfloat16())


def _errors(rank: int, port: int) -> dict[str, str]:
    communicator = _communicator(rank, 2, port)
    rows = torch.zeros(3, 4)
    calls = {
        "announced": lambda: communicator.all_gatherv(rows, sizes=[4, 4]),
        "sizes": lambda: communicator.all_gatherv(rows, sizes=[3, 3, 3]),
        "scatter sizes": lambda: communicator.reduce_scatterv(rows, dim=0, sizes=[3]),
        "gather dim": lambda: communicator.all_gatherv(rows, dim=1),
        "scatter dim": lambda: communicator.reduce_scatterv(rows, dim=-1),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def test_a_wrong_call_is_refused_before_anything_is_sent() -> None:
    from vllm.utils.network_utils import get_open_port

    for rank, errors in enumerate(run_on_ranks(_errors, 2, get_open_port())):
        assert errors == {
            "announced": f"ValueError: rank {rank} brings 3 rows but announced 4; "
            "the token counts of the ranks are [4, 4]",
            "sizes": "ValueError: got 3 sizes for a group of 2 ranks",
            "scatter sizes": "ValueError: got 1 sizes for a group of 2 ranks",
            "gather dim": "NotImplementedError: all_gatherv gathers over dimension 0, got 1",
            "scatter dim": "NotImplementedError: reduce_scatterv scatters over dimension 0, got -1",
        }
