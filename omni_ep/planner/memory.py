# SPDX-License-Identifier: Apache-2.0
"""Bytes on one rank, by part.

Parameters are exact: what vLLM allocates, byte for byte. Activations and communication buffers are estimates
of the peak, each formula in its function; a device also holds its runtime and the allocator's slack, which
nobody knows before a run (see ``docs/planning.md``).
"""

from collections.abc import Mapping
from typing import Any

from omni_ep.layout import ParallelLayout
from omni_ep.planner.model import PlannedModel
from omni_ep.planner.precision import Precision
from omni_ep.planner.traffic import ROUTING_BYTES
from omni_ep.planner.weights import PARAMETER_PARTS, Part
from omni_ep.planner.workload import StepTokens, Workload

_VAE_LIVE_TENSORS = 3
"""A residual block's input, its result and one convolution output exist at the same time."""


def parameter_bytes(
    model: PlannedModel,
    layout: ParallelLayout,
    precision: Precision,
    *,
    expert_parallel: bool,
    vae_bytes: int | None = None,
) -> dict[Part, int]:
    """Bytes of parameters on each rank of the layout, by part; all ranks hold equally many.

    Args:
        vae_bytes: bytes per element of the VAE; the compute format's unless given. On CPU omni-ep keeps the
            VAE in float32 (4).
    """
    width = precision.compute_bytes if vae_bytes is None else vae_bytes
    parts: dict[Part, int] = dict.fromkeys(PARAMETER_PARTS, 0)
    for weight in model.weights:
        parts[weight.part] += weight.local_bytes(
            layout, precision, expert_parallel=expert_parallel, vae_bytes=width
        )
    return parts


def activation_bytes(
    model: PlannedModel,
    layout: ParallelLayout,
    precision: Precision,
    workload: Workload,
    *,
    expert_parallel: bool,
    vae_bytes: int | None = None,
    vae_tiling: bool = False,
) -> int:
    """Estimated peak of activations on a rank: the larger of the first step and the VAE's decoding, plus the
    prompt's keys and values, which live through both."""
    tokens = workload.first_step(layout)
    step = _transformer_peak(model, layout, precision, tokens, expert_parallel)
    decode = 0
    if model.is_hunyuan_image3:
        width = precision.compute_bytes if vae_bytes is None else vae_bytes
        decode = _vae_peak(model.config["vae"], workload, width, vae_tiling)
    geometry = model.geometry
    kv_heads = max(1, geometry.num_key_value_heads // layout.tp)
    prompt = 2 * geometry.num_layers * tokens.repeated * kv_heads * geometry.head_dim
    return max(step, decode) + prompt * precision.compute_bytes


def communication_bytes(
    model: PlannedModel,
    layout: ParallelLayout,
    precision: Precision,
    workload: Workload,
    *,
    expert_parallel: bool,
) -> int:
    """Estimated peak of what collectives read and write on a rank in the first step.

    Allgather/reducescatter: the tokens of all dispatch ranks with their routing (H b + 8 k each) and the
    equally long sum that is scattered back (H b each). Without it, the all-reduce's copy. NCCL's own buffers
    are not counted.
    """
    tokens = workload.first_step(layout).total
    row = model.geometry.hidden_size * precision.compute_bytes
    copy = tokens * row if layout.tp > 1 else 0
    ranks = layout.ep_size // layout.tp
    if not expert_parallel or ranks == 1:
        return copy
    top_k = max(model.geometry.top_k, default=0)
    return copy + ranks * tokens * (2 * row + top_k * ROUTING_BYTES)


def _transformer_peak(
    model: PlannedModel,
    layout: ParallelLayout,
    precision: Precision,
    tokens: StepTokens,
    expert_parallel: bool,
) -> int:
    """Residual stream and its sum, and the larger of attention and experts.

    Attention: query, repeated key and value, and output (4 x heads x head size per token) and one byte of
    mask per pair of positions. Experts: the two workspaces of vLLM's Triton experts, tokens x k x max(I, H)
    and tokens x k x max(2 I, H), and their output (``fused_moe/experts/triton_moe.py:218-233``), for the
    tokens of all dispatch ranks.
    """
    geometry, width = model.geometry, precision.compute_bytes
    hidden = geometry.hidden_size
    heads = geometry.num_attention_heads // layout.tp * geometry.head_dim
    attention = 4 * tokens.total * heads * width + tokens.sequences * tokens.context**2
    experts = 0
    if geometry.is_moe:
        seen = tokens.total * (layout.ep_size // layout.tp if expert_parallel else 1)
        inner = max(geometry.intermediate_sizes) // (1 if expert_parallel else layout.tp)
        per_slot = max(inner, hidden) + max(2 * inner, hidden)
        experts = seen * (max(geometry.top_k) * per_slot + hidden) * width
    return 2 * tokens.total * hidden * width + max(attention, experts)


def _vae_peak(config: Mapping[str, Any], workload: Workload, width: int, tiling: bool) -> int:
    """The widest level of the decoder: 3 live tensors of pixels x frames x channels.

    A picture is decoded as ``ffactor_temporal`` frames. With tiling, tiles of ``sample_size`` pixels a side.
    """
    side = config.get("sample_size", 0) if tiling else 0
    height = min(workload.height, side) if side else workload.height
    columns = min(workload.width, side) if side else workload.width
    widest = 0
    for level, channels in enumerate(config["block_out_channels"]):
        shrink = 2**level
        frames = max(1, config["ffactor_temporal"] // max(1, 2 ** (level - 2)))
        widest = max(widest, (height // shrink) * (columns // shrink) * frames * channels)
    return _VAE_LIVE_TENSORS * workload.batch * widest * width
