# SPDX-License-Identifier: Apache-2.0
"""SP folded into vLLM's DP on the real worker's groups: made once, checked, taken down without a trace."""

from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.topologies import run_request

#: topology → who dispatches with whom, derived by hand from rank = tp + TP (sp + SP (cfg + CFG dp)).
FOLDED = {
    "sp2+ep": [[0, 1]],
    "tp2*sp2+ep": [[0, 2], [1, 3]],
    "cfg2*sp2+ep": [[0, 1, 2, 3]],
}
#: Without SP, vLLM-Omni's own groups already are the dispatch groups.
UNTOUCHED = {
    "tp2+ep": [[0], [1]],
    "cfg2+ep": [[0, 1]],
    "dp2+ep": [[0, 1]],
    "tp2*cfg2+ep": [[0, 2], [1, 3]],
}


def _count_new_groups() -> list[int]:
    """A one-element counter of process groups made from now on."""
    import torch.distributed as dist

    count, new_group = [0], dist.new_group

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return new_group(*args, **kwargs)

    dist.new_group = torch.distributed.new_group = counting
    return count


def _state() -> dict[str, Any]:
    """Every group that vLLM or vLLM-Omni holds in this process."""
    import vllm.distributed.parallel_state as vllm_ps
    import vllm_omni.diffusion.distributed.parallel_state as omni_ps

    return {
        **{f"vllm {name}": getattr(vllm_ps, name) for name in ("_WORLD", "_TP", "_DP", "_EP", "_PP", "_PCP")},
        **{f"omni {name}": getattr(omni_ps, name) for name in ("_WORLD", "_DP", "_CFG", "_SP", "_PP")},
    }


def _prepare(rank: int, od_config: Any) -> dict[str, Any]:
    import vllm.distributed.parallel_state as vllm_ps

    from omni_ep.groups import prepare_expert_parallel
    from tests.workers import worker

    with worker(rank, od_config):
        before = _state()
        created = _count_new_groups()
        layout = prepare_expert_parallel()
        dp, ep = vllm_ps.get_dp_group(), vllm_ps.get_ep_group()
        made = created[0]
        again = prepare_expert_parallel()
        # The groups are used, not only named: each adds up the ranks it holds.
        sums = [int(group.all_reduce(torch.tensor([rank]))) for group in (dp, ep)]
        manager: Any = getattr(ep.device_communicator, "all2all_manager", None)
        others = {name for name, group in before.items() if _state()[name] is not group}
        return {
            "layout": layout,
            "dp": list(dp.ranks),
            "ep": list(ep.ranks),
            "sums": sums,
            "manager": (manager.dp_world_size, manager.dp_rank, manager.dp_group is dp),
            "changed": others,
            "made": made,
            "idempotent": again is layout and vllm_ps._DP is dp and vllm_ps._EP is ep,
            "made by the second call": created[0] - made,
            "upstream dispatches over": list(before["vllm _DP"].ranks),
        }


@pytest.mark.parametrize("topology", [*FOLDED, *UNTOUCHED])
def test_prepared_groups(topology: str) -> None:
    from tests.workers import diffusion_config

    request = run_request(topology)
    groups = (FOLDED | UNTOUCHED)[topology]
    world = list(range(request.layout.world_size))
    assert request.layout.dispatch_groups() == groups
    results = run_on_ranks(_prepare, len(world), diffusion_config(request, dtype=torch.float32))
    for rank, got in enumerate(results):
        dispatch = next(group for group in groups if rank in group)
        assert got["layout"] == request.layout
        assert got["dp"] == dispatch
        assert got["ep"] == world
        assert got["sums"] == [sum(dispatch), sum(world)]
        assert got["manager"] == (len(dispatch), dispatch.index(rank), True)
        assert got["idempotent"]
        assert got["made by the second call"] == 0
        if topology in FOLDED:
            assert got["changed"] == {"vllm _DP", "vllm _EP"}
            assert got["made"] > 0
            assert got["upstream dispatches over"] != dispatch, (
                "upstream has changed: vLLM-Omni's DP group covers SP; remove the fold from omni_ep/groups.py"
            )
        else:
            assert got["changed"] == set()
            assert got["made"] == 0


def _prepare_without_ep(rank: int, od_config: Any) -> tuple[Any, bool]:
    from omni_ep.groups import prepare_expert_parallel
    from tests.workers import worker

    outside = prepare_expert_parallel()
    with worker(rank, od_config):
        before = _state()
        return (outside, prepare_expert_parallel()), all(
            _state()[name] is group for name, group in before.items()
        )


