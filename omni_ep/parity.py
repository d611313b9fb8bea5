# SPDX-License-Identifier: Apache-2.0
"""Paints one baseline and several layouts, and judges each layout by the baseline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from omni_ep.config import RunRequest
from omni_ep.painting import Painter, PaintingError, single_rank, versions
from omni_ep.quality import Quality, Thresholds, compare, histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one layout painted and took. ``error`` is set where it did not finish."""

    name: str
    request: RunRequest
    images: list[Image.Image] = field(default_factory=list)
    startup_s: float | None = None
    per_step_s: float | None = None
    memory: list[dict[str, int]] = field(default_factory=list)
    error: str | None = None

    @property
    def ep_size(self) -> int:
        """Ranks that share the experts; 1 without expert parallelism."""
        return self.request.layout.ep_size if self.request.enable_expert_parallel else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A run, its qualities (one per picture) and why it does not pass."""

    run: Run
    qualities: list[Quality]
    failures: list[str]

    @property
    def verdict(self) -> str:
        """``pass``, ``fail`` (the picture differs too much) or ``error`` (no picture)."""
        return "error" if self.run.error else "fail" if self.failures else "pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The whole comparison."""

    model: str
    settings: dict[str, Any]
    """Picture, prompts, seed, dtype, device: whatever a reader needs to repeat it."""
    thresholds: Thresholds
    baseline: Run
    layouts: list[Judged]
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether every layout passes."""
        return all(judged.verdict == "pass" for judged in self.layouts)


def paint(
    name: str,
    model: str,
    request: RunRequest,
    prompts: Sequence[str],
    seed: int,
    options: Mapping[str, Any],
) -> Run:
    """One engine, one picture per prompt; picture i uses ``seed + i``. The ranks are gone afterwards."""
    images = []
    try:
        with Painter(model, request, **options) as painter:
            paintings = [painter.paint(prompt, seed + index) for index, prompt in enumerate(prompts)]
            images = [painting.image for painting in paintings]
            return Run(
                name=name,
                request=request,
                images=images,
                startup_s=painter.startup_s,
                per_step_s=paintings[-1].per_step_s,
                memory=painter.memory(),
            )
    except PaintingError as error:
        return Run(name=name, request=request, error=str(error))


def judge(baseline: Run, run: Run, thresholds: Thresholds) -> Judged:
    """Compare picture by picture; an unfinished run has no qualities and one failure, its error."""
    if run.error is not None:
        return Judged(run=run, qualities=[], failures=[run.error])
    qualities = [
        compare(reference, image) for reference, image in zip(baseline.images, run.images, strict=True)
    ]
    several = len(qualities) > 1
    failures = [
        f"picture {index + 1}: {failure}" if several else failure
        for index, quality in enumerate(qualities)
        for failure in thresholds.verdict(quality)
    ]
    return Judged(run=run, qualities=qualities, failures=failures)


def run_parity(
    model: str,
    requests: Mapping[str, RunRequest],
    prompts: Sequence[str],
    seed: int,
    *,
    thresholds: Thresholds,
    settings: dict[str, Any],
    options: Mapping[str, Any],
    tell: Callable[[str], object],
) -> Parity:
    """The baseline once, then each layout.

    Args:
        model: checkpoint folder.
        requests: validated requests by layout name, all of the same picture.
        options: keyword arguments of ``Painter``.
        tell: called with a line before each start and after each verdict.

    Raises:
        PaintingError: the baseline was not painted, so there is nothing to compare with.
    """
    first = next(iter(requests.values()))
    tell("baseline: starting 1 rank ...")
    baseline = paint("1", model, single_rank(first), prompts, seed, options)
    if baseline.error is not None:
        raise PaintingError(f"the baseline failed: {baseline.error}")
    layouts = []
    for name, request in requests.items():
        tell(f"{name}: starting {request.layout.world_size} rank(s) ...")
        judged = judge(baseline, paint(name, model, request, prompts, seed, options), thresholds)
        tell(f"{name}: {judged.verdict}" + (f": {' '.join(judged.failures)}" if judged.failures else ""))
        layouts.append(judged)
    return Parity(
        model=model,
        settings=settings,
        thresholds=thresholds,
        baseline=baseline,
        layouts=layouts,
        versions=versions(),
    )


def to_dict(parity: Parity) -> dict[str, Any]:
    """JSON-able, without the pictures; times in seconds, sizes in bytes, differences on a 0..1 scale."""
    thresholds = parity.thresholds
    return {
        "passed": parity.passed,
        "model": parity.model,
        "settings": parity.settings,
        "thresholds": {
            "name": thresholds.name,
            "min_psnr_db": thresholds.min_psnr_db,
            "min_ssim": thresholds.min_ssim,
            "why": thresholds.why,
        },
        "baseline": _run_dict(parity.baseline),
        "layouts": [
            {
                **_run_dict(judged.run),
                "verdict": judged.verdict,
                "failures": judged.failures,
                "quality": [
                    {
                        **quality.to_dict(),
                        "histogram": [
                            {"first": entry.first, "last": entry.last, "share": entry.share}
                            for entry in histogram(reference, image)
                        ],
                    }
                    for quality, reference, image in zip(
                        judged.qualities, parity.baseline.images, judged.run.images, strict=False
                    )
                ],
            }
            for judged in parity.layouts
        ],
        "versions": parity.versions,
    }


def _run_dict(run: Run) -> dict[str, Any]:
    return {
        "layout": run.name,
        "world_size": run.request.layout.world_size,
        "ep_size": run.ep_size,
        "startup_s": run.startup_s,
        "per_step_s": run.per_step_s,
        "memory": run.memory,
    }
