# SPDX-License-Identifier: Apache-2.0
"""Whether every tensor a rank owns reached the model exactly once.

vLLM counts a layer's fused expert parameters as loaded after any one expert
(``hunyuan_image3_transformer.py:2430``), so a missing one paints a wrong picture in silence. Here the calls
of the parameters' own weight loaders are counted, expert by expert and half by half.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omni_ep.errors import ConfigurationError
from omni_ep.loading.plan import LoadingPlan, Read

#: vLLM's shard id of an expert weight → what it is in the checkpoint.
EXPERT_SHARDS = {
    "w1": ("the gate half of ", "gate_and_up_proj.weight"),
    "w3": ("the up half of ", "gate_and_up_proj.weight"),
    "w2": ("", "down_proj.weight"),
}
_EXPERT_PARAMETER = re.compile(r"layers\.(\d+)\.mlp\.experts\.(?:routed_experts\.)?w(?:13|2)_weight$")
#: Parameters that the checkpoint's one tensor fills in several calls.
_PARTS: dict[str, tuple[Any, ...]] = {
    ".gate_up_proj.weight": (0, 1),
    ".qkv_proj.weight": ("q", "k", "v"),
    ".qkv_proj.bias": ("q", "k", "v"),
}


class LoadCounter:
    """Counts successful weight-loader calls: ``(parameter, expert, shard)`` → calls."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, int | None, Any]] = Counter()

    @contextmanager
    def watching(self, parameters: Mapping[str, Any]) -> Iterator[None]:
        """Watch the parameters that bring a weight loader; those without are loaded by name alone."""
        # An attribute of some, a property of others (``vllm/model_executor/parameter.py:69``).
        originals = {
            name: parameter.weight_loader
            for name, parameter in parameters.items()
            if hasattr(parameter, "weight_loader")
        }
        for name, loader in originals.items():
            parameters[name].weight_loader = self._counted(name, loader)
        try:
            yield
        finally:
            for name, loader in originals.items():
                parameters[name].weight_loader = loader

    def _counted(self, name: str, loader: Any) -> Any:
        def load(parameter: Any, tensor: Any, *arguments: Any, **options: Any) -> Any:
            result = loader(parameter, tensor, *arguments, **options)
            if result is not False:
                # Experts: (weight_name, shard_id=, expert_id=); merged linears: (shard_id,).
                expert = options.get("expert_id")
                shard = options.get("shard_id", arguments[0] if arguments and expert is None else None)
                self.calls[name, expert, shard] += 1
            return result

        return load


def check_complete(
    plan: LoadingPlan,
    counter: LoadCounter,
    *,
    experts: Mapping[int, Iterable[int]],
    parameters: Iterable[str],
    loaded: Iterable[str],
    where: str,
) -> None:
    """Refuse a model that did not get each of its tensors exactly once.

    Args:
        plan: what was to be read.
        counter: what the weight loaders did.
        experts: global ids of this rank's experts, by layer.
        parameters: names of all parameters.
        loaded: names of the parameters that the model's ``load_weights`` reports.
        where: the checkpoint, for messages.

    Raises:
        ConfigurationError: naming layer, expert, tensor and file of the first that is missing or doubled.
    """
    names = list(parameters)
    reads = plan.read_by_name
    called = {name for name, _, _ in counter.calls}
    for name in names:
        if match := _EXPERT_PARAMETER.search(name):
            _check_layer(name, int(match[1]), experts, counter, reads, where)
        for ending, parts in _PARTS.items():
            if name.endswith(ending) and name in called:
                for part in parts:
                    _check_count(counter.calls[name, None, part], f"part {part!r} of {name}", where)
    for (name, expert, _), count in counter.calls.items():
        if count > 1:
            _check_count(count, name if expert is None else f"expert {expert} of {name}", where)
    reported = set(loaded)
    for name in names:
        if name not in reported:
            _check_count(0, f"the parameter {name}", where)


def _check_layer(
    parameter: str,
    layer: int,
    experts: Mapping[int, Iterable[int]],
    counter: LoadCounter,
    reads: Mapping[str, Read],
    where: str,
) -> None:
    shards = ("w2",) if parameter.endswith("w2_weight") else ("w1", "w3")
    for expert in experts[layer]:
        for shard in shards:
            half, part = EXPERT_SHARDS[shard]
            tensor = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
            read = reads.get(tensor)
            file = read.header.file if read is not None else f"no shard of {where}"
            _check_count(
                counter.calls[parameter, expert, shard],
                f"layer {layer}, expert {expert}: {half}{tensor}",
                f"{file}",
            )


def _check_count(count: int, what: str, where: str) -> None:
    if count != 1:
        times = "not loaded" if count == 0 else f"loaded {count} times"
        raise ConfigurationError(
            f"{what} (in {where}) was {times}, once was expected; the checkpoint does not fit this model"
        )
