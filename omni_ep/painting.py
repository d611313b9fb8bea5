# SPDX-License-Identifier: Apache-2.0
"""Paint pictures with vLLM-Omni's engine and say what it took.

The example and the commands that compare runs share this, so that every figure of a report
comes from the same place.
"""

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np
from PIL import Image

from omni_ep import plugin
from omni_ep.config import RunRequest
from omni_ep.deploy import deploy_file, dit_deploy_config
from omni_ep.errors import ConfigurationError, WorkerStartError
from omni_ep.expert_load import ExpertLoad
from omni_ep.placement import ExpertPlacement

#: The thread in which vLLM-Omni starts its stages (``engine/omni_engine_base.py``).
_ENGINE_THREAD = "orchestrator"


class PaintingError(RuntimeError):
    """The engine failed to start or died; the message is one a user can act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Painting:
    """One picture and how long its steps took.

    Attributes:
        image: RGB.
        step_seconds: wall time of every denoising step on rank 0.
    """

    image: Image.Image
    step_seconds: list[float] = field(default_factory=list)

    @property
    def per_step_s(self) -> float | None:
        """Median seconds per step; the first step also prefills the prompt and is left out."""
        steady = self.step_seconds[1:] or self.step_seconds
        return median(steady) if steady else None


class Painter:
    """An engine for one layout; use it as a context manager so that no rank outlives it.

    Args:
        model: checkpoint folder or hub name.
        request: the validated run.
        dtype: ``float32``, ``bfloat16`` or ``auto``.
        trust_remote_code: let code of the checkpoint run.
        vae_use_tiling: decode the picture tile by tile.
        check_weights: refuse weights that hold NaN or Inf.
        engine_args: passed on to ``vllm_omni.entrypoints.omni.Omni``.
    """

    def __init__(
        self,
        model: str,
        request: RunRequest,
        *,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        vae_use_tiling: bool = False,
        check_weights: bool = False,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        from vllm_omni.entrypoints.omni import Omni
        from vllm_omni.plugins import load_omni_general_plugins

        load_omni_general_plugins()
        plugin.register_configs()
        self.request = request
        arguments: dict[str, Any] = {
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "additional_config": {"omni_ep": {"check_weights": check_weights}},
            "worker_extension_cls": "omni_ep.worker_extension.ExpertParallelWorkerExtension",
            **(engine_args or {}),
        }
        started = time.perf_counter()
        with deploy_file(dit_deploy_config(request, vae_use_tiling=vae_use_tiling)) as deploy_config:
            try:
                with _sentences_said_once():
                    self._omni = Omni(model=model, deploy_config=deploy_config, **arguments)
            except Exception as exc:
                _end_children()
                raise PaintingError(f"the engine did not start: {_reason(exc)}") from exc
            except BaseException:
                _end_children()
                raise
        self.startup_s = time.perf_counter() - started
        """Seconds from the engine's creation until every rank was ready."""

    def paint(self, prompt: str, seed: int) -> Painting:
        """Paint one picture.

        Raises:
            PaintingError: a rank died, the request failed, or the picture holds NaN.
        """
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        sampling = OmniDiffusionSamplingParams(
            height=self.request.height,
            width=self.request.width,
            num_inference_steps=self.request.num_inference_steps,
            guidance_scale=self.request.guidance_scale,
            seed=seed,
        )
        try:
            [output] = self._omni.generate(
                {"prompt": prompt, "modalities": ["image"]}, [sampling], use_tqdm=False
            )
        except Exception as exc:
            raise PaintingError(f"the picture was not finished: {_reason(exc)}") from exc
        if not output.images:
            raise PaintingError(
                f"the picture was not finished: {getattr(output, 'error_message', None) or output}"
            )
        figures = self._ask_workers()
        if figures["has_nan"]:
            # Such a picture is black, and two black pictures compare as identical.
            raise PaintingError(
                "the picture holds NaN where colours were expected; look for damaged weights with "
                "--check-weights, or paint with --dtype float32 if bfloat16 may have overflowed"
            )
        return Painting(image=output.images[0].convert("RGB"), step_seconds=figures["step_seconds"])

    def memory(self) -> list[dict[str, int]]:
        """Per rank: ``rank``, ``expert_bytes``, ``parameter_bytes``, ``peak_rss_bytes``."""
        memory: list[dict[str, int]] = self._ask_workers()["memory"]
        return memory

    def loading(self) -> list[dict[str, Any]]:
        """Per rank: ``rank``, ``bytes_needed``, ``bytes_read``, ``bytes_skipped``, ``seconds``.

        Empty without expert parallelism, when vLLM-Omni loads by itself and does not count.
        """
        loading: list[dict[str, Any]] = self._ask_workers()["loading"]
        return loading

    def loading_warning(self) -> str | None:
        """What loading found odd and went on with; the engine's log, which may be off, has it too."""
        warning: str | None = self._ask_workers()["loading_warning"]
        return warning

    def count_expert_load(self) -> None:
        """Count the tokens of each expert in every picture painted from now on.

        Raises:
            PaintingError: this platform's kernels choose experts without a router that could be asked.
        """
        self._ask_workers("omni_ep_count_expert_load")

    def expert_load(self) -> ExpertLoad:
        """Tokens per step, layer and expert, summed over the pictures since ``count_expert_load``.

        Raises:
            PaintingError: no router has reported a token.
        """
        answer = self._ask_workers("omni_ep_expert_load")
        counts = np.array(answer["counts"], dtype=np.int64)
        if not counts.any():
            raise PaintingError("tokens per expert were not counted: no router has reported which it chose")
        ep_size = self.request.layout.ep_size if self.request.enable_expert_parallel else 1
        return ExpertLoad(
            counts=counts,
            layers=tuple(answer["layers"]),
            placement=ExpertPlacement.linear(counts.shape[2], ep_size),
        )

    def close(self) -> None:
        """End every rank; a second call does nothing."""
        self._omni.close()

    def __enter__(self) -> "Painter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None:
            # The engine would first wait for the picture that nobody wants any more.
            _end_children()
            # What is left of the engine must not hide why the block was left.
            with contextlib.suppress(Exception):
                self.close()
            return
        self.close()

    def _ask_workers(self, method: str = "omni_ep_report") -> Any:
        try:
            answer = self._omni.engine.collective_rpc(method, timeout=60.0)
        except Exception as exc:
            raise PaintingError(f"the ranks did not report their figures: {_reason(exc)}") from exc
        while isinstance(answer, list):
            [answer] = answer
        return answer


