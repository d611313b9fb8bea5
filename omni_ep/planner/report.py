# SPDX-License-Identifier: Apache-2.0
"""A plan, and a list of plans, as text for people. Every number has its unit."""

import shlex
from collections.abc import Sequence

from omni_ep.config import RunRequest
from omni_ep.layout_names import layout_flags, layout_name
from omni_ep.planner.cost import Rates
from omni_ep.planner.diagram import draw
from omni_ep.planner.enumerate import Candidate, Dropped
from omni_ep.planner.plan import Plan, Settings
from omni_ep.planner.traffic import ALL_TO_ALL, ALLGATHER, TP_WITHOUT_EP
from omni_ep.planner.weights import PARAMETER_PARTS, Part
from omni_ep.units import format_bytes

EXAMPLE = "examples/text_to_image/text_to_image.py"

_BACKEND_NAMES = {
    ALLGATHER: "EP, allgather/reducescatter",
    ALL_TO_ALL: "EP, all-to-all, once per rank",
    TP_WITHOUT_EP: "TP without EP",
}
_MOST_ROWS = 12


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns; the first ``left`` to the left, the others to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def heading(settings: Settings) -> str:
    """The model, where its figures come from, and the request."""
    model, work = settings.model, settings.workload
    geometry = model.geometry
    shape = (
        f"{len(geometry.moe_layers)} MoE layers of {geometry.num_experts} experts, "
        f"top-{max(geometry.top_k)}; {model.routed_parameters / 1e9:.1f} billion routed parameters"
        if geometry.is_moe
        else "no routed experts"
    )
    image = (
        f"{work.image_tokens:,} tokens"
        if work.image_tokens_override is not None
        else f"{work.height}x{work.width} pixels = {work.image_tokens:,} image tokens"
    )
    lines = [
        f"model     {model.name}: {shape}",
        f"dtype     {settings.precision.name}"
        + (", VAE in fp32 (CPU)" if settings.on_cpu and settings.precision.name != "fp32" else ""),
        f"request   {image}, {work.prompt_tokens} prompt tokens, {work.batch} picture(s), "
        f"guidance {'on: 2 sequences each' if work.guidance else 'off'}",
        *(f"note      {note}" for note in model.notes),
    ]
    return "\n".join(lines)


def plan_text(plan: Plan) -> str:
    """One layout: diagram, memory by part, traffic by back-end."""
    geometry = plan.settings.model.geometry
    ep = f"EP {plan.ep_size}" if plan.expert_parallel else "EP off"
    ranks = plan.layout.world_size
    pieces = [
        f"layout    {plan.layout.describe() if plan.expert_parallel else ep}; {ranks} "
        f"rank{'s' if ranks > 1 else ''}"
    ]
    if geometry.is_moe:
        pieces.append(
            draw(plan.layout, num_experts=geometry.num_experts, expert_parallel=plan.expert_parallel)
        )
    return "\n\n".join([*pieces, _memory_text(plan), _traffic_text(plan)])


def _memory_text(plan: Plan) -> str:
    rows = [["memory of each rank", "bytes", ""]]
    for part in Part:
        size = plan.parts[part]
        if size or part in (Part.ROUTED_EXPERTS, Part.ACTIVATIONS):
            estimate = "" if part in PARAMETER_PARTS else " (estimate)"
            rows.append([part.value + estimate, f"{size:,} B", format_bytes(size)])
        if part is PARAMETER_PARTS[-1]:
            rows.append(
                ["parameters together", f"{plan.parameter_bytes:,} B", format_bytes(plan.parameter_bytes)]
            )
    rows.append(["total", f"{plan.total_bytes:,} B", format_bytes(plan.total_bytes)])
    memory, left = plan.settings.device_memory, plan.left_bytes
    if memory is not None and left is not None:
        rows.append(["device", f"{memory:,} B", format_bytes(memory)])
        rows.append(["left", f"{left:,} B", format_bytes(left)])
    verdict = {None: "", True: "\n\nfits", False: "\n\ndoes not fit"}[plan.fits]
    return table(rows) + verdict


