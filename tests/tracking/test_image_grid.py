"""Pictures of images, kernels, maps and counts come out whatever their number, size and names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from extended import some
from PIL import Image

from runner.tracking.image_grid import Histogram, Maps, Tile, filter_grid, histograms, image_grid, map_grid
from runner.tracking.plots import fit


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


@pytest.mark.parametrize("shape", [(1, 3, 3), (64, 3, 3), (5, 7, 2), (64, 7, 7, 3)])
def test_kernels_without_weights_are_drawn_too(shape: tuple[int, ...], target: Path) -> None:
    filter_grid(np.zeros(shape), target, "zeros")
    filter_grid(np.random.default_rng(0).normal(size=shape), target, "random")
    assert pixels(target).std() > 5


def test_the_sign_of_a_weight_is_its_colour(target: Path) -> None:
    filter_grid(np.array([np.full((3, 3), 1.0), np.full((3, 3), -1.0)]), target, "two")
    found = pixels(target)
    red = (found[..., 0] > found[..., 2] + 60).mean()
    blue = (found[..., 2] > found[..., 0] + 60).mean()
    assert min(red, blue) > 0.03


def test_maps_that_are_not_finite_or_all_alike_are_drawn(target: Path) -> None:
    image = np.zeros((8, 8))
    for value in (0.0, np.nan):
        map_grid([Maps(image, "class", np.full((2, 4, 4), value))] * 2, [0, 7], target, "maps")
        assert target.stat().st_size > 1000


@pytest.mark.extended
def test_of_many_histograms_some_are_drawn_and_an_empty_one_says_so(target: Path) -> None:
    few = [Histogram("nothing", [], 0.0, 0.0), Histogram("all", [1, 5, 1000], -1.0, 1.0, "12% dead")]
    for logarithmic in (True, False):
        histograms(few, "value", target, "few", logarithmic)
    with Image.open(target) as image:
        height = image.height
    histograms([few[1]] * 100, "value", target, "many", False)
    with Image.open(target) as image:
        assert height * 3 < image.height < height * 10, "24 of them"


def test_a_text_is_cut_at_either_end() -> None:
    assert fit("abcdef", 6) == "abcdef"
    assert fit("abcdefg", 6) == "abcde…"
    assert fit("abcdefg", 6, keep_end=True) == "…cdefg"
    assert len(fit("a  b\nc", 20)) == 5
