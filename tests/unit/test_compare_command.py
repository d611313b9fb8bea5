# SPDX-License-Identifier: Apache-2.0
"""`omni-ep compare` as a user meets it: figures, thresholds, folders, errors, pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_ep import cli
from omni_ep.quality import LOSSY, PARITY, difference_map, histogram

RNG = np.random.default_rng(7)
PIXELS = RNG.integers(20, 220, (48, 64, 3)).astype(np.uint8)


def save(file: Path, pixels: np.ndarray) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
    return file


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return save(tmp_path / "reference.png", PIXELS)


@pytest.fixture
def close(tmp_path: Path) -> Path:
    """Every value off by 2 levels: PSNR 20 log10(255 / 2) = 42.1 dB."""
    return save(tmp_path / "close.png", PIXELS + np.uint8(2))


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return save(tmp_path / "far.png", 255 - PIXELS)


def compare(*arguments: object) -> int:
    return cli.main(["compare", *map(str, arguments)])


def test_figures(reference: Path, close: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(reference, close, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["passed"], told["thresholds"]) == (None, None)
    [result] = told["comparisons"]
    assert result["psnr_db"] == pytest.approx(20 * np.log10(255 / 2))
    assert result["mean_abs"] == pytest.approx(2 / 255)
    assert result["p99_abs"] == pytest.approx(2 / 255)
    assert result["max_abs"] == pytest.approx(2 / 255)
    assert 0.99 < result["ssim"] < 1
    assert result["identical"] is False
    counts = {(entry["first"], entry["last"]): entry["values"] for entry in result["histogram"]}
    assert counts.pop((2, 2)) == PIXELS.size
    assert set(counts.values()) == {0}


def test_histogram_against_plain_counting() -> None:
    other = RNG.integers(0, 256, PIXELS.shape).astype(np.uint8)
    levels = np.abs(PIXELS.astype(int) - other.astype(int)).ravel().tolist()
    bins = histogram(PIXELS, other)
    assert [(entry.first, entry.last) for entry in bins][-3:] == [(33, 64), (65, 128), (129, 255)]
    for entry in bins:
        assert entry.values == sum(entry.first <= level <= entry.last for level in levels)
    assert sum(entry.values for entry in bins) == PIXELS.size
    assert sum(entry.share for entry in bins) == pytest.approx(1)


@pytest.mark.parametrize(
    ("flags", "image", "code"),
    [
        ([], "far", 0),
        (["--preset", "lossy"], "close", 0),
        (["--preset", "parity"], "close", 1),
        (["--preset", "parity"], "reference", 0),
        (["--preset", "lossy"], "far", 1),
        (["--min-psnr", "42"], "close", 0),
        (["--min-psnr", "43"], "close", 1),
        (["--min-ssim", "0.99"], "close", 0),
        (["--min-ssim", "1"], "close", 1),
        (["--preset", "parity", "--min-psnr", "40"], "close", 0),
        (["--preset", "lossy", "--min-ssim", "1"], "close", 1),
    ],
)
def test_thresholds_set_the_exit_code(
    flags: list[str], image: str, code: int, request: pytest.FixtureRequest, reference: Path
) -> None:
    assert compare(reference, request.getfixturevalue(image), *flags) == code


def test_presets_are_those_of_the_library(
    reference: Path, close: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for preset in (PARITY, LOSSY):
        compare(reference, close, "--preset", preset.name, "--json")
        told = json.loads(capsys.readouterr().out)["thresholds"]
        assert (told["min_psnr_db"], told["min_ssim"]) == (preset.min_psnr_db, preset.min_ssim)


def test_ssim_alone_asks_for_no_psnr(
    reference: Path, close: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(reference, close, "--min-ssim", "0.9", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["thresholds"]["min_psnr_db"] is None
    assert told["passed"] is True


def test_text_has_units_and_the_verdict(
    reference: Path, close: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(reference, close, "--preset", "parity")
    text = capsys.readouterr().out
    assert "PSNR 42.11 dB" in text
    assert "difference in levels of 255: mean 2.000, 99th percentile 2.0, maximum 2" in text
    assert f"2 levels  100.000 %       {PIXELS.size:,} values" in text
    assert "fails: PSNR 42.1 dB is below the 60 dB of parity." in text
    compare(reference, reference)
    assert "PSNR infinite, SSIM 1.00000, identical" in capsys.readouterr().out


def test_sizes_that_differ_are_an_error_with_both(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save(tmp_path / "other.png", PIXELS[:32])
    assert compare(reference, other) == 2
    error = capsys.readouterr().err
    assert "the reference is 48x64 and the image 32x64" in error
    assert str(other) in error


def test_folders_are_matched_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, change in (("a.png", 0), ("b.png", 2)):
        save(tmp_path / "one" / name, PIXELS)
        save(tmp_path / "two" / name, PIXELS + np.uint8(change))
    (tmp_path / "one" / "notes.txt").write_text("not a picture")
    save(tmp_path / "two" / "extra.png", PIXELS)
    assert compare(tmp_path / "one", tmp_path / "two", "--preset", "parity", "--json") == 1
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert {each["name"]: each["passed"] for each in told["comparisons"]} == {"a.png": True, "b.png": False}
    assert "pictures without a reference: extra.png" in printed.err

    (tmp_path / "two" / "b.png").unlink()
    assert compare(tmp_path / "one", tmp_path / "two") == 2
    assert "lacks 1 of the 2 pictures" in capsys.readouterr().err


def test_several_pictures_pass_together_or_not_at_all(
    reference: Path, close: Path, far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(reference, reference, close, "--preset", "lossy") == 0
    assert "2 of 2 pictures pass" in capsys.readouterr().out
    assert compare(reference, close, far, "--preset", "lossy") == 1
    assert "1 of 2 pictures pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{reference}", "missing.png"], "missing.png does not exist"),
        (["{folder}", "{reference}"], "is a folder but"),
        (["{reference}", "{folder}"], "is a file but"),
        (["{folder}", "{folder}"], "holds no picture"),
        (["{reference}", "{text}"], "cannot be read as a picture"),
        (["{reference}", "{reference}", "--min-ssim", "97"], "SSIM never exceeds 1"),
        (["{reference}", "{reference}", "--min-psnr", "nan"], "--min-psnr must be a number"),
        (["{reference}", "{reference}", "--amplify", "0"], "--amplify must be"),
        (["{reference}", "{reference}", "--side-by-side", "x.nothing"], "cannot be written as a picture"),
        (["{reference}", "{reference}", "--side-by-side", "{reference}"], "would write over"),
    ],
)
def test_errors_exit_2(
    arguments: list[str],
    message: str,
    reference: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.png").write_text("not a picture")
    places = {"reference": reference, "folder": tmp_path / "folder", "text": tmp_path / "text.png"}
    assert compare(*(argument.format(**places) for argument in arguments)) == 2
    assert message in capsys.readouterr().err


def test_side_by_side_shows_the_difference(reference: Path, tmp_path: Path) -> None:
    changed = PIXELS.copy()
    changed[10:14, 20:24] += np.uint8(10)
    image = save(tmp_path / "changed.png", changed)
    target = tmp_path / "deep" / "sheet.png"
    assert compare(reference, image, "--side-by-side", target) == 0
    sheet = np.asarray(Image.open(target))
    # 64 pixels wide pictures are shown four times as large, in three columns.
    assert sheet.shape == (48 * 4 + 38, 3 * 256 + 32, 3)
    third = sheet[30 : 30 + 48 * 4 : 4, 2 * 256 + 24 : 3 * 256 + 24 : 4]
    white = (third == 255).all(axis=-1)
    assert white[10:14, 20:24].all()
    assert white.sum() == 16


def test_one_sheet_per_picture_of_a_folder(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        for name in ("a.png", "b.png"):
            save(tmp_path / folder / name, PIXELS)
    assert compare(tmp_path / "one", tmp_path / "two", "--side-by-side", tmp_path / "sheets") == 0
    names = sorted(file.name for file in (tmp_path / "sheets").iterdir())
    assert names == ["a.png.comparison.png", "b.png.comparison.png"]


def test_difference_map_is_the_third_panel_alone() -> None:
    changed = PIXELS.copy()
    changed[0, 0, 1] += np.uint8(5)
    picture, label = difference_map(PIXELS, changed)
    assert picture.size == (64, 48)
    assert label == "difference x 51"
    assert np.argwhere(np.asarray(picture).any(axis=-1)).tolist() == [[0, 0]]
    assert difference_map(PIXELS, PIXELS)[1] == "no difference"
