# SPDX-License-Identifier: Apache-2.0
"""Loads a rank's own share of HunyuanImage-3 through vLLM-Omni's loader and weight loaders.

vLLM-Omni resolves the files, and its ``load_weights`` puts tensors where they belong; the iterator in between
is omni-ep's, and it reads what the plan says. Expert weights, most of the bytes, are read straight into their
parameters instead (``placing``).
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger

from omni_ep.errors import ConfigurationError
from omni_ep.geometry import MoEGeometry
from omni_ep.loading import LoadingPlan, LoadingSettings, RankRole, check_against_config, plan_loading
from omni_ep.loading.completeness import LoadCounter, check_complete
from omni_ep.loading.expectations import is_expert_part
from omni_ep.loading.headers import read_checkpoint, read_headers
from omni_ep.loading.names import parse_expert
from omni_ep.loading.placement import Placement
from omni_ep.loading.plan import Read
from omni_ep.loading.progress import loading_bar
from omni_ep.loading.reader import PlannedReader
from omni_ep.models.hunyuan_image3 import patches
from omni_ep.models.hunyuan_image3.placing import ExpertLayers, placements, routed_experts

# Below vLLM's logger, so that VLLM_LOGGING_LEVEL holds: commands turn the log off and show warnings.
logger = init_logger(f"vllm.{__name__}")

Weights = Iterable[tuple[str, torch.Tensor]]

#: How ``hunyuan_image3_transformer.py:2318-2459`` renames a checkpoint tensor.
_RENAMED = (("mlp.gate.wg.", "mlp.gate."), (".gate_and_up_proj.", ".gate_up_proj."))
_RENAMED_WHOLE = {"model.wte.weight": "model.embed_tokens.weight", "model.ln_f.weight": "model.norm.weight"}
_PACKED = (
    (".q_proj.", ".qkv_proj."),
    (".k_proj.", ".qkv_proj."),
    (".v_proj.", ".qkv_proj."),
    (".gate_proj.", ".gate_up_proj."),
    (".up_proj.", ".gate_up_proj."),
)
#: Quantized checkpoints bring scales under names that upstream maps in many ways.
_ALWAYS_WANTED = ("scale", "zero_point", "weight_packed", "g_idx", "weight_shape")


def live_experts(layers: ExpertLayers, num_experts: int) -> dict[int, list[int]]:
    """Global ids of this rank's experts by layer, as vLLM's modules place them."""
    return {
        layer: [e for e in range(num_experts) if module.expert_map_manager.map_global_to_local(e) >= 0]
        for layer, (_, module) in layers.items()
    }


def places_of(pipeline: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name."""
    return dict(pipeline.named_buffers()) | dict(pipeline.named_parameters())


def home_of(places: Collection[str]) -> Callable[[str], str | None]:
    """Which of these parameters and buffers a checkpoint tensor's name leads to, if any.

    One that holds several tensors, such as ``qkv_proj``, is the home of each of them.
    """

    def answer(name: str) -> str | None:
        renamed = _RENAMED_WHOLE.get(name, name)
        for old, new in _RENAMED:
            renamed = renamed.replace(old, new)
        if renamed in places:
            return renamed
        packed = (renamed.replace(old, new) for old, new in _PACKED if old in renamed)
        return next((name for name in packed if name in places), None)

    return answer


def has_home(places: Collection[str], *, quantized: bool) -> Callable[[str], bool]:
    """Whether the model has a place for a checkpoint tensor of this name."""
    home = home_of(places)

    def answer(name: str) -> bool:
        if quantized and any(part in name for part in _ALWAYS_WANTED):
            return True
        expert = parse_expert(name)
        return is_expert_part(expert.leaf) if expert is not None else home(name) is not None

    return answer


