# SPDX-License-Identifier: Apache-2.0
"""All layouts of N devices: those that fit, best first, and the others with the reason."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from omni_ep.config import RunRequest
from omni_ep.layout_names import FACTORS, layout_name
from omni_ep.planner.cost import Cost, Rates, cost_of
from omni_ep.planner.plan import Plan, Settings, make_plan
from omni_ep.planner.rules import reason_against
from omni_ep.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that can run and fits its devices."""

    name: str
    request: RunRequest
    plan: Plan
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A layout that cannot run or does not fit, and why."""

    name: str
    reason: str
    plan: Plan | None = None
    """Only where it could run but does not fit."""


def enumerate_layouts(
    settings: Settings, request: RunRequest, devices: int, rates: Rates
) -> tuple[list[Candidate], list[Dropped]]:
    """Every way to write ``devices`` as a product of parallel sizes, with EP and without.

    Args:
        request: the picture; its parallel sizes are ignored.
        devices: ranks to use, all of them.

    Returns:
        Candidates by ascending cost, then by name; dropped layouts, those nearest to fitting first.
    """
    candidates, dropped = [], []
    for sizes in _factorisations(devices):
        for expert_parallel in (True, False):
            fields: dict[str, Any] = {**sizes, "enable_expert_parallel": expert_parallel}
            asked = replace(request, **fields)
            name = layout_name(asked)
            reason = reason_against(settings.model, asked)
            if reason is not None:
                dropped.append(Dropped(name=name, reason=reason))
                continue
            plan = make_plan(settings, asked.layout, expert_parallel=expert_parallel)
            if plan.fits is False:
                dropped.append(Dropped(name=name, reason=_too_big(plan), plan=plan))
                continue
            candidates.append(Candidate(name=name, request=asked, plan=plan, cost=cost_of(plan, rates)))
    candidates.sort(key=lambda candidate: (candidate.cost.seconds, candidate.name))
    dropped.sort(key=lambda drop: (drop.plan is None, drop.plan.total_bytes if drop.plan else 0, drop.name))
    return candidates, dropped


def _too_big(plan: Plan) -> str:
    memory = plan.settings.device_memory or 0
    return (
        f"needs {format_bytes(plan.total_bytes)} per rank but a device has {format_bytes(memory)}, "
        f"{format_bytes(plan.total_bytes - memory)} too little"
    )


def _factorisations(devices: int) -> Iterator[dict[str, int]]:
    """All ordered products of the six parallel sizes that give ``devices``."""

    def split(rest: int, fields: list[str]) -> Iterator[dict[str, int]]:
        if len(fields) == 1:
            yield {fields[0]: rest}
            return
        for size in range(1, rest + 1):
            if rest % size == 0:
                for others in split(rest // size, fields[1:]):
                    yield {fields[0]: size, **others}

    yield from split(devices, list(FACTORS.values()))
