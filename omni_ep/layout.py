# SPDX-License-Identifier: Apache-2.0
"""Who sits where: global ranks, their coordinates, and the groups that expert parallelism is made of.

The live process groups are built from these lists, and the planner prints them for machines nobody has at
hand; both only work if the arithmetic needs no process group itself.

vLLM-Omni numbers ranks in the order tp-sp-pp-cfg-dp, tp fastest::

    rank = tp + TP * (sp + SP * (pp + PP * (cfg + CFG * dp)))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omni_ep.errors import ConfigurationError
from omni_ep.placement import ExpertPlacement

AXES = ("tp", "sp", "pp", "cfg", "dp")
"""Parallel axes, fastest-varying first: the order of vLLM-Omni's RankGenerator."""

EP_AXES = ("tp", "sp", "cfg", "dp")
"""Axes an EP group spans: everything inside one pipeline stage."""

DISPATCH_AXES = ("sp", "cfg", "dp")
"""Axes along which ranks hold different tokens; along tp they hold the same ones."""

_TABLE_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Place of one rank, zero-based along each axis."""

    tp: int
    sp: int
    pp: int
    cfg: int
    dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the five parallel axes; all sizes are numbers of ranks.

    Raises:
        ConfigurationError: if a size is not a whole number of at least 1.
    """

    tp: int = 1
    sp: int = 1
    pp: int = 1
    cfg: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            require_positive_int(f"the {axis} size of a parallel layout", getattr(self, axis))

    @classmethod
    def from_flags(
        cls,
        *,
        tensor_parallel_size: int = 1,
        ulysses_degree: int = 1,
        ring_degree: int = 1,
        pipeline_parallel_size: int = 1,
        cfg_parallel_size: int = 1,
        data_parallel_size: int = 1,
    ) -> ParallelLayout:
        """From vLLM-Omni's flag names; ``sp = ulysses_degree * ring_degree``."""
        for flag, value in (
            ("--tensor-parallel-size", tensor_parallel_size),
            ("--ulysses-degree", ulysses_degree),
            ("--ring-degree", ring_degree),
            ("--pipeline-parallel-size", pipeline_parallel_size),
            ("--cfg-parallel-size", cfg_parallel_size),
            ("--data-parallel-size", data_parallel_size),
        ):
            require_positive_int(flag, value)
        return cls(
            tp=tensor_parallel_size,
            sp=ulysses_degree * ring_degree,
            pp=pipeline_parallel_size,
            cfg=cfg_parallel_size,
            dp=data_parallel_size,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all five sizes."""
        return self._size(AXES)

    @property
    def ep_size(self) -> int:
        """Ranks in one EP group: ``tp * sp * cfg * dp``, that is, one pipeline stage."""
        return self._size(EP_AXES)

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a global rank.

        Raises:
            IndexError: if there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in 0..{self.world_size - 1}")
        place: dict[str, int] = {}
        for axis in AXES:
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**place)

    def rank(self, coordinates: Coordinates) -> int:
        """Global rank at ``coordinates``.

        Raises:
            IndexError: if a coordinate is outside its axis.
        """
        for axis in AXES:
            if not 0 <= getattr(coordinates, axis) < getattr(self, axis):
                raise IndexError(
                    f"{axis}={getattr(coordinates, axis)} is not in 0..{getattr(self, axis) - 1}"
                )
        return self._position(coordinates, AXES)

    def groups(self, *axes: str) -> list[list[int]]:
        """Groups of global ranks that differ only along ``axes``.

        Ranks ascend inside a group and groups ascend by their first rank, as in
        ``RankGenerator.get_ranks("-".join(axes))``; the order of the arguments does not matter.

        Raises:
            ValueError: if an axis is unknown.
        """
        unknown = sorted(set(axes) - set(AXES))
        if unknown:
            raise ValueError(f"unknown parallel axes {unknown}; known: {list(AXES)}")
        fixed = [axis for axis in AXES if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            groups.setdefault(tuple(getattr(place, axis) for axis in fixed), []).append(rank)
        return list(groups.values())

    def ep_groups(self) -> list[list[int]]:
        """Expert-parallel groups, one per pipeline stage, indexed by stage."""
        return self.groups(*EP_AXES)

    def ep_rank(self, rank: int) -> int:
        """Position of a global rank in its EP group."""
        return self._position(self.coordinates(rank), EP_AXES)

    def dispatch_groups(self) -> list[list[int]]:
        """Groups that exchange tokens: same pipeline stage, same tp coordinate.

        They are what vLLM must see as its data-parallel groups once SP is folded into DP.
        """
        return self.groups(*DISPATCH_AXES)

    def dispatch_rank(self, rank: int) -> int:
        """Position of a global rank in its dispatch group."""
        return self._position(self.coordinates(rank), DISPATCH_AXES)

    def tp_groups(self) -> list[list[int]]:
        """Groups that share the attention heads of one layer."""
        return self.groups("tp")

    def stage(self, rank: int) -> int:
        """Pipeline stage of a global rank."""
        return self.coordinates(rank).pp

    def describe(self) -> str:
        """One line such as ``EP=4 = TP 2 x SP 1 x CFG 2 x DP 1 (1 pipeline stage)``."""
        factors = " x ".join(f"{axis.upper()} {getattr(self, axis)}" for axis in EP_AXES)
        return f"EP={self.ep_size} = {factors} ({self.pp} pipeline stage{'s' if self.pp > 1 else ''})"

    def table(self, *, num_experts: int | None = None) -> str:
        """A table for people, one line per rank; the middle is left out beyond 32 ranks.

        With ``num_experts`` a last column gives the routed experts of each rank, as global ids.

        Raises:
            ConfigurationError: if ``num_experts`` cannot be divided equally.
        """
        placement = None if num_experts is None else ExpertPlacement.linear(num_experts, self.ep_size)
        header = ["rank", *AXES, "EP group", "EP rank", "dispatch group"]
        rows = [header + (["experts"] if placement else [])]
        shown = range(self.world_size)
        if self.world_size > _TABLE_ROWS:
            shown = range(_TABLE_ROWS // 2)
            rows += [self._row(rank, placement) for rank in shown]
            rows.append([f"... {self.world_size - _TABLE_ROWS} more ranks ..."])
            shown = range(self.world_size - _TABLE_ROWS // 2, self.world_size)
        rows += [self._row(rank, placement) for rank in shown]
        widths = [max(len(row[i]) for row in rows if len(row) > 1) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            if len(row) > 1
            else row[0]
            for row in rows
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description: sizes, groups, and every rank's coordinates."""
        return {
            **asdict(self),
            "world_size": self.world_size,
            "ep_size": self.ep_size,
            "ep_groups": self.ep_groups(),
            "dispatch_groups": self.dispatch_groups(),
            "tp_groups": self.tp_groups(),
            "ranks": [
                {"rank": rank, "coordinates": asdict(self.coordinates(rank))}
                for rank in range(self.world_size)
            ],
        }

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(getattr(self, axis) for axis in axes)

    def _position(self, coordinates: Coordinates, axes: Sequence[str]) -> int:
        position = 0
        for axis in reversed(axes):
            position = position * getattr(self, axis) + getattr(coordinates, axis)
        return position

    def _row(self, rank: int, placement: ExpertPlacement | None) -> list[str]:
        place = self.coordinates(rank)
        ep_rank = self.ep_rank(rank)
        row = [str(rank), *(str(getattr(place, axis)) for axis in AXES)]
        row += [str(place.pp), str(ep_rank), str(place.tp + self.tp * place.pp)]
        if placement is not None:
            experts = placement.local_experts(ep_rank)
            row.append(f"{experts[0]}-{experts[-1]}" if len(experts) > 1 else str(experts[0]))
        return row


def require_positive_int(name: str, value: object) -> None:
    """Raise ConfigurationError, naming ``name`` and ``value``, unless ``value`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1, got {value!r}")
