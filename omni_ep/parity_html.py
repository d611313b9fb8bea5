# SPDX-License-Identifier: Apache-2.0
"""A parity run as one HTML file: pictures inlined, no script, nothing fetched."""

import base64
import io
from collections.abc import Iterable
from html import escape

from PIL import Image

from omni_ep.parity import Judged, Parity, Run
from omni_ep.quality import Quality, difference_map
from omni_ep.units import format_bytes

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; background: #f6f7f9; margin: 0; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 26px; margin: 0 0 2px; }
h2 { font-size: 18px; margin: 34px 0 10px; }
p { margin: 4px 0; }
.muted { color: #5b6570; }
.card { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; padding: 14px 18px;
  overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid #eceff2; white-space: nowrap; }
th { color: #5b6570; font-weight: 600; font-size: 13px; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
.narrow { width: 340px; }
.badge { display: inline-block; padding: 1px 10px; border-radius: 10px; font-weight: 600; color: #fff; }
.pass { background: #1a7f37; } .fail { background: #c0392b; } .error { background: #6b3fa0; }
.base { background: #57606a; }
.sheet { display: flex; flex-direction: column; gap: 18px; }
.row { display: flex; gap: 14px; flex-wrap: wrap; align-items: flex-start; }
.row h3 { margin: 0; font-size: 15px; width: 150px; flex: none; }
figure { margin: 0; } figcaption { font-size: 13px; color: #5b6570; max-width: 220px; }
img { width: 220px; height: auto; display: block; border: 1px solid #dfe3e8; image-rendering: pixelated; }
.bar { background: #e6e9ed; border-radius: 3px; height: 12px; width: 220px; display: inline-block;
  vertical-align: middle; position: relative; overflow: hidden; }
.bar i { position: absolute; left: 0; top: 0; bottom: 0; background: #8ab4e8; }
.bar i.experts { background: #1f5fa8; }
code { background: #eef0f3; padding: 1px 5px; border-radius: 4px; overflow-wrap: anywhere; }
"""


def to_html(parity: Parity) -> str:
    """The report; opens in any browser without a network."""
    count = sum(judged.verdict == "pass" for judged in parity.layouts)
    total = len(parity.layouts)
    badge = "pass" if parity.passed else "fail"
    body = [
        f"<h1>Parity with one device <span class='badge {badge}'>{count} of {total} pass</span></h1>",
        f"<p class='muted'>Model <code>{escape(parity.model)}</code></p>",
        f"<p class='muted'>{escape(_settings(parity))}</p>",
        f"<p class='muted'>{escape(_thresholds(parity))}</p>",
        _section("Verdicts", _verdicts(parity)),
        _section("Contact sheet", _sheet(parity)),
        _section("Memory per rank", _memory(parity)),
        _section("Versions", _versions(parity)),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>omni-ep parity: {count} of {total} pass</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(body)}\n</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n<div class='card'>{content}</div>"


def _settings(parity: Parity) -> str:
    return "; ".join(f"{name} {value}" for name, value in parity.settings.items() if name != "prompts")


def _thresholds(parity: Parity) -> str:
    limits = parity.thresholds
    least = f"PSNR at least {limits.min_psnr_db:g} dB"
    if limits.min_ssim is not None:
        least += f", SSIM at least {limits.min_ssim:g}"
    return f"Thresholds {limits.name}: {least} ({limits.why})"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in header)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>"


def _verdicts(parity: Parity) -> str:
    header = (
        *("layout", "verdict", "ranks", "EP", "PSNR<br>worst", "SSIM<br>worst"),
        *("mean diff.<br>of 255", "p99 diff.<br>of 255", "max diff.<br>of 255"),
        *("time per step", "against<br>1 device", "start"),
    )
    base = parity.baseline
    rows = [
        [
            *("1 device", "<span class='badge base'>baseline</span>", "1", "1", *[""] * 5),
            *(_seconds(base.per_step_s), "", _seconds(base.startup_s)),
        ]
    ]
    for judged in parity.layouts:
        run = judged.run
        rows.append(
            [
                escape(run.name),
                f"<span class='badge {judged.verdict}'>{judged.verdict}</span>",
                str(run.request.layout.world_size),
                str(run.ep_size),
                *_worst(judged.qualities),
                _seconds(run.per_step_s),
                f"{run.per_step_s / base.per_step_s:.2f} x" if run.per_step_s and base.per_step_s else "",
                _seconds(run.startup_s),
            ]
        )
    failures = "".join(
        f"<p><b>{escape(judged.run.name)}</b>: {escape(failure)}</p>"
        for judged in parity.layouts
        for failure in judged.failures
    )
    return _table(header, rows) + failures


def _worst(qualities: list[Quality]) -> list[str]:
    if not qualities:
        return [""] * 5
    psnr = (
        "identical"
        if all(quality.identical for quality in qualities)
        else (f"{min(quality.psnr_db for quality in qualities):.1f} dB")
    )
    return [
        psnr,
        f"{min(quality.ssim for quality in qualities):.4f}",
        f"{max(quality.mean_abs for quality in qualities) * 255:.3f}",
        f"{max(quality.p99_abs for quality in qualities) * 255:.1f}",
        f"{max(quality.max_abs for quality in qualities) * 255:.0f}",
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _sheet(parity: Parity) -> str:
    prompts = parity.settings.get("prompts") or [""] * len(parity.baseline.images)
    figures = [
        _figure(image, f"“{prompt}”") for image, prompt in zip(parity.baseline.images, prompts, strict=False)
    ]
    rows = [_row("1 device (baseline)", figures)]
    for judged in parity.layouts:
        if judged.run.error is not None:
            rows.append(_row(judged.run.name, [f"<p>{escape(judged.run.error)}</p>"]))
            continue
        rows.append(_row(judged.run.name, _pictures(parity, judged)))
    return f"<div class='sheet'>{''.join(rows)}</div>"


def _pictures(parity: Parity, judged: Judged) -> list[str]:
    figures = []
    for reference, image, quality in zip(
        parity.baseline.images, judged.run.images, judged.qualities, strict=True
    ):
        difference, label = difference_map(reference, image)
        psnr = "identical" if quality.identical else f"PSNR {quality.psnr_db:.1f} dB"
        figures.append(_figure(image, f"{psnr}, SSIM {quality.ssim:.4f}"))
        figures.append(_figure(difference, f"{label}; largest {quality.max_abs * 255:.0f} of 255"))
    return figures


def _row(title: str, figures: list[str]) -> str:
    return f"<div class='row'><h3>{escape(title)}</h3>{''.join(figures)}</div>\n"


def _figure(image: Image.Image, caption: str) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    text = escape(caption)
    return (
        f"<figure><img src='data:image/png;base64,{data}' alt='{escape(caption, quote=True)}'>"
        f"<figcaption>{text}</figcaption></figure>"
    )


def _memory(parity: Parity) -> str:
    runs = [parity.baseline, *(judged.run for judged in parity.layouts if judged.run.memory)]
    most = max((entry["parameter_bytes"] for run in runs for entry in run.memory), default=1)
    header = ("layout", "rank", "routed experts", "all parameters", "", "peak of the process")
    return _table(header, [row for run in runs for row in _memory_rows(run, most)]) + (
        "<p class='muted'>Dark: routed experts; light: the other parameters; bars are relative to the "
        "largest rank. The peak covers the process with all its libraries.</p>"
    )


def _memory_rows(run: Run, most: int) -> list[list[str]]:
    name = "1 device" if run.name == "1" else run.name
    rows = []
    for entry in run.memory:
        experts, parameters = entry["expert_bytes"], entry["parameter_bytes"]
        bar = (
            f"<span class='bar'><i style='width:{100 * parameters / most:.1f}%'></i>"
            f"<i class='experts' style='width:{100 * experts / most:.1f}%'></i></span>"
        )
        rows.append(
            [
                escape(name) if entry["rank"] == 0 else "",
                str(entry["rank"]),
                f"{format_bytes(experts)} ({experts:,} B)",
                f"{format_bytes(parameters)} ({parameters:,} B)",
                bar,
                format_bytes(entry["peak_rss_bytes"]),
            ]
        )
    return rows


def _versions(parity: Parity) -> str:
    rows = [[escape(name), escape(number)] for name, number in parity.versions.items()]
    return f"<div class='narrow'>{_table(('package', 'version'), rows)}</div>"
