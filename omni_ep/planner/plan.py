# SPDX-License-Identifier: Apache-2.0
"""Puts one layout's figures together."""

from dataclasses import asdict, dataclass
from typing import Any

from omni_ep.layout import ParallelLayout
from omni_ep.planner.memory import activation_bytes, communication_bytes, parameter_bytes
from omni_ep.planner.model import PlannedModel
from omni_ep.planner.precision import Precision
from omni_ep.planner.traffic import BACKENDS, MoELayer, attention_bytes, layer_traffic
from omni_ep.planner.weights import PARAMETER_PARTS, Part
from omni_ep.planner.workload import StepTokens, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a plan depends on besides the layout."""

    model: PlannedModel
    precision: Precision
    workload: Workload
    device_memory: int | None = None
    """Bytes of one device; None leaves the question of fitting open."""
    on_cpu: bool = False
    """On CPU omni-ep keeps the VAE in float32 whatever the transformer's format."""
    vae_tiling: bool = False

    @property
    def vae_bytes(self) -> int:
        """Bytes per element of the VAE."""
        return 4 if self.on_cpu else self.precision.compute_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes a rank receives, by back-end; ``first`` is the step that also runs the prompt.

    Back-ends that the layout cannot use have None.
    """

    per_layer: dict[str, int | None]
    per_step: dict[str, int | None]
    first_per_layer: dict[str, int | None]
    first_per_step: dict[str, int | None]
    attention_per_step: int
    """Of all attention layers in a step after the first, whatever the back-end."""

    def to_dict(self) -> dict[str, dict[str, int | None]]:
        """By back-end."""
        return {
            name: {
                "bytes_per_rank_per_layer": self.per_layer[name],
                "bytes_per_rank_per_step": self.per_step[name],
                "first_step_bytes_per_rank_per_layer": self.first_per_layer[name],
                "first_step_bytes_per_rank_per_step": self.first_per_step[name],
            }
            for name in BACKENDS
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Memory and traffic of one layout; every rank has the same figures."""

    settings: Settings
    layout: ParallelLayout
    expert_parallel: bool
    parts: dict[Part, int]
    traffic: Traffic

    @property
    def ep_size(self) -> int:
        """Ranks that share the experts; 1 without expert parallelism."""
        return self.layout.ep_size if self.expert_parallel else 1

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters per rank."""
        return sum(self.parts[part] for part in PARAMETER_PARTS)

    @property
    def total_bytes(self) -> int:
        """Bytes per rank: parameters, activations, communication buffers."""
        return sum(self.parts.values())

    @property
    def left_bytes(self) -> int | None:
        """Bytes of the device that the plan leaves free; negative if it does not fit."""
        memory = self.settings.device_memory
        return None if memory is None else memory - self.total_bytes

    @property
    def fits(self) -> bool | None:
        """Whether every rank fits its device; None without a device size."""
        return None if self.left_bytes is None else self.left_bytes >= 0

    def to_dict(self) -> dict[str, Any]:
        """What ``omni-ep plan --json`` prints; all sizes in bytes."""
        return {
            "ep_size": self.ep_size,
            "ranks": [
                {
                    "rank": rank,
                    "coordinates": asdict(self.layout.coordinates(rank)),
                    "routed_experts_bytes": self.parts[Part.ROUTED_EXPERTS],
                    "parameter_bytes": self.parameter_bytes,
                    "total_bytes": self.total_bytes,
                }
                for rank in range(self.layout.world_size)
            ],
            "traffic": self.traffic.to_dict(),
            "fits": self.fits,
        }


def make_plan(settings: Settings, layout: ParallelLayout, *, expert_parallel: bool) -> Plan:
    """The plan of a layout that has been checked (``omni_ep.planner.rules``)."""
    model, precision, workload = settings.model, settings.precision, settings.workload
    parts = parameter_bytes(
        model, layout, precision, expert_parallel=expert_parallel, vae_bytes=settings.vae_bytes
    )
    parts[Part.ACTIVATIONS] = activation_bytes(
        model,
        layout,
        precision,
        workload,
        expert_parallel=expert_parallel,
        vae_bytes=settings.vae_bytes,
        vae_tiling=settings.vae_tiling,
    )
    parts[Part.COMMUNICATION] = communication_bytes(
        model, layout, precision, workload, expert_parallel=expert_parallel
    )
    return Plan(
        settings=settings,
        layout=layout,
        expert_parallel=expert_parallel,
        parts=parts,
        traffic=_traffic(settings, layout),
    )


def _traffic(settings: Settings, layout: ParallelLayout) -> Traffic:
    later, first = settings.workload.later_step(layout), settings.workload.first_step(layout)
    per_layer, per_step = _moe_traffic(settings, layout, later)
    first_per_layer, first_per_step = _moe_traffic(settings, layout, first)
    geometry = settings.model.geometry
    attention = attention_bytes(geometry, layout, later, settings.precision.compute_bytes)
    return Traffic(
        per_layer=per_layer,
        per_step=per_step,
        first_per_layer=first_per_layer,
        first_per_step=first_per_step,
        attention_per_step=attention * geometry.num_layers,
    )


def _moe_traffic(
    settings: Settings, layout: ParallelLayout, tokens: StepTokens
) -> tuple[dict[str, int | None], dict[str, int | None]]:
    """``(of the costliest layer, of all layers)``; layers differ only where top-k does."""
    geometry = settings.model.geometry
    fits_ep = geometry.is_moe and geometry.num_experts % layout.ep_size == 0
    layers = [
        layer_traffic(
            MoELayer(
                hidden_size=geometry.hidden_size,
                num_experts=geometry.num_experts,
                top_k=top_k,
                activation_bytes=settings.precision.compute_bytes,
            ),
            layout,
            tokens.total,
            fits_ep=fits_ep,
        )
        for top_k in geometry.top_k
    ]
    worst: dict[str, int | None] = {}
    whole: dict[str, int | None] = {}
    for name in BACKENDS:
        known = [size for layer in layers if (size := layer[name]) is not None]
        worst[name] = max(known) if known else None
        whole[name] = sum(known) if known else None
    return worst, whole
