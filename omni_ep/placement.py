# SPDX-License-Identifier: Apache-2.0
"""Which rank of an expert-parallel group holds which expert.

Weight loading, dispatch and the memory planner must agree on this, so the rule is written once, without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_ep.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Global expert id <-> (EP rank, local slot), equal numbers of experts on every rank.

    Rank ``r`` holds experts ``r * num_local .. (r + 1) * num_local - 1``: vLLM's "linear" placement.

    Raises:
        ConfigurationError: if the experts cannot be divided equally; the text lists the EP sizes that fit.
    """

    num_experts: int
    ep_size: int

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.ep_size < 1:
            raise ConfigurationError(
                "an expert placement needs at least one expert and one rank, got "
                f"num_experts={self.num_experts} and EP={self.ep_size}"
            )
        fitting = ", ".join(str(size) for size in fitting_ep_sizes(self.num_experts))
        if self.ep_size > self.num_experts:
            raise ConfigurationError(
                f"EP={self.ep_size} is larger than the number of experts ({self.num_experts}), so some ranks "
                f"would hold none; EP sizes that fit: {fitting}"
            )
        if self.num_experts % self.ep_size:
            raise ConfigurationError(
                f"{self.num_experts} experts cannot be divided equally among EP={self.ep_size} ranks; EP "
                f"sizes that fit: {fitting}"
            )

    @classmethod
    def linear(cls, num_experts: int, ep_size: int) -> ExpertPlacement:
        """Consecutive experts on consecutive ranks."""
        return cls(num_experts=num_experts, ep_size=ep_size)

    @property
    def num_local(self) -> int:
        """Experts per rank: ``num_experts / ep_size``."""
        return self.num_experts // self.ep_size

    def local_experts(self, ep_rank: int) -> range:
        """Global ids of the experts on ``ep_rank``, in slot order.

        Raises:
            IndexError: if there is no such rank.
        """
        if not 0 <= ep_rank < self.ep_size:
            raise IndexError(f"EP rank {ep_rank} is not in 0..{self.ep_size - 1}")
        return range(ep_rank * self.num_local, (ep_rank + 1) * self.num_local)

    def owner(self, expert: int) -> tuple[int, int]:
        """``(ep_rank, slot)`` of a global expert id.

        Raises:
            IndexError: if there is no such expert.
        """
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert} is not in 0..{self.num_experts - 1}")
        return divmod(expert, self.num_local)


def fitting_ep_sizes(num_experts: int) -> list[int]:
    """EP sizes that divide ``num_experts`` equally, ascending."""
    return [size for size in range(1, num_experts + 1) if num_experts % size == 0]
