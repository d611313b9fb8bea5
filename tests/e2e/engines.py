# SPDX-License-Identifier: Apache-2.0
"""Real workers under omni-ep's executor, one set per test that needs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omni_ep.config import RunRequest
from tests.workers import TINY, diffusion_config

#: Seconds one picture or model load may take before the test fails instead of waiting.
TIMEOUT_S = 120.0


class Ranks:
    """Worker ranks that paint on request."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def call(self, method: str, *arguments: Any) -> Any:
        """Every rank runs the method; the first rank's answer is returned."""
        answer = self.executor.collective_rpc(method, args=arguments, timeout=TIMEOUT_S)
        return answer[0] if isinstance(answer, list) else answer

    def paint(self, prompt: str = "a red cube on a table", **sampling: Any) -> dict[str, Any]:
        sampling = {
            "height": 64,
            "width": 64,
            "num_inference_steps": 4,
            "guidance_scale": 5.0,
            "seed": 42,
            **sampling,
        }
        painted: dict[str, Any] = self.call("paint", prompt, sampling)
        return painted


@contextmanager
def ranks(request: RunRequest, *, model: Path = TINY, **settings: Any) -> Iterator[Ranks]:
    """Start the request's ranks with the model loaded; end them whatever happens."""
    from omni_ep.platforms.cpu.executor import ForkserverDiffusionExecutor

    settings.setdefault("worker_extension_cls", "tests.e2e.capture.CaptureExtension")
    executor = ForkserverDiffusionExecutor(diffusion_config(request, model=model, **settings))
    try:
        yield Ranks(executor)
    finally:
        executor.shutdown()