def stored_shapes(place: torch.Tensor, *, parts: int) -> list[tuple[int, ...]]:
    """Shapes a checkpoint may hold a tensor of this parameter in, in ascending order.

    One with a weight loader may be split over TP along either of its first dimensions, and vLLM's loaders cut
    what they need out of a tensor that is too large without a word.

    Args:
        parts: tensors of the same size that lie in it one after the other.
    """
    shape = tuple(place.shape)
    if not hasattr(place, "weight_loader") or not shape:
        return [shape]
    tp = get_tensor_model_parallel_world_size()
    rows, *rest = shape
    found = {(rows // parts, *rest), (rows * tp // parts, *rest)}
    if rest:
        found.add((rows // parts, rest[0] * tp, *rest[1:]))
    return sorted(found)


def _parts_of(home: str) -> int:
    return sum(new in f"{home}." for _, new in _PACKED)


def is_quantized(pipeline: Any) -> bool:
    """Whether the weights are, or will be, in a packed format."""
    config = pipeline.hf_config.to_dict()
    return bool(config.get("quantization_config") or pipeline.od_config.quantization_config)


def unasked_warning(where: str, names: Sequence[str]) -> str | None:
    """The sentence about tensors that are left out, or ``None`` if there are none."""
    if not names:
        return None
    return (
        f"{where} holds {len(names)} tensor(s) that the model does not ask for; they are not read: "
        f"{', '.join(names)}"
    )


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def log_on_first_rank(warning: str | None) -> None:
    """Log a warning, if there is one, once for all ranks."""
    if warning and is_first_rank():
        logger.warning("%s", warning)


class AskedFor:
    """What the model asks for of tensors that someone else reads.

    Upstream's ``load_weights`` ends with a ``KeyError`` at a name it does not know
    (``hunyuan_image3_transformer.py:2455``).

    Attributes:
        unasked: names that were left out so far.
    """

    def __init__(self, pipeline: Any, weights: Weights) -> None:
        self.where = pipeline.od_config.model
        self.unasked: list[str] = []
        self._weights = weights
        self._has_home = has_home(places_of(pipeline), quantized=is_quantized(pipeline))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            if self._has_home(name):
                yield name, tensor
            else:
                self.unasked.append(name)

    @property
    def warning(self) -> str | None:
        """What was left out, as a sentence."""
        return unasked_warning(self.where, sorted(self.unasked))


class OwnedWeights:
    """One load of one rank: its plan, what was read, and the check afterwards."""

    def __init__(self, pipeline: Any, settings: LoadingSettings) -> None:
        self.pipeline = pipeline
        self.settings = settings
        self.config: dict[str, Any] = pipeline.hf_config.to_dict()
        self.geometry = MoEGeometry.from_config(self.config)
        # Names and modules are asked for several times, and a large model has thousands.
        self.quantized = is_quantized(pipeline)
        self.places = places_of(pipeline)
        self.layers = routed_experts(pipeline)
        self.experts = live_experts(self.layers, self.geometry.num_experts)
        self.plan: LoadingPlan | None = None
        self.counter = LoadCounter()
        self.placed: set[str] = set()
        self.bytes_read = 0
        self.current = ""
        self.where = ""
        self.warning: str | None = None

    def load(self, weights: Weights, stock_load: Callable[[Weights], set[str]]) -> set[str]:
        """Run ``stock_load`` on the planned tensors.

        Returns:
            The names of the loaded parameters, as upstream's own check wants them.

        Raises:
            ConfigurationError: the checkpoint is damaged or incomplete.
        """
        started = time.perf_counter()
        parameters = {name: place for name, place in self.places.items() if isinstance(place, nn.Parameter)}
        with self.counter.watching(parameters), patches.weights_iterator(self.read):
            loaded = set(self._explained(stock_load, weights))
        # What was placed passed upstream's loader by.
        loaded |= self.placed
        if self.plan is None:
            raise ConfigurationError(
                f"{self.pipeline.od_config.model} has no safetensors weights, expert parallelism loads no "
                "other format"
            )
        check_complete(
            self.plan,
            self.counter,
            experts=self.experts,
            # Quantized layers make parameters that no checkpoint fills; upstream judges those.
            parameters=() if self.quantized else parameters,
            loaded=loaded,
            where=self.where,
        )
        self.report = {
            "bytes_needed": self.plan.bytes_needed,
            "bytes_read": self.bytes_read,
            "bytes_skipped": self.plan.bytes_skipped,
            "seconds": time.perf_counter() - started,
        }
        return loaded

    def read(self, files: Sequence[str], threads: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The iterator that stands in for upstream's; ``files`` are the shards of one source."""
        folder = Path(files[0]).parent
        indexed = (folder / "model.safetensors.index.json").exists()
        checkpoint = read_checkpoint(folder) if indexed else read_headers([Path(file) for file in files])
        check_against_config(checkpoint, self.config)
        self.where = checkpoint.where
        self.plan = plan = plan_loading(
            checkpoint,
            self.geometry,
            RankRole(
                experts=self.experts,
                tp_rank=get_tensor_model_parallel_rank(),
                tp_size=get_tensor_model_parallel_world_size(),
            ),
            has_home=has_home(self.places, quantized=self.quantized),
            split_dense=not self.quantized,
        )
        if not self.quantized:
            self._check_homes(plan)
        self.warning = unasked_warning(checkpoint.where, plan.unasked)
        log_on_first_rank(self.warning)
        with loading_bar(plan.bytes_needed, enabled=is_first_rank()) as progress:
            reader = PlannedReader(
                plan,
                threads=threads,
                check_finite=self.settings.check_weights,
                progress=progress,
                placements={} if self.quantized else placements(self.layers, self.places, plan, self.config),
                placed=self._count,
            )
            try:
                for name, tensor in reader:
                    self.current = name
                    yield name, tensor
                    # Not kept while the next is read.
                    del tensor
            finally:
                self.bytes_read = reader.bytes_read + checkpoint.header_bytes

    def _count(self, placement: Placement) -> None:
        self.counter.calls.update(placement.loads)
        self.placed.update(name for name, _, _ in placement.loads)

    def _explained(self, stock_load: Callable[[Weights], set[str]], weights: Weights) -> set[str]:
        """Say which tensor a weight loader stumbled over; most only assert."""
        try:
            return stock_load(weights)
        except (ConfigurationError, torch.OutOfMemoryError):
            raise
        except (AssertionError, KeyError, ValueError, RuntimeError) as error:
            read = self.plan.read_by_name.get(self.current) if self.plan else None
            if read is None:
                raise
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ConfigurationError(
                f"{read.header.file} holds {read.header.name} as {read.header.dtype} with shape "
                f"{list(read.header.shape)}, which the model does not take ({why}); use the config.json that "
                "belongs to these weights"
            ) from error

    def _check_homes(self, plan: LoadingPlan) -> None:
        """Hold what ``check_against_config`` cannot know against the modules."""
        home_of_name = home_of(self.places)
        filled: dict[str, Read] = {}
        for read in plan.reads:
            if parse_expert(read.name) is not None or (home := home_of_name(read.name)) is None:
                continue
            place, header = self.places[home], read.header
            whole = not any(old in read.name for old, _ in _PACKED)
            if whole and (other := filled.setdefault(home, read)) is not read:
                raise ConfigurationError(
                    f"{header.file} holds {header.name}, {other.header.file.name} holds {other.name}, and "
                    f"both fill {home}; one was expected, remove what does not belong to this checkpoint"
                )
            if place.is_floating_point() and not header.dtype.startswith(("F", "BF")):
                raise ConfigurationError(
                    f"{header.file} holds {header.name} as {header.dtype}, a floating-point format was "
                    "expected; use the config.json that belongs to these weights"
                )
            if read.name.startswith("model."):
                continue
            shapes = stored_shapes(place, parts=1 if whole else _parts_of(home))
            if header.shape not in shapes:
                expected = " or ".join(str(list(shape)) for shape in shapes)
                raise ConfigurationError(
                    f"{header.file} holds {header.name} with shape {list(header.shape)}, the model expects "
                    f"{expected}; use the config.json that belongs to these weights"
                )
