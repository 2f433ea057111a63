"""Files without targets come as the model takes them, in order, and those that cannot be read as blanks that are reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runner.base.errors import UserError
from runner.config.schema.sections import Data
from runner.data.bad_samples import BadSample
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_files import files_loader
from runner.data.sources.image_io import Decoding
from runner.data.transforms.augment import Pipeline
from runner.data.transforms.crops import RandomResizedCrop

CPU = torch.device("cpu")
FOLDER = {"_target_": "runner.data.sources.folders.image_folder"}


def saved(folder: Path, *sizes: tuple[int, int]) -> list[Path]:
    paths = []
    for number, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def read(
    paths: Sequence[Path], shape: tuple[int, int, int], dataset: dict[str, Any], transforms: Sequence[Any] = ()
) -> tuple[torch.Tensor, dict[int, str]]:
    found: list[BadSample] = []
    data = Data(dataset=dataset, num_workers=0, image_size=dataset.get("image_size"))
    how: Any = {"device": CPU, "batch_size": 2, "on_unreadable": found.extend}
    loader = files_loader(paths, data, transforms, shape, prepare=Pipeline([], [0.0], [1.0], 0, CPU), **how)
    batches = list(loader.batches(0, 0, len(paths)))
    return torch.cat([batch.images for batch in batches]) * 255, dict(found)


def test_a_folders_own_reading_is_that_of_its_files(tmp_path: Path) -> None:
    paths = saved(tmp_path, (30, 20), (9, 40), (8, 8))
    settings = FOLDER | {"image_size": 8, "crop_share": 0.6, "channels": 1}
    images, _ = read(paths, (1, 8, 8), settings)
    own = ImageFolder(paths, [0] * 3, (), Decoding(8, 1, 0.6))
    torch.testing.assert_close(images, torch.stack([own[index][0] for index in range(3)]).float())


def test_a_blank_replaces_what_cannot_be_read_and_the_file_is_reported(tmp_path: Path) -> None:
    paths = saved(tmp_path, (8, 8), (8, 8), (8, 8))
    paths[1].write_bytes(b"not an image")
    images, unreadable = read(paths, (3, 8, 8), {"_target_": "my.own"})
    assert list(unreadable) == [1]
    assert str(paths[1]) in unreadable[1]
    assert images[1].count_nonzero() == 0
    assert images[0].count_nonzero() > 0 < images[2].count_nonzero()


def test_sample_transforms_get_the_whole_image_and_have_to_give_what_the_model_takes(tmp_path: Path) -> None:
    paths = saved(tmp_path, (12, 10), (30, 30))
    images, unreadable = read(paths, (3, 6, 8), {"_target_": "my.own"}, [lambda image: image[:, :6, :8]])
    assert not unreadable
    assert images.shape == (2, 3, 6, 8)
    with pytest.raises(UserError, match=r"sample_eval: .*1.png comes out .* shape \(3, 30, 30\), and .* \(3, 12, 10\)"):
        read(paths, (3, 12, 10), {"_target_": "my.own"}, [lambda image: image.transpose(1, 2)])


def test_a_transform_that_fails_on_any_image_and_other_channels_are_the_fault_of_the_config(tmp_path: Path) -> None:
    def broken(image: Any) -> Any:
        raise RuntimeError("no such thing")

    with pytest.raises(UserError, match=r"transform\.sample_eval: fails on a blank image .*no such thing"):
        read(saved(tmp_path, (8, 8)), (3, 8, 8), {"_target_": "my.own"}, [broken])
    with pytest.raises(UserError, match="4 channels, and files have 1 or 3"):
        read(saved(tmp_path, (8, 8)), (4, 8, 8), {"_target_": "my.own"})


def test_a_transform_that_cuts_while_reading_is_given_the_file(tmp_path: Path) -> None:
    paths = saved(tmp_path, (64, 48))
    crop = RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(4 / 3, 4 / 3))
    images, unreadable = read(paths, (3, 8, 8), FOLDER | {"image_size": 8}, [crop])
    assert not unreadable
    assert images.shape == (1, 3, 8, 8)


def test_floats_of_a_transform_have_blanks_of_their_type(tmp_path: Path) -> None:
    paths = saved(tmp_path, (8, 8), (8, 8))
    paths[0].write_bytes(b"")
    images, unreadable = read(paths, (3, 8, 8), {"_target_": "my.own"}, [lambda image: image / 255])
    assert list(unreadable) == [0]
    assert images[1].max() > 1
