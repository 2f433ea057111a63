"""Random crops lie inside the image, have the area and shape asked for, and are a function of the sample alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_objects import read_coco
from hypothesis import given, settings
from hypothesis import strategies as st
from image_reader import read_image
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from small_loaders import joined, read, same, small_loader

from runner.base.errors import UserError
from runner.data.loaders import Batch
from runner.data.sample_rng import seed_generators
from runner.data.samples import SeededDataset
from runner.data.sources import image_io
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_io import Decoding
from runner.data.transforms.crops import RandomResizedCrop


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    root = tmp_path_factory.mktemp("photos")
    paths = []
    for number in range(8):
        paths.append(root / f"{number}.{'png' if number % 2 else 'jpg'}")
        picture(60 + 8 * number, 90 + number, number).save(paths[-1])
    return ImageFolder(paths, [number % 2 for number in range(8)], ("even", "odd"), Decoding(16))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_a_part_is_never_outside_the_image(height: int, width: int, seed: int) -> None:
    random.seed(seed)
    top, left, rows, columns = RandomResizedCrop(8).region(height, width)
    assert rows >= 1 <= columns
    assert 0 <= top <= height - rows
    assert 0 <= left <= width - columns


def test_area_and_shape_are_spread_over_what_was_asked_for() -> None:
    random.seed(0)
    parts = np.array([RandomResizedCrop(8, (0.2, 0.4), (0.5, 2.0)).region(1000, 1000) for _ in range(2000)])
    areas, ratios = parts[:, 2] * parts[:, 3] / 1e6, parts[:, 3] / parts[:, 2]
    assert 0.195 < areas.min() < 0.21
    assert 0.39 < areas.max() < 0.405
    assert areas.mean() == pytest.approx(0.3, abs=0.01)
    assert 0.495 < ratios.min() < 0.52
    assert 1.9 < ratios.max() < 2.02
    assert np.log(ratios).mean() == pytest.approx(0, abs=0.03)
    assert parts[:, 0].std() > 100 < parts[:, 1].std()


@pytest.mark.parametrize(
    ("height", "width", "expected"), [(10, 1000, (0, 493, 10, 13)), (1000, 10, (493, 0, 13, 10)), (1, 1, (0, 0, 1, 1))]
)
def test_of_an_image_too_narrow_the_middle_is_taken(height: int, width: int, expected: tuple[int, ...]) -> None:
    random.seed(0)
    crop = RandomResizedCrop(8, (0.9, 1.0), (3 / 4, 4 / 3))
    assert crop.region(height, width) == expected


def test_tensors_arrays_and_pictures_come_out_the_same() -> None:
    image = picture(40, 50)
    outputs = []
    for form in (image, np.asarray(image), torch.from_numpy(np.array(image)).permute(2, 0, 1)):
        random.seed(3)
        outputs.append(RandomResizedCrop(16)(form))
    assert outputs[0].shape == (3, 16, 16)
    assert outputs[0].dtype == torch.uint8
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert RandomResizedCrop(None)(image).shape == (3, 40, 40)


@pytest.mark.parametrize("number", [0, 1])
def test_cutting_while_decoding_gives_what_cutting_afterwards_gives(folder: ImageFolder, number: int) -> None:
    crop = RandomResizedCrop(16, (0.05, 0.2))  # too small a part for a JPEG to be decoded at a reduced size
    for draw in range(10):
        seed_generators(0, draw, number)
        part, target = folder.read_part(number, crop.region, 16)
        seed_generators(0, draw, number)
        assert torch.equal(part, crop(read_image(folder.path(number), None)))
        assert target == number % 2


def test_a_large_photograph_is_decoded_at_a_fraction_and_looks_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture(600, 800).save(tmp_path / "large.jpg", quality=95)
    decoded: list[tuple[int, int]] = []
    load = JpegImageFile.load

    def noted(image: JpegImageFile) -> object:
        result = load(image)
        decoded.append(image.size)
        return result

    monkeypatch.setattr(JpegImageFile, "load", noted)
    monkeypatch.setattr(image_io, "_torchcodec", lambda: None)  # it decodes the whole
    whole = read_image(tmp_path / "large.jpg", None)
    regions = {(0, 0, 600, 800): (100, 75), (101, 203, 333, 411): (200, 150), (343, 543, 256, 256): (200, 150)}
    for region, size in {**regions, (10, 20, 70, 70): (800, 600)}.items():
        reduced = read_image(tmp_path / "large.jpg", 64, 3, lambda height, width, region=region: region)
        assert decoded[-1] == size, "the smallest that still has 64 pixels in the part"
        top, left, rows, columns = region
        part = whole[:, top : top + rows, left : left + columns][None].float()
        exact = torch.nn.functional.interpolate(part, (64, 64), mode="bilinear", antialias=True)[0]
        assert (reduced.float() - exact).abs().mean() < 2.5


def test_a_crop_is_refused_where_it_would_leave_the_boxes(drawn: Path) -> None:
    reader = SeededDataset(read_coco(drawn)["train"], 0, [RandomResizedCrop(16)], pairs=False)
    with pytest.raises(UserError, match=r"transform\.sample_train, transform\.sample_eval: cannot take sample 1"):
        reader[0, 1]


def test_crops_are_the_same_for_any_workers_and_any_start_and_others_in_another_epoch(folder: ImageFolder) -> None:
    def crops(workers: int, epoch: int = 0, start: int = 0) -> list[Batch]:
        transforms = [RandomResizedCrop(16)]
        return read(
            small_loader(workers, folder, torch.arange(8), transforms=transforms, batch_size=3), epoch, start, 3
        )

    alone = crops(0)
    assert same(crops(2), alone)
    assert same(crops(1, start=1), alone[1:])
    assert not torch.equal(joined(crops(0, 1)).images, joined(alone).images)
