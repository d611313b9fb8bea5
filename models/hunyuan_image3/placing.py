# SPDX-License-Identifier: Apache-2.0
"""Which of HunyuanImage-3's tensors are read straight into their parameters, and where in them.

Routed experts on CPU: upstream's loop compares each of their tensors with three names of every expert
(``hunyuan_image3_transformer.py:2389``) and copies it out of a buffer. Tensors larger than the reading
window, on any device: a buffer for them would be most of a load's memory. Everything else, and whatever does
not fit its parameter byte by byte, stays with upstream's weight loaders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from omni_ep.loading.expectations import EXPERT_PARTS
from omni_ep.loading.names import parse_expert
from omni_ep.loading.placement import Destination, Placement
from omni_ep.loading.plan import LoadingPlan, Read
from omni_ep.loading.reader import TORCH_DTYPES, WINDOW_BYTES

_EMBEDDING = ("model.wte.weight", "model.embed_tokens.weight")
_HEAD = "lm_head.weight"


ExpertLayers = Mapping[int, tuple[str, RoutedExperts]]


def routed_experts(pipeline: nn.Module) -> ExpertLayers:
    """Each layer's module of routed experts, with its name."""
    return {
        int(name.split("layers.")[1].split(".")[0]): (name, module)
        for name, module in pipeline.named_modules()
        if isinstance(module, RoutedExperts)
    }


def placements(
    layers: ExpertLayers, places: Mapping[str, torch.Tensor], plan: LoadingPlan, config: Mapping[str, Any]
) -> dict[str, Placement]:
    """The reads of an unquantized model that need no weight loader, by the name the model would see.

    Args:
        layers: each layer's module of routed experts, with its name.
        places: every parameter by name; buffers do no harm.
        plan: what is read.
        config: contents of the checkpoint's ``config.json``.
    """
    found: dict[str, Placement] = {}
    for read in plan.reads:
        name = parse_expert(read.name)
        placement = None
        if name is not None and name.expert is not None and name.layer in layers:
            placement = expert_placement(read, name.expert, name.leaf, *layers[name.layer])
        elif name is None and read.nbytes > WINDOW_BYTES and not config.get("tie_word_embeddings"):
            placement = large_placement(read, places)
        if placement is not None:
            found[read.name] = placement
    return found


def expert_placement(
    read: Read, expert: int, leaf: str, module_name: str, module: RoutedExperts
) -> Placement | None:
    """Where one expert's tensor lies in its layer's fused parameters; ``None`` if it does not fit as it is.

    Args:
        read: ``gate_and_up_proj`` ``[2I, H]``, up rows first, or ``down_proj`` ``[H, I]``.
        expert: its global id.
        leaf: the last part of its name.
        module: with ``w13_weight`` ``[E, 2I, H]``, gate rows first, and ``w2_weight`` ``[E, H, I]``.
    """
    if leaf not in EXPERT_PARTS or module.moe_config.moe_parallel_config.tp_size != 1:
        return None
    fused = leaf == EXPERT_PARTS[0]
    parameter_name = "w13_weight" if fused else "w2_weight"
    parameter = getattr(module, parameter_name, None)
    slot = module.expert_map_manager.map_global_to_local(expert)
    if parameter is None or slot < 0 or getattr(parameter, "is_transposed", False):
        return None
    if parameter.shape[1:] != read.shape or not _same_bytes(read, parameter):
        return None
    name = f"{module_name}.{parameter_name}"
    elements = parameter.stride(0)
    first = slot * elements
    if not fused:
        whole = Destination(0, read.nbytes, parameter, first)
        return Placement(parts=(whole,), loads=((name, expert, "w2"),))
    half = read.nbytes // 2
    return Placement(
        parts=(
            Destination(0, half, parameter, first + elements // 2),
            Destination(half, read.nbytes, parameter, first),
        ),
        loads=((name, expert, "w3"), (name, expert, "w1")),
    )


def large_placement(read: Read, parameters: Mapping[str, torch.Tensor]) -> Placement | None:
    """Where a large tensor outside the layers' experts lies; ``None`` if it does not fit as it is.

    The embedding's parameter holds this rank's rows and then padding, which is set to zero here as
    vLLM's weight loader does (``vocab_parallel_embedding.py:508``).
    """
    name = _EMBEDDING[1] if read.name == _EMBEDDING[0] else read.name
    parameter = parameters.get(name)
    if parameter is None or len(read.ranges) != 1:
        return None
    [(start, stop)] = read.ranges
    rows = (stop - start) // read.header.row_bytes
    plain = not hasattr(parameter, "weight_loader") and tuple(parameter.shape) == read.shape
    embedding = (
        name == _EMBEDDING[1] and tuple(parameter.shape[1:]) == read.shape[1:] and rows <= parameter.shape[0]
    )
    if not (plain or embedding) or not parameter.is_contiguous():
        return None
    parameter.data[rows:].zero_()
    return Placement(parts=(Destination(start, stop, parameter),), loads=((name, None, None),))


def _same_bytes(read: Read, target: torch.Tensor) -> bool:
    return (
        target.dtype == TORCH_DTYPES[read.header.dtype]
        and target.device.type == "cpu"
        and target.is_contiguous()
        and read.ranges == ((0, read.nbytes),)
    )
