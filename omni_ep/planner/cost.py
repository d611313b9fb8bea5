# SPDX-License-Identifier: Apache-2.0
"""What a layout costs: one number to rank layouts by, and the three it is made of.

``cost = (compute seconds + wire seconds) x (1 + scarcity)`` of one denoising step after the first, on the
busiest rank:

* compute seconds = FLOP of a rank / FLOP per second. A rank that repeats what others do (data-parallel
  ranks paint the same request, guidance ranks without guidance, SP's padding, the gate under TP) pays in
  full; ``replication`` says how much: FLOP of all ranks together / FLOP of one device alone.
* wire seconds = bytes a rank receives / bytes per second. Nothing is taken to overlap.
* scarcity = 0 with a tenth of the device left free or more, rising to 1 with nothing left.

The rates are assumptions (``Rates``). They weigh compute against traffic; the order of layouts depends on
their ratio only. The seconds are no forecast: memory-bound work, launches and the image's own convolutions
are not in them.
"""

from dataclasses import dataclass

from omni_ep.layout import ParallelLayout
from omni_ep.planner.plan import Plan
from omni_ep.planner.traffic import ALLGATHER, TP_WITHOUT_EP
from omni_ep.planner.weights import Part

COMFORTABLE_SHARE = 0.1
"""Free share of a device from which more headroom is worth nothing."""

_PER_TOKEN_PARTS = (Part.ATTENTION, Part.SHARED_EXPERTS, Part.ROUTER, Part.DENSE_MLP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device and its links sustain."""

    flops_per_s: float = 400e12
    bytes_per_s: float = 200e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a plan and its parts."""

    seconds: float
    compute_s: float
    wire_s: float
    replication: float
    """1 where no rank repeats another's work."""
    wire_bytes: int
    """Received per rank and step, MoE and attention together."""


def cost_of(plan: Plan, rates: Rates) -> Cost:
    """See the module's formula."""
    mine = step_flops(plan, plan.layout, expert_parallel=plan.expert_parallel)
    alone = step_flops(plan, ParallelLayout(), expert_parallel=False)
    backend = ALLGATHER if plan.expert_parallel else TP_WITHOUT_EP
    wire_bytes = plan.traffic.attention_per_step + (plan.traffic.per_step[backend] or 0)
    compute_s, wire_s = mine / rates.flops_per_s, wire_bytes / rates.bytes_per_s
    scarcity = 0.0
    memory, left = plan.settings.device_memory, plan.left_bytes
    if memory and left is not None:
        scarcity = min(1.0, max(0.0, 1 - left / memory / COMFORTABLE_SHARE))
    return Cost(
        seconds=(compute_s + wire_s) * (1 + scarcity),
        compute_s=compute_s,
        wire_s=wire_s,
        replication=plan.layout.world_size * mine / alone,
        wire_bytes=wire_bytes,
    )


def step_flops(plan: Plan, layout: ParallelLayout, *, expert_parallel: bool) -> int:
    """Floating-point operations of one rank in a step after the first.

    Two per parameter and token for linear layers, 4 x context x width per token for attention, and the
    routed experts' k per token, evenly spread: a rank has its 1/TP of them with EP and without.
    """
    settings, geometry = plan.settings, plan.settings.model.geometry
    tokens = settings.workload.later_step(layout)
    linear = 0
    for weight in settings.model.weights:
        if weight.part in _PER_TOKEN_PARTS and weight.columns > 1:
            count, rows, columns = weight.local(layout, expert_parallel=expert_parallel)
            linear += 2 * tokens.total * count * rows * columns
    width = geometry.num_attention_heads // layout.tp * geometry.head_dim
    scores = 4 * tokens.total * tokens.context * width * geometry.num_layers
    routed = sum(
        2 * tokens.total * top_k * expert // layout.tp
        for top_k, expert in zip(geometry.top_k, geometry.expert_parameter_count, strict=True)
    )
    return linear + scores + routed
