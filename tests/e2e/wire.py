# SPDX-License-Identifier: Apache-2.0
"""A worker extension that counts the bytes a rank receives in collectives, layer by layer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from omni_ep.planner.traffic import all_reduce_bytes
from tests.e2e.capture import CaptureExtension


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _all_gather_into_tensor(output: torch.Tensor, mine: torch.Tensor, **_: Any) -> int:
    return _size(output) - _size(mine)


def _all_gather(outputs: list[torch.Tensor], mine: torch.Tensor, **_: Any) -> int:
    return sum(map(_size, outputs)) - _size(mine)


def _all_to_all_single(
    output: torch.Tensor,
    _sent: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    **_: Any,
) -> int:
    if not output_split_sizes:
        return _size(output) - _size(output) // dist.get_world_size(group)
    own = output_split_sizes[dist.get_rank(group)]
    return _size(output) - _size(output) // max(1, output.shape[0]) * own


def _all_reduce(tensor: torch.Tensor, *_args: Any, group: Any = None, **_: Any) -> int:
    return all_reduce_bytes(_size(tensor), dist.get_world_size(group))


RECEIVED: dict[str, Callable[..., int]] = {
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather": _all_gather,
    "all_to_all_single": _all_to_all_single,
    "all_reduce": _all_reduce,
}
"""Bytes that one call receives, as ``omni_ep.planner.traffic`` defines them."""


class WireExtension(CaptureExtension):
    """Counts inside the MoE and attention modules of every layer."""

    def other_checkpoint(self, path: str) -> dict[str, Any]:
        """Load another checkpoint into the same ranks; returns the report."""
        context = self.vllm_config.compilation_config  # type: ignore[attr-defined]
        context.static_forward_context.clear()
        context.static_all_moe_layers.clear()
        self.od_config.model = path  # type: ignore[attr-defined]
        self.load_model()  # type: ignore[attr-defined]
        return self.omni_ep_report()

    def received(self, sampling: dict[str, Any]) -> list[dict[str, list[list[int]]]]:
        """Paint, and return per rank ``{"mlp" | "self_attn": [step][layer] -> bytes received}``."""
        pipeline = self.model_runner.pipeline  # type: ignore[attr-defined]
        layers = pipeline.model.layers
        received: dict[str, list[list[int]]] = {"mlp": [], "self_attn": []}
        inside: list[tuple[str, int]] = []
        handles, originals = [], {name: getattr(dist, name) for name in RECEIVED}

        def counting(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if inside:
                    part, layer = inside[-1]
                    received[part][-1][layer] += RECEIVED[name](*args, **kwargs)
                return originals[name](*args, **kwargs)

            return call

        def enter(part: str, layer: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                if layer == 0:
                    received[part].append([0] * len(layers))
                inside.append((part, layer))

            return hook

        def leave(*_: Any) -> None:
            inside.pop()

        for index, layer in enumerate(layers):
            for part in received:
                module = getattr(layer, part)
                handles.append(module.register_forward_pre_hook(enter(part, index)))
                handles.append(module.register_forward_hook(leave))
        for name in RECEIVED:
            setattr(dist, name, counting(name))
        try:
            self.paint("a red cube on a table", sampling)
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
            for handle in handles:
                handle.remove()
        everyone: list[Any] = [received]
        if dist.get_world_size() > 1:
            from vllm_omni.diffusion.distributed.parallel_state import get_world_group

            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, received, group=get_world_group().cpu_group)
        return everyone