def single_rank(request: RunRequest) -> RunRequest:
    """The same picture on one device: the baseline that every layout is compared with."""
    return replace(
        request,
        tensor_parallel_size=1,
        ulysses_degree=1,
        ring_degree=1,
        pipeline_parallel_size=1,
        cfg_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
        use_hsdp=False,
    )


def versions() -> dict[str, str]:
    """The packages a picture depends on."""
    return {
        name: version(name) for name in ("omni-ep", "vllm", "vllm-omni", "torch", "diffusers", "transformers")
    }


def _end_children() -> None:
    """Terminate, then kill, every process that this one has started through multiprocessing."""
    for action, patience_s in (("terminate", 2.0), ("kill", 1.0)):
        children = multiprocessing.active_children()
        for child in children:
            getattr(child, action)()
        deadline = time.monotonic() + patience_s
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _sentences_said_once() -> Iterator[None]:
    """Keep the engine's own thread from printing a traceback of what its caller is told as well."""
    shown = threading.excepthook

    def show(arguments: threading.ExceptHookArgs) -> None:
        if not isinstance(arguments.exc_value, ConfigurationError | WorkerStartError):
            shown(arguments)

    threading.excepthook = show
    try:
        yield
    except Exception:
        # The caller is told before the thread ends.
        for thread in threading.enumerate():
            if thread.name == _ENGINE_THREAD:
                thread.join(timeout=2.0)
        raise
    finally:
        threading.excepthook = shown


def _reason(exc: BaseException) -> str:
    # The engine wraps a worker's message in its own; the last lines of a wrapped traceback
    # are for its log, not for the sentence.
    text = str(exc).strip() or type(exc).__name__
    return text.split("\n\nrank ")[0].removeprefix("Orchestrator initialization failed: ")
