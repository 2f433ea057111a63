"""Grids of images come out whatever their number, size and names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from extended import some
from PIL import Image

from runner.tracking.plots import Tile, fit, image_grid


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.tracking.plots._DPI", 40)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "picture.png"


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize("count", some([1, 3, 17], 2))
@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3), (40, 10, 3)])
def test_images_of_any_number_and_shape_with_any_name(count: int, shape: tuple[int, ...], target: Path) -> None:
    names = ["a$b_c^", "名前 with a name that is much too long to fit", "\n"]
    image_grid([Tile(np.full(shape, 0.5), names)] * count, target, "title $x")
    grey = (np.abs(pixels(target) - 128) < 3).all(axis=2)
    assert grey.mean() > 0.15, "the images are there"


def test_pixels_outside_their_range_are_cut_off(target: Path) -> None:
    image_grid([Tile(np.full((4, 4, 3), 7.0), ["x"]), Tile(np.full((4, 4), -3.0), ["y"])], target, "t")
    assert (pixels(target) == 0).all(axis=2).mean() > 0.1, "the second image is black"


def test_maps_that_are_not_finite_are_drawn_in_as_many_columns_as_are_asked_for(target: Path) -> None:
    sizes = []
    for columns in (2, 4):
        image_grid([Tile(np.full((4, 4), np.nan), ["x"])] * 8, target, "maps", columns)
        sizes.append(pixels(target).shape)
    assert sizes[0][0] > sizes[1][0]
    assert sizes[0][1] < sizes[1][1]


def test_a_text_is_cut_at_its_end() -> None:
    assert fit("abcdef", 6) == "abcdef"
    assert fit("abcdefg", 6) == "abcde…"
    assert len(fit("a  b\nc", 20)) == 5