def _traffic_text(plan: Plan) -> str:
    traffic = plan.traffic
    rows = [["received by each rank from others", "per MoE layer", "per step", "first step"]]
    for name, title in _BACKEND_NAMES.items():
        figures = (traffic.per_layer[name], traffic.per_step[name], traffic.first_per_step[name])
        rows.append([title, *("impossible" if size is None else format_bytes(size) for size in figures)])
    attention = format_bytes(traffic.attention_per_step)
    rows.append(["attention (TP and Ulysses)", "", attention, ""])
    return table(rows)


def candidates_text(candidates: Sequence[Candidate], rates: Rates) -> str:
    """The ranking, best first."""
    rows = [["layout", "EP", "per rank", "left", "traffic/step", "replication", "cost"]]
    for candidate in candidates[:_MOST_ROWS]:
        plan, cost = candidate.plan, candidate.cost
        left = plan.left_bytes
        rows.append(
            [
                candidate.name,
                str(plan.ep_size),
                format_bytes(plan.total_bytes),
                "" if left is None else format_bytes(left),
                format_bytes(cost.wire_bytes),
                f"{cost.replication:.2f} x",
                f"{cost.seconds * 1000:.1f} ms",
            ]
        )
    more = len(candidates) - _MOST_ROWS
    tail = f"\n  ... and {more} more that fit" if more > 0 else ""
    formula = (
        "cost = (compute + wire time of a step) x (1 + scarcity of memory), at "
        f"{rates.flops_per_s / 1e12:g} TFLOP/s and {rates.bytes_per_s / 1e9:g} GB/s; it ranks, no forecast"
    )
    return f"{len(candidates)} layouts fit, best first\n{table(rows)}{tail}\n  {formula}"


def dropped_text(dropped: Sequence[Dropped]) -> str:
    """Layouts that do not fit one by one, impossible ones by reason."""
    lines = []
    too_big = [drop for drop in dropped if drop.plan is not None]
    lines += [f"  {drop.name}: {drop.reason}" for drop in too_big[:_MOST_ROWS]]
    if len(too_big) > _MOST_ROWS:
        lines.append(f"  ... and {len(too_big) - _MOST_ROWS} more that do not fit")
    reasons: dict[str, list[str]] = {}
    for drop in dropped:
        if drop.plan is None:
            reasons.setdefault(drop.reason, []).append(drop.name)
    for reason, names in reasons.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"  {names[0]}{others}: {reason}")
    return f"{len(dropped)} layouts dropped\n" + "\n".join(lines)


def command_line(model: str, request: RunRequest, dtype: str) -> str:
    """What runs the layout; sizes at their defaults are left out."""
    fields = {
        "enable_expert_parallel": request.enable_expert_parallel,
        **{
            flag: getattr(request, flag)
            for flag in (
                "tensor_parallel_size",
                "ulysses_degree",
                "ring_degree",
                "pipeline_parallel_size",
                "cfg_parallel_size",
                "data_parallel_size",
            )
        },
    }
    words = ["python", EXAMPLE, "--model", model, *layout_flags(fields)]
    words += ["--height", str(request.height), "--width", str(request.width)]
    if request.num_images_per_prompt > 1:
        words += ["--num-images-per-prompt", str(request.num_images_per_prompt)]
    if dtype == "fp32":
        words += ["--dtype", "float32"]
    return shlex.join(words)


def best_text(candidate: Candidate, settings: Settings) -> str:
    """The best layout in full, and how to run it."""
    model = settings.model
    command = command_line(
        "/path/to/checkpoint" if model.is_preset else model.name, candidate.request, settings.precision.name
    )
    how = f"run it:\n  {command}"
    if not model.is_hunyuan_image3:
        how = "omni-ep does not run this model yet; in vLLM-Omni's flags the layout is:\n  " + shlex.join(
            command.split()[4:]
        )
    if settings.precision.quantized:
        how += f"\n  (with a checkpoint quantised to {settings.precision.name})"
    return f"best: {layout_name(candidate.request)}\n\n{plan_text(candidate.plan)}\n\n{how}"
