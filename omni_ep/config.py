# SPDX-License-Identifier: Apache-2.0
"""What a user may ask for, and every reason to refuse it before anything starts.

Upstream finds most of these mistakes inside a worker, minutes later and as a traceback, and some of them
never: a picture of another size, or ranks that all paint the same thing. Each rule here is one function that
names the value found, the value needed and the fix. Upstream lines named in docstrings are those of vllm-omni
0.30.0, below ``vllm_omni/diffusion/``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_ep.config_types import check_types
from omni_ep.errors import ConfigurationError
from omni_ep.geometry import MoEGeometry
from omni_ep.layout import ParallelLayout, require_positive_int
from omni_ep.placement import ExpertPlacement

SUPPORTED_ARCHITECTURES = ("HunyuanImage3ForCausalMM",)
NUM_TRAIN_TIMESTEPS = 1000
"""Length of the noise schedule, hence the largest number of steps (pipeline_hunyuan_image3.py:521)."""

EXTRA_SIZES = (
    (1024, 768),
    (1280, 720),
    (768, 1024),
    (720, 1280),
    (512, 512),
    (640, 640),
    (768, 768),
    (896, 896),
)
"""(height, width) in pixels, offered whatever the base size (hunyuan_image3_transformer.py:474)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One text-to-image run as a user asks for it, in vLLM-Omni's flag names; sizes are in pixels.

    Creating one checks nothing but the parallel sizes (through ``layout``); ``validate`` checks the rest.
    """

    tensor_parallel_size: int = 1
    ulysses_degree: int = 1
    ring_degree: int = 1
    pipeline_parallel_size: int = 1
    cfg_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    use_hsdp: bool = False
    height: int = 1024
    width: int = 1024
    num_inference_steps: int = 50
    num_images_per_prompt: int = 1
    guidance_scale: float = 5.0

    @property
    def layout(self) -> ParallelLayout:
        """The rank layout.

        Raises:
            ConfigurationError: if a parallel size is not a whole number of at least 1.
        """
        return ParallelLayout.from_flags(
            tensor_parallel_size=self.tensor_parallel_size,
            ulysses_degree=self.ulysses_degree,
            ring_degree=self.ring_degree,
            pipeline_parallel_size=self.pipeline_parallel_size,
            cfg_parallel_size=self.cfg_parallel_size,
            data_parallel_size=self.data_parallel_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSizes:
    """Which picture sizes a HunyuanImage3 checkpoint paints as asked.

    Upstream never refuses a size. It takes the bucket with the nearest height:width ratio (and, where a
    bucket has several sizes, the one of nearest area), then drops the remainder below one token
    (hunyuan_image3_transformer.py:411-601,1593). Buckets go from base x base in steps of base/16 to base/2 x
    2*base and to 2*base x base/2, plus ``EXTRA_SIZES``. A base of 64 paints 64x64 for 96x96, and 768x1024 for
    48x64.
    """

    base_size: int
    """``image_base_size`` in pixels."""
    height_step: int
    """Pixels per token row: VAE downsample factor x patch size."""
    width_step: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PictureSizes:
        """Read from an HF config dictionary, with upstream's defaults (1024, 16x16, patch 1)."""
        rows, columns = config.get("vae_downsample_factor") or (16, 16)
        patch = config.get("patch_size") or 1
        return cls(
            base_size=config.get("image_base_size") or 1024,
            height_step=rows * patch,
            width_step=columns * patch,
        )

    def _buckets(self) -> list[list[tuple[int, int]]]:
        """Sizes (height, width) by ratio, ascending, as upstream's ResolutionGroup builds them."""
        base, step = self.base_size, max(1, self.base_size // 16)
        smallest, largest = base // 2, base * 2
        buckets = [[(base, base)]]
        for upright in (True, False):
            long, short = base, base
            while long < largest or short > smallest:
                long, short = min(long + step, largest), max(short - step, smallest)
                buckets.append([(long, short) if upright else (short, long)])
        buckets.sort(key=_ratio)
        for size in EXTRA_SIZES:
            same = next((bucket for bucket in buckets if _ratio(bucket) == _ratio([size])), None)
            if same is None:
                buckets.append([size])
            else:
                same.append(size)
        return buckets

    def bucket_for(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the bucket upstream takes for a request."""
        bucket = min(self._buckets(), key=lambda sizes: abs(_ratio(sizes) - height / width))
        return min(bucket, key=lambda size: abs(size[0] * size[1] - height * width))

    def paintable(self) -> list[tuple[int, int]]:
        """All (height, width) that come out exactly as asked for, ascending."""
        return sorted(
            {
                size
                for bucket in self._buckets()
                for size in bucket
                if size[0] % self.height_step == 0 and size[1] % self.width_step == 0
            }
        )

    def nearest(self, height: int, width: int, count: int = 3) -> list[tuple[int, int]]:
        """The ``count`` paintable sizes whose sides differ least, by factor, from the ones given."""

        def distance(size: tuple[int, int]) -> float:
            return abs(math.log(size[0] / height)) + abs(math.log(size[1] / width))

        return sorted(self.paintable(), key=distance)[:count]


def _ratio(sizes: Sequence[tuple[int, int]]) -> float:
    return sizes[0][0] / sizes[0][1]


def validate(
    request: RunRequest, config: Mapping[str, Any], *, device_count: int, device_kind: str
) -> list[str]:
    """Check a run before any worker starts or any weight is read.

    Args:
        request: what the user asks for.
        config: the checkpoint's ``config.json``, see ``check_checkpoint_folder``.
        device_count: accelerators of this machine, or CPU cores if ``device_kind`` is "cpu".
        device_kind: "cpu", "cuda", "npu", ...; everything but "cpu" needs a device per rank.

    Returns:
        Warnings, one sentence each; the run goes on.

    Raises:
        ConfigurationError: at the first rule that is broken.
    """
    validate_layout(request, config)
    check_steps(request)
    check_images_per_prompt(request)
    check_guidance(request)
    check_picture_size(request, PictureSizes.from_config(config))
    warnings = [
        check_devices(request.layout, device_count=device_count, device_kind=device_kind),
        idle_guidance_ranks(request, config),
    ]
    return [warning for warning in warnings if warning]


def validate_layout(request: RunRequest, config: Mapping[str, Any]) -> None:
    """The part of ``validate`` that does not depend on a picture or a machine.

    vLLM-Omni's engine calls it too, in the parent, for engines that are not started by our commands.

    Raises:
        ConfigurationError: at the first rule that is broken.
    """
    layout = request.layout
    geometry = MoEGeometry.from_config(config)
    check_pipeline_stages(request)
    check_cfg_size(request)
    check_ring(request)
    if request.enable_expert_parallel:
        check_hsdp(request)
        check_expert_parallel(layout, geometry)
    else:
        check_expert_shards(request, geometry)
    check_attention_heads(request, geometry)
    check_key_value_heads(request, geometry)
    check_ulysses(request, geometry)
    check_shared_expert(request, geometry)
    check_vision_tower(request, config)


def check_pipeline_stages(request: RunRequest) -> None:
    """HunyuanImage3 has no pipeline stages in vLLM-Omni 0.30.

    Its forward calls every layer, absent ones included, without a send or a receive
    (hunyuan_image3_transformer.py:2575), and its pipeline lacks PipelineParallelMixin.
    """
    if request.pipeline_parallel_size > 1:
        raise ConfigurationError(
            f"--pipeline-parallel-size is {request.pipeline_parallel_size} but vLLM-Omni's HunyuanImage3 "
            "cannot be split into pipeline stages; set it to 1 and use tensor, Ulysses, CFG or data "
            "parallelism instead"
        )


def check_cfg_size(request: RunRequest) -> None:
    """Guidance has two branches, hence at most two ranks.

    With any other number upstream repeats all work on every rank without a word
    (hunyuan_image3_transformer.py:3188-3192).
    """
    if request.cfg_parallel_size not in (1, 2):
        raise ConfigurationError(
            f"--cfg-parallel-size is {request.cfg_parallel_size} but guidance has two branches; set it to 1 "
            "or 2"
        )


def check_ring(request: RunRequest) -> None:
    """Ring attention refuses a mask, and HunyuanImage3 always passes one.

    attention/layer.py:593 raises what hunyuan_image3_transformer.py:1231 makes certain.
    """
    if request.ring_degree > 1:
        raise ConfigurationError(
            f"--ring-degree is {request.ring_degree} but vLLM-Omni's ring attention takes no attention mask "
            "and HunyuanImage3 needs one; set it to 1 and use --ulysses-degree instead"
        )


def check_hsdp(request: RunRequest) -> None:
    """HSDP shards the very weights that EP places whole; upstream refuses the pair as well (data.py:415)."""
    if request.use_hsdp:
        raise ConfigurationError(
            "--enable-expert-parallel cannot be combined with --use-hsdp, because HSDP would shard the "
            "experts that EP keeps whole; drop one of the two flags"
        )


def check_expert_parallel(layout: ParallelLayout, geometry: MoEGeometry) -> None:
    """EP needs a mixture-of-experts model whose experts can be divided equally among the ranks."""
    if not geometry.is_moe:
        raise ConfigurationError(
            "--enable-expert-parallel needs a mixture-of-experts model, but this one has "
            f"{geometry.num_experts} routed expert{'' if geometry.num_experts == 1 else 's'} per layer; drop "
            "the flag"
        )
    try:
        ExpertPlacement.linear(geometry.num_experts, layout.ep_size)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} ({layout.describe()})") from None


def check_expert_shards(request: RunRequest, geometry: MoEGeometry) -> None:
    """Without EP every expert is split over the TP ranks.

    Upstream also refuses more TP ranks than experts (hunyuan_image3_transformer.py:1663).
    """
    tp = request.tensor_parallel_size
    if geometry.is_moe and tp > geometry.num_experts:
        raise ConfigurationError(
            f"--tensor-parallel-size is {tp} but HunyuanImage3 allows no more TP ranks than experts "
            f"({geometry.num_experts}); set it to {geometry.num_experts} or less"
        )
    what = "the routed experts, split over the TP ranks without --enable-expert-parallel,"
    _check_widths(what, geometry.intermediate_sizes, tp)


def check_shared_expert(request: RunRequest, geometry: MoEGeometry) -> None:
    """The shared expert is tensor-parallel, with EP and without."""
    _check_widths("the shared expert", geometry.shared_intermediate_size, request.tensor_parallel_size)


def check_vision_tower(request: RunRequest, config: Mapping[str, Any]) -> None:
    """vLLM-Omni splits the vision tower over TP, also where no picture is read (siglip2.py:148,158)."""
    tower, tp = config.get("vit") or {}, request.tensor_parallel_size
    for key in ("num_attention_heads", "intermediate_size"):
        if tower.get(key, tp) % tp:
            raise ConfigurationError(
                f"--tensor-parallel-size is {tp} but the vision tower's {key} is {tower[key]}, which is not "
                f"divisible by it; sizes that fit: {_divisors(tower[key], up_to=64)}"
            )


def _check_widths(what: str, widths: Sequence[int], tp: int) -> None:
    for width in widths:
        if width % tp:
            raise ConfigurationError(
                f"--tensor-parallel-size is {tp} but the intermediate size of {what} is {width}, which is "
                f"not divisible by it; sizes that fit: {_divisors(width, up_to=64)}"
            )


def check_attention_heads(request: RunRequest, geometry: MoEGeometry) -> None:
    """Query heads are dealt out to the TP ranks in equal numbers (hunyuan_image3_transformer.py:1765)."""
    heads, tp = geometry.num_attention_heads, request.tensor_parallel_size
    if heads % tp:
        raise ConfigurationError(
            f"--tensor-parallel-size is {tp} but the model has {heads} attention heads, which is not "
            f"divisible by it; sizes that fit: {_divisors(heads)}"
        )


def check_key_value_heads(request: RunRequest, geometry: MoEGeometry) -> None:
    """KV heads are dealt out to the TP ranks, or, where they are fewer, each is replicated equally often.

    Both work in the diffusion path: QKVParallelLinear replicates (vllm/model_executor/layers/linear.py:1049)
    and HunYuanAttention keeps one head per rank (hunyuan_image3_transformer.py:1771-1779). Its other count,
    which becomes 0 there, is read only with a text KV cache.
    """
    kv_heads, tp = geometry.num_key_value_heads, request.tensor_parallel_size
    if max(kv_heads, tp) % min(kv_heads, tp):
        raise ConfigurationError(
            f"--tensor-parallel-size is {tp} but the model has {kv_heads} KV heads, which can be neither "
            f"divided nor replicated equally; sizes that fit: {_join(_fitting_tp(geometry))}"
        )


def _fitting_tp(geometry: MoEGeometry) -> list[int]:
    heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
    return [
        tp for tp in range(1, heads + 1) if heads % tp == 0 and max(kv_heads, tp) % min(kv_heads, tp) == 0
    ]


def check_ulysses(request: RunRequest, geometry: MoEGeometry) -> None:
    """Ulysses deals out the query heads of one TP rank once more.

    KV heads do not limit it: HunyuanImage3 repeats them to the number of query heads before attention
    (hunyuan_image3_transformer.py:1218), so all three counts in attention/parallel/ulysses.py:512 are equal.
    Only the paged KV mode, which omni-ep does not use, skips the repetition.
    """
    heads = geometry.num_attention_heads // request.tensor_parallel_size
    if heads % request.ulysses_degree:
        raise ConfigurationError(
            f"--ulysses-degree is {request.ulysses_degree} but a rank has {heads} attention heads "
            f"({geometry.num_attention_heads} over TP {request.tensor_parallel_size}), which is not "
            f"divisible by it; degrees that fit: {_divisors(heads)}"
        )


def check_steps(request: RunRequest) -> None:
    """Upstream turns 0 steps into 50 and cannot take more steps than the schedule has."""
    require_positive_int("--num-inference-steps", request.num_inference_steps)
    if request.num_inference_steps > NUM_TRAIN_TIMESTEPS:
        raise ConfigurationError(
            f"--num-inference-steps is {request.num_inference_steps} but the noise schedule has "
            f"{NUM_TRAIN_TIMESTEPS} steps; set it to 1..{NUM_TRAIN_TIMESTEPS}"
        )


def check_images_per_prompt(request: RunRequest) -> None:
    """At least one picture is painted."""
    require_positive_int("--num-images-per-prompt", request.num_images_per_prompt)


def check_guidance(request: RunRequest) -> None:
    """Guidance must be a finite number; up to 1 means none."""
    if not math.isfinite(request.guidance_scale) or request.guidance_scale < 0:
        raise ConfigurationError(
            f"--guidance-scale must be a finite number of at least 0, got {request.guidance_scale}; up to 1 "
            "switches guidance off"
        )


def check_picture_size(request: RunRequest, sizes: PictureSizes) -> None:
    """Only sizes that come out as asked for are accepted, see ``PictureSizes``."""
    for flag, value, step in (
        ("--height", request.height, sizes.height_step),
        ("--width", request.width, sizes.width_step),
    ):
        require_positive_int(flag, value)
        if value % step:
            below = value // step * step
            fits = f"{below} or {below + step}" if below else f"{step}"
            raise ConfigurationError(
                f"{flag} is {value} but must be a multiple of {step} (VAE factor x patch size), such as "
                f"{fits}"
            )
    asked = (request.height, request.width)
    painted = sizes.bucket_for(*asked)
    if painted != asked:
        nearest = ", ".join(f"{height}x{width}" for height, width in sizes.nearest(*asked))
        raise ConfigurationError(
            f"height x width {request.height}x{request.width} is not a size this model paints "
            f"(image_base_size {sizes.base_size}; it would paint {painted[0]}x{painted[1]} instead); nearest "
            f"sizes: {nearest}"
        )


def check_devices(layout: ParallelLayout, *, device_count: int, device_kind: str) -> str | None:
    """One device per rank; CPU cores may be shared, at the price of a warning, which is returned."""
    ranks = layout.world_size
    if ranks <= device_count:
        return None
    if device_kind == "cpu":
        cores = f"{device_count} CPU core{'s' if device_count > 1 else ''}"
        return f"{ranks} ranks share {cores}, so each step takes longer."
    raise ConfigurationError(
        f"this layout needs {ranks} ranks (TP {layout.tp} x SP {layout.sp} x PP {layout.pp} x CFG "
        f"{layout.cfg} x DP {layout.dp}) but there {'are' if device_count != 1 else 'is'} {device_count} "
        f"{device_kind} device{'s' if device_count != 1 else ''}; lower the parallel sizes to {device_count} "
        "ranks or fewer"
    )


def idle_guidance_ranks(request: RunRequest, config: Mapping[str, Any]) -> str | None:
    """Warning when CFG ranks only repeat each other's work.

    Without a second branch upstream runs the whole batch on every CFG rank; the picture is right
    (hunyuan_image3_transformer.py:3188-3192).
    """
    if request.cfg_parallel_size == 1:
        return None
    if config.get("cfg_distilled"):
        reason = "this checkpoint has guidance distilled into it"
    elif request.guidance_scale <= 1:
        reason = f"--guidance-scale {request.guidance_scale:g} switches guidance off"
    else:
        return None
    return (
        f"--cfg-parallel-size {request.cfg_parallel_size} saves no time because {reason}: the CFG ranks "
        "repeat each other's work."
    )


def check_checkpoint_folder(path: str | Path) -> dict[str, Any]:
    """Check that a local folder holds a complete checkpoint, without opening any weight.

    Returns:
        The contents of its ``config.json``.

    Raises:
        ConfigurationError: naming what is missing, malformed or unsupported.
    """
    try:
        return _checked_folder(path)
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename or path} cannot be read ({error.strerror}), a checkpoint folder was expected; "
            "give this user read permission for it and what it holds"
        ) from None


def _checked_folder(path: str | Path) -> dict[str, Any]:
    folder = Path(path)
    if not str(path):
        raise ConfigurationError(
            "the name of the checkpoint folder is empty; name the folder that holds config.json"
        )
    if not folder.exists():
        raise ConfigurationError(
            f"the checkpoint folder {folder} does not exist; name a folder of this machine"
        )
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder; name the folder that holds config.json")
    config = _read_json(folder / "config.json")
    check_types(config, str(folder / "config.json"))
    architectures = config.get("architectures") or []
    if not set(architectures) & set(SUPPORTED_ARCHITECTURES):
        raise ConfigurationError(
            f"{folder / 'config.json'} is for {_join(architectures) or 'no named architecture'}; supported: "
            f"{_join(SUPPORTED_ARCHITECTURES)}"
        )
    if "vocab_size" not in config:
        raise ConfigurationError(
            f"{folder / 'config.json'} has no vocab_size, a whole number was expected; download "
            "config.json again"
        )
    _read_json(folder / "generation_config.json")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(f"{folder / 'tokenizer.json'} is missing; download the checkpoint again")
    _check_shards(folder)
    return config


def _check_shards(folder: Path) -> None:
    present = {file.name for file in folder.glob("*.safetensors")}
    for index in sorted(folder.glob("*.safetensors.index.json")):
        weight_map = _read_json(index).get("weight_map")
        # What kind of thing it is, the headers' reader judges.
        shards = weight_map.values() if isinstance(weight_map, dict) else ()
        named = {shard for shard in shards if isinstance(shard, str)}
        absent = sorted(named - present)
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            raise ConfigurationError(
                f"{index} names {len(named)} weight files of which {len(absent)} "
                f"{'is' if len(absent) == 1 else 'are'} missing "
                f"({_join(absent[:3])}{more}); download the checkpoint again"
            )
    if not present:
        raise ConfigurationError(f"{folder} holds no *.safetensors file; download the checkpoint again")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigurationError(f"{file} is missing; download the checkpoint again")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{file} is not valid JSON ({error}); download the checkpoint again"
        ) from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} must hold a JSON object; download the checkpoint again")
    return content


def _divisors(number: int, up_to: int | None = None) -> str:
    return _join(size for size in range(1, min(number, up_to or number) + 1) if number % size == 0)


def _join(items: Any) -> str:
    return ", ".join(str(item) for item in items)
