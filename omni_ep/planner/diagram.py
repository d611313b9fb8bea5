# SPDX-License-Identifier: Apache-2.0
"""A layout as a picture of characters: who holds which experts, who talks to whom."""

from omni_ep.layout import DISPATCH_AXES, ParallelLayout
from omni_ep.placement import ExpertPlacement

_MOST_ROWS = 8
_MOST_COLUMNS = 8


def draw(layout: ParallelLayout, *, num_experts: int, expert_parallel: bool) -> str:
    """One block per pipeline stage: rows are TP groups, columns are dispatch groups.

    Of more than 8 rows or columns the middle is left out.

    Raises:
        ConfigurationError: if the experts cannot be divided equally among the EP ranks.
    """
    placement = ExpertPlacement.linear(num_experts, layout.ep_size) if expert_parallel else None
    blocks = [_stage(layout, stage, num_experts, placement) for stage in range(layout.pp)]
    return "\n\n".join(blocks)


def _stage(layout: ParallelLayout, stage: int, num_experts: int, placement: ExpertPlacement | None) -> str:
    rows = [group for group in layout.tp_groups() if layout.stage(group[0]) == stage]
    cells = [[_cell(layout, rank, num_experts, placement) for rank in row] for row in rows]
    labels = [_label(layout, row[0]) for row in rows]
    left = max(map(len, [*labels, ""]))
    width = max(len(cell) for row in cells for cell in row)
    heading = [f"tp {column}".ljust(width) for column in range(layout.tp)]
    lines = [f"{' ' * left}   {_join(heading, ' ')}".rstrip()]
    lines += [
        f"{label.ljust(left)} [ {_join([cell.ljust(width) for cell in row], '|')} ]"
        for label, row in zip(labels, cells, strict=True)
    ]
    if len(lines) > _MOST_ROWS + 1:
        hidden = len(lines) - 1 - _MOST_ROWS
        half = _MOST_ROWS // 2
        lines = [*lines[: half + 1], f"... {hidden} more rows ...", *lines[-half:]]
    name = f"pipeline stage {stage}: " if layout.pp > 1 else ""
    if placement is None:
        title = f"{name}no EP group; every expert is split over the ranks of a row"
    else:
        share = f"{placement.num_local} of {num_experts} experts each"
        title = f"{name}one EP group of {layout.ep_size} ranks, {share}"
    notes = ["a row shares one set of tokens and splits attention (TP group)"]
    if placement is not None and len(rows) > 1:
        notes.append("a column exchanges tokens (dispatch group)")
    return "\n".join([title, *lines, "; ".join(notes)])


def _label(layout: ParallelLayout, rank: int) -> str:
    place = layout.coordinates(rank)
    return " ".join(f"{axis} {getattr(place, axis)}" for axis in DISPATCH_AXES if getattr(layout, axis) > 1)


def _cell(layout: ParallelLayout, rank: int, num_experts: int, placement: ExpertPlacement | None) -> str:
    if placement is None:
        share = f"1/{layout.tp} of each" if layout.tp > 1 else "whole"
        return f"rank {rank}: {num_experts} experts, {share}"
    experts = placement.local_experts(layout.ep_rank(rank))
    held = f"expert {experts[0]}" if len(experts) == 1 else f"experts {experts[0]}-{experts[-1]}"
    return f"rank {rank}: {held}"


def _join(cells: list[str], separator: str) -> str:
    if len(cells) > _MOST_COLUMNS:
        half = _MOST_COLUMNS // 2
        cells = [*cells[:half], "...", *cells[-half:]]
    return f" {separator} ".join(cells)
