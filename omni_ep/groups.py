# SPDX-License-Identifier: Apache-2.0
"""Makes a layout live in vLLM's parallel state, and takes it down again.

vLLM-Omni 0.30 maps SP to vLLM's PCP and CFG×DP to vLLM's DP
(``diffusion/distributed/parallel_state.py:886-923``). vLLM's dispatch then gathers over DP
only, as soon as DP has more than one rank (``device_communicators/all2all.py:55-60``): under
SP × (CFG or DP) the tokens of the other SP ranks never reach the experts, and the picture is
wrong without a word. Here SP is folded into vLLM's DP, so that one dispatch group covers
every rank of the stage that holds different tokens.
"""

from dataclasses import dataclass

import torch.distributed as dist
import vllm.distributed.parallel_state as vllm_ps
import vllm_omni.diffusion.distributed.parallel_state as omni_ps
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

from omni_ep.layout import ParallelLayout

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The coordinators that this module answers for."""

    layout: ParallelLayout
    dp: vllm_ps.GroupCoordinator
    ep: vllm_ps.GroupCoordinator

    def is_live(self) -> bool:
        return vllm_ps._DP is self.dp and vllm_ps._EP is self.ep


_prepared: _Prepared | None = None


def live_layout() -> ParallelLayout:
    """The layout of the groups that vLLM-Omni has made in this process.

    Raises:
        RuntimeError: no groups exist, or they do not multiply to the world size.
    """
    if not (dist.is_initialized() and omni_ps.model_parallel_is_initialized()):
        raise RuntimeError(
            "vLLM-Omni's parallel groups do not exist yet; "
            "initialize_model_parallel() comes before the experts"
        )
    layout = ParallelLayout(
        tp=vllm_ps.get_tensor_model_parallel_world_size(),
        sp=omni_ps.get_sequence_parallel_world_size(),
        pp=omni_ps.get_pipeline_parallel_world_size(),
        cfg=omni_ps.get_classifier_free_guidance_world_size(),
        dp=omni_ps.get_data_parallel_world_size(),
    )
    if layout.world_size != dist.get_world_size():
        raise RuntimeError(
            f"vLLM-Omni's groups multiply to {layout.world_size} ranks ({layout.describe()}), "
            f"but {dist.get_world_size()} ranks are running"
        )
    return layout


def prepare_expert_parallel() -> ParallelLayout | None:
    """Make or check vLLM's EP group and the folded DP group of this rank.

    Every rank must call it at the same point, since making a group is a collective call.
    Calling it again while its groups are live does nothing.

    Returns:
        The layout, or ``None`` when expert parallelism is off and nothing was touched.

    Raises:
        RuntimeError: a group that exists has other ranks than the layout gives it.
    """
    global _prepared
    config = get_current_vllm_config_or_none()
    if config is None or not config.parallel_config.enable_expert_parallel:
        return None
    if _prepared is not None and _prepared.is_live():
        return _prepared.layout

    layout = live_layout()
    rank = dist.get_rank()
    dispatch_groups = [list(group) for group in layout.dispatch_groups()]
    ep_groups = [list(group) for group in layout.ep_groups()]
    _check("tensor-parallel", vllm_ps._TP, [list(group) for group in layout.tp_groups()], rank)

    dp, ep = vllm_ps._DP, vllm_ps._EP
    refold = dp is None or dp is omni_ps._DP or dp.ranks != _own(dispatch_groups, rank)
    if ep is not None:
        _check("expert-parallel", ep, ep_groups, rank)
    if refold:
        if dp is not None and dp is not omni_ps._DP:
            dp.destroy()
            vllm_ps._DP = None
        vllm_ps._DP = dp = _make_group(dispatch_groups, "dp")
    if refold or ep is None:
        # The EP group's all-to-all manager keeps the DP group it was made with
        # (base_device_communicator.py:50), so it cannot outlive the old one.
        if ep is not None:
            ep.destroy()
            vllm_ps._EP = None
        vllm_ps._EP = ep = _make_group(ep_groups, "ep", use_all2all=True)
    assert dp is not None
    assert ep is not None
    _prepared = _Prepared(layout=layout, dp=dp, ep=ep)
    logger.debug("%s; this rank dispatches over %s", layout.describe(), dp.ranks)
    return layout


def release_expert_parallel() -> None:
    """Destroy the groups of :func:`prepare_expert_parallel`; a second call does nothing.

    vLLM-Omni's own ``destroy_model_parallel`` takes them down too, since they stand where its
    groups stood; this is for callers that keep the remaining groups.
    """
    global _prepared
    if _prepared is not None and _prepared.is_live():
        _prepared.ep.destroy()
        vllm_ps._EP = None
        if _prepared.dp is not omni_ps._DP:
            _prepared.dp.destroy()
            vllm_ps._DP = omni_ps._DP
    _prepared = None


def _own(groups: list[list[int]], rank: int) -> list[int]:
    return next(group for group in groups if rank in group)


def _check(kind: str, group: vllm_ps.GroupCoordinator | None, expected: list[list[int]], rank: int) -> None:
    if group is not None and list(group.ranks) != _own(expected, rank):
        raise RuntimeError(
            f"the {kind} group of rank {rank} holds ranks {list(group.ranks)}, "
            f"but the layout needs {_own(expected, rank)}; another component has made it differently"
        )


def _make_group(groups: list[list[int]], name: str, *, use_all2all: bool = False) -> vllm_ps.GroupCoordinator:
    world = vllm_ps.get_world_group() if vllm_ps._WORLD is not None else omni_ps.get_world_group()
    return vllm_ps.init_model_parallel_group(
        group_ranks=groups,
        local_rank=world.local_rank,
        backend=dist.get_backend(world.device_group),
        group_name=name,
        use_all2all=use_all2all,
    )