def test_nothing_is_touched_with_ep_off() -> None:
    from tests.workers import diffusion_config

    od_config = diffusion_config(run_request("tp2"), dtype=torch.float32)
    assert run_on_ranks(_prepare_without_ep, 2, od_config) == [((None, None), True)] * 2


def _release_and_start_again(rank: int, configs: list[Any]) -> dict[str, Any]:
    import torch.distributed as dist
    import vllm.distributed.parallel_state as vllm_ps
    import vllm_omni.diffusion.distributed.parallel_state as omni_ps

    from omni_ep.groups import prepare_expert_parallel, release_expert_parallel
    from tests.workers import worker

    got: dict[str, Any] = {}
    with worker(rank, configs[0]):
        first = prepare_expert_parallel()
        release_expert_parallel()
        release_expert_parallel()
        got["released"] = vllm_ps._EP is None and vllm_ps._DP is omni_ps._DP
        got["prepared anew"] = prepare_expert_parallel() is not first and vllm_ps._EP is not None
        got["folded anew"] = list(vllm_ps.get_dp_group().ranks)
        release_expert_parallel()
    got["left by the first"] = [name for name, group in _state().items() if group is not None]
    got["running"] = dist.is_initialized()
    # The second worker is shut down with its groups live: vLLM-Omni's own tear-down takes them.
    with worker(rank, configs[1]):
        prepare_expert_parallel()
        got["second"] = list(vllm_ps.get_dp_group().ranks)
    release_expert_parallel()
    got["left by the second"] = [name for name, group in _state().items() if group is not None]
    return got


def test_release_and_a_second_worker_in_the_same_process() -> None:
    from tests.workers import diffusion_config

    configs = [diffusion_config(run_request("cfg2*sp2+ep"), dtype=torch.float32) for _ in range(2)]
    for got in run_on_ranks(_release_and_start_again, 4, configs):
        assert got == {
            "released": True,
            "prepared anew": True,
            "folded anew": [0, 1, 2, 3],
            "left by the first": [],
            "running": False,
            "second": [0, 1, 2, 3],
            "left by the second": [],
        }


def _meet_wrong_groups(rank: int, od_config: Any) -> dict[str, str]:
    import vllm.distributed.parallel_state as vllm_ps
    import vllm_omni.diffusion.distributed.parallel_state as omni_ps

    from omni_ep.groups import live_layout, prepare_expert_parallel
    from tests.workers import worker

    def error_of(function: Any) -> str:
        try:
            function()
        except RuntimeError as error:
            return str(error)
        return "no error"

    got = {"no groups": error_of(live_layout)}
    with worker(rank, od_config):
        right_ep, right_tp, right_cfg = vllm_ps._EP, vllm_ps._TP, omni_ps._CFG
        vllm_ps._EP = vllm_ps._TP
        got["ep"] = error_of(prepare_expert_parallel)
        vllm_ps._EP = right_ep
        vllm_ps._TP = right_ep
        got["tp"] = error_of(prepare_expert_parallel)
        vllm_ps._TP, omni_ps._CFG = right_tp, vllm_ps._PP
        got["world"] = error_of(live_layout)
        omni_ps._CFG = right_cfg
        got["right again"] = error_of(prepare_expert_parallel)
    return got


def test_groups_that_exist_are_checked_not_trusted() -> None:
    from tests.workers import diffusion_config

    od_config = diffusion_config(run_request("cfg2+ep"), dtype=torch.float32)
    needs = "but the layout needs [{}]; another component has made it differently"
    for rank, got in enumerate(run_on_ranks(_meet_wrong_groups, 2, od_config)):
        assert got == {
            "no groups": "vLLM-Omni's parallel groups do not exist yet; "
            "initialize_model_parallel() comes before the experts",
            "ep": f"the expert-parallel group of rank {rank} holds ranks [{rank}], {needs.format('0, 1')}",
            "tp": "vLLM-Omni's groups multiply to 4 ranks (EP=4 = TP 2 x SP 1 x CFG 2 x DP 1 "
            "(1 pipeline stage)), but 2 ranks are running",
            "world": "vLLM-Omni's groups multiply to 1 ranks (EP=1 = TP 1 x SP 1 x CFG 1 x DP 1 "
            "(1 pipeline stage)), but 2 ranks are running",
            "right again": "no error",
        }
