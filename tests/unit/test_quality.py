# SPDX-License-Identifier: Apache-2.0
"""Metrics against numbers worked out by hand, thresholds at their edges, and the picture of the
difference."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from omni_ep.errors import ConfigurationError
from omni_ep.quality import LOSSY, PARITY, Quality, compare, sentence, side_by_side

FAIR = Quality(identical=False, psnr_db=40.0, ssim=0.98, mean_abs=0.001, p99_abs=0.01, max_abs=0.1)


def flat(value: int, height: int = 16, width: int = 24) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def noise(seed: int = 0, height: int = 32, width: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_identical_pictures() -> None:
    quality = compare(noise(), Image.fromarray(noise()))
    assert quality == Quality(
        identical=True, psnr_db=math.inf, ssim=1.0, mean_abs=0.0, p99_abs=0.0, max_abs=0.0
    )
    assert sentence(quality) == "identical to the single-device picture"


def test_uniform_difference_of_one_level() -> None:
    """MSE is (1/255)^2, so PSNR is 20 log10(255) = 48.13 dB."""
    quality = compare(flat(100), flat(101))
    assert not quality.identical
    assert quality.psnr_db == pytest.approx(48.1308, abs=1e-4)
    assert quality.mean_abs == pytest.approx(1 / 255)
    assert quality.p99_abs == pytest.approx(1 / 255)
    assert quality.max_abs == pytest.approx(1 / 255)
    # Flat pictures have no variance: SSIM is (2ab + c1) / (a^2 + b^2 + c1) with c1 = 0.01^2.
    a, b = 100 / 255, 101 / 255
    assert quality.ssim == pytest.approx((2 * a * b + 1e-4) / (a * a + b * b + 1e-4), abs=1e-9)


def test_a_single_wrong_value() -> None:
    """One of 10 x 10 x 3 values is off by 51/255 = 0.2: MSE 0.04/300, mean 0.2/300."""
    image = flat(0, 10, 10)
    image[3, 4, 1] = 51
    quality = compare(flat(0, 10, 10), image)
    assert quality.psnr_db == pytest.approx(10 * math.log10(300 / 0.04))
    assert quality.mean_abs == pytest.approx(0.2 / 300)
    assert quality.p99_abs == 0.0
    assert quality.max_abs == pytest.approx(0.2)


def test_p99_is_a_percentile() -> None:
    """2 % of the values are off, so the 99th percentile sees them and a single one would not."""
    image = flat(0, 10, 10)
    image.reshape(-1)[:6] = 255
    assert compare(flat(0, 10, 10), image).p99_abs == 1.0


def test_black_against_white() -> None:
    quality = compare(flat(0), flat(255))
    assert (quality.psnr_db, quality.mean_abs, quality.max_abs) == (0.0, 1.0, 1.0)


def test_ssim_sees_structure_that_psnr_does_not() -> None:
    reference = noise()
    brighter = np.clip(reference.astype(int) + 8, 0, 255).astype(np.uint8)
    assert compare(reference, brighter).ssim > 0.98 > compare(reference, noise(1)).ssim


@pytest.mark.parametrize("side", [1, 2, 3, 4, 6, 7])
def test_pictures_smaller_than_the_ssim_window(side: int) -> None:
    quality = compare(flat(100, side, 9), flat(101, side, 9))
    assert 0.99 < quality.ssim < 1.0


def test_json_has_exactly_the_report_keys() -> None:
    content = json.loads(json.dumps(compare(noise(), noise()).to_dict(), allow_nan=False))
    assert content == {
        "identical": True,
        "psnr_db": None,
        "ssim": 1.0,
        "mean_abs": 0.0,
        "p99_abs": 0.0,
        "max_abs": 0.0,
    }
    assert compare(flat(0), flat(255)).to_dict()["psnr_db"] == 0.0


def test_colour_modes_are_brought_to_rgb() -> None:
    grey = Image.new("L", (8, 8), 7)
    assert compare(grey, flat(7, 8, 8)).identical
    assert compare(Image.new("RGBA", (8, 8), (7, 7, 7, 0)), flat(7, 8, 8)).identical


def test_different_sizes_are_refused_naming_both() -> None:
    for function in (compare, side_by_side):
        with pytest.raises(ConfigurationError, match="reference is 16x24 and the image 24x16"):
            function(flat(0, 16, 24), flat(0, 24, 16))


@pytest.mark.parametrize(
    "wrong", [np.zeros((8, 8, 3)), np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8)]
)
def test_wrong_arrays_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"must be uint8 \[height, width, 3\]"):
        compare(wrong, wrong)


def test_thresholds_at_their_edges() -> None:
    assert PARITY.verdict(replace(FAIR, psnr_db=60.0, ssim=0.5)) == []
    assert PARITY.verdict(replace(FAIR, psnr_db=59.9)) == ["PSNR 59.9 dB is below the 60 dB of parity."]
    assert PARITY.verdict(compare(flat(3), flat(3))) == []
    assert LOSSY.verdict(replace(FAIR, psnr_db=35.0, ssim=0.97)) == []
    assert LOSSY.verdict(replace(FAIR, psnr_db=34.9, ssim=0.9699)) == [
        "PSNR 34.9 dB is below the 35 dB of lossy.",
        "SSIM 0.9699 is below the 0.97 of lossy.",
    ]


def test_nan_never_passes() -> None:
    assert len(LOSSY.verdict(replace(FAIR, psnr_db=math.nan, ssim=math.nan))) == 2


def test_sentence() -> None:
    assert sentence(FAIR) == (
        "PSNR 40.0 dB, SSIM 0.9800, difference mean 0.00100, p99 0.01000, maximum 0.10000 (on a 0..1 scale)"
    )


def panels(sheet: Image.Image) -> list[np.ndarray]:
    """The three panels without their labels: the pixels below the first 30 rows, in thirds."""
    pixels = np.asarray(sheet)[30:]
    return np.array_split(pixels, 3, axis=1)


def test_the_largest_difference_becomes_white() -> None:
    image = flat(100, 64, 64)
    image[0, 0] = (103, 100, 100)
    image[0, 1] = (101, 100, 100)
    sheet = side_by_side(flat(100, 64, 64), image)
    values = [{tuple(map(int, pixel)) for pixel in panel.reshape(-1, 3)} for panel in panels(sheet)]
    assert {(255, 255, 255), (85, 85, 85), (0, 0, 0)} <= values[2]
    assert (100, 100, 100) in values[0]
    assert {(103, 100, 100), (101, 100, 100)} <= values[1]
    assert (255, 255, 255) not in values[0] | values[1]


def test_a_given_factor_is_used_and_clipped() -> None:
    image = flat(100, 64, 64)
    image[0, 0] = 103
    third = panels(side_by_side(flat(100, 64, 64), image, amplify=10))[2]
    assert {0, 30} <= set(np.unique(third)) <= {0, 30, 40}
    third = panels(side_by_side(flat(100, 64, 64), image, amplify=1000))[2]
    assert third.max() == 255


def test_small_pictures_are_enlarged_without_blur() -> None:
    reference = flat(0, 8, 8)
    reference[0, 0] = 200
    sheet = side_by_side(reference, flat(0, 8, 8))
    first = panels(sheet)[0]
    assert int((first == 200).all(axis=-1).sum()) == 32 * 32
    assert sheet.width > 3 * 256
    large = side_by_side(flat(0, 300, 400), flat(0, 300, 400))
    assert 1200 < large.width < 1300


def test_no_difference_is_black() -> None:
    assert set(np.unique(panels(side_by_side(flat(9, 64, 64), flat(9, 64, 64)))[2])) == {0, 40}
