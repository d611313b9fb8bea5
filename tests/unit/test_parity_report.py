# SPDX-License-Identifier: Apache-2.0
"""The parity report from made-up runs: verdicts, JSON, and an HTML file that needs nothing else."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_ep import cli, parity
from omni_ep.config import RunRequest
from omni_ep.parity import Parity, Run, judge, to_dict
from omni_ep.parity_html import to_html
from omni_ep.quality import PARITY
from tests.shards import DAMAGES, copy_of_tiny

TINY = Path(__file__).parents[1] / "data" / "hunyuan_image3_tiny"


def picture(change: int = 0) -> Image.Image:
    pixels = np.random.default_rng(0).integers(40, 200, (32, 48, 3)).astype(np.uint8)
    pixels[4:8, 4:8] += np.uint8(change)
    return Image.fromarray(pixels)


def made_up_run(name: str, request: RunRequest, image: Image.Image | None, error: str | None = None) -> Run:
    memory = [
        {"rank": rank, "expert_bytes": 2**20, "parameter_bytes": 3 * 2**20, "peak_rss_bytes": 2**30}
        for rank in range(request.layout.world_size)
    ]
    return Run(
        name=name,
        request=request,
        images=[] if image is None else [image],
        startup_s=None if error else 12.5,
        per_step_s=None if error else 0.25,
        memory=[] if error else memory,
        error=error,
    )


@pytest.fixture
def report() -> Parity:
    baseline = made_up_run("1", RunRequest(), picture())
    runs = [
        made_up_run("tp2+ep", RunRequest(tensor_parallel_size=2, enable_expert_parallel=True), picture()),
        made_up_run("cfg2+ep", RunRequest(cfg_parallel_size=2, enable_expert_parallel=True), picture(30)),
        made_up_run("sp2", RunRequest(ulysses_degree=2), None, error="rank 1 died of <hunger>"),
    ]
    return Parity(
        model="/models/tiny & co",
        settings={"size": "32x48 pixels", "prompts": ["a <red> cube"]},
        thresholds=PARITY,
        baseline=baseline,
        layouts=[judge(baseline, run, PARITY) for run in runs],
        versions={"omni-ep": "0.1.0"},
    )


def test_verdicts(report: Parity) -> None:
    assert [judged.verdict for judged in report.layouts] == ["pass", "fail", "error"]
    assert report.passed is False
    assert "PSNR" in report.layouts[1].failures[0]


def test_json(report: Parity) -> None:
    told = json.loads(json.dumps(to_dict(report)))
    assert told["passed"] is False
    assert [entry["layout"] for entry in told["layouts"]] == ["tp2+ep", "cfg2+ep", "sp2"]
    first, second, third = told["layouts"]
    assert (first["ep_size"], first["world_size"], first["per_step_s"]) == (2, 2, 0.25)
    assert first["quality"][0]["identical"] is True
    assert first["quality"][0]["psnr_db"] is None
    assert second["quality"][0]["max_abs"] == pytest.approx(30 / 255)
    assert sum(entry["share"] for entry in second["quality"][0]["histogram"]) == pytest.approx(1)
    assert (third["ep_size"], third["quality"], third["failures"]) == (1, [], ["rank 1 died of <hunger>"])
    assert told["versions"] == {"omni-ep": "0.1.0"}


class _Page(HTMLParser):
    """Collects tags, links and text, and checks that tags are closed in order."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_self_contained(report: Parity) -> None:
    html = to_html(report)
    page = _Page()
    page.feed(html)
    assert page.open == []
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "http" not in html
    assert not re.search(r"url\(|@import", html)
    # Baseline, and image with difference for each layout that painted.
    assert len(page.links) == 5
    for link in page.links:
        assert link.startswith("data:image/png;base64,")
        image = Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2])))
        assert image.size == (48, 32)


def test_html_shows_the_pictures_themselves(report: Parity) -> None:
    page = _Page()
    page.feed(to_html(report))
    images = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2])))) for link in page.links
    ]
    baseline, same, no_difference, changed, difference = images
    assert np.array_equal(baseline, np.asarray(picture()))
    assert np.array_equal(same, baseline)
    assert not no_difference.any()
    assert np.array_equal(changed, np.asarray(picture(30)))
    assert (difference[4:8, 4:8] == 255).all()
    assert difference.sum() == 255 * 16 * 3


def test_html_says_what_a_reader_needs(report: Parity) -> None:
    page = _Page()
    html = to_html(report)
    page.feed(html)
    expected = ("1 of 3 pass", "PSNR at least 60 dB", "250 ms", "12.5 s", "1.00 MiB (1,048,576 B)", "0.1.0")
    for words in expected:
        assert words in page.text
    assert "identical" in page.text
    # Text of users and ranks is text, never markup.
    assert "“a <red> cube”" in page.text
    assert "rank 1 died of <hunger>" in page.text
    assert "/models/tiny & co" in page.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "tp2+ep,tp2+ep"], "a layout occurs twice"),
        (["--layouts", "tp3+ep"], "layout tp3+ep: "),
        (["--layouts", "foo2"], "'foo2'"),
        (["--layouts", "tp2+eplb"], "only +ep is known"),
        (["--output", "report.pdf"], "must end in .html"),
        (
            ["--output", "no/such/folder/report.html"],
            "--output is no/such/folder/report.html, which cannot be",
        ),
        (["--height", "63"], "--height is 63"),
    ],
)
def test_impossible_is_refused_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "Painter", pytest.fail)
    assert cli.main(["parity", "--model", str(TINY), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_damage_is_found_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "Painter", pytest.fail)
    do, text = DAMAGES["truncated shard"]
    do(copy_of_tiny(tmp_path / "model"))
    assert cli.main(["parity", "--model", str(tmp_path / "model"), "--layouts", "tp2"]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_an_unfinished_baseline_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_painter(*_args: object, **_options: object) -> None:
        raise parity.PaintingError("no memory")

    monkeypatch.setattr(parity, "Painter", no_painter)
    output = tmp_path / "report.html"
    arguments = ["parity", "--model", str(TINY), "--layouts", "tp2", "--output", str(output)]
    assert cli.main(arguments) == 1
    assert "the baseline failed: no memory" in capsys.readouterr().err
    assert not output.exists()
