"""The cache of decoded images through the configuration: the same batches with it as without."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from PIL import Image
from plain_data import noise_image
from read_splits import read_splits
from small_loaders import same

from runner.base.errors import UserError
from runner.config.schema.sections import Data, Normalize, Split, Transform
from runner.data.cache import Cache
from runner.data.loaders import MemoryLoader
from runner.data.module import DataModule
from runner.data.workers import WorkerLoader


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(24):
        folder = tmp_path / "photos" / ("train" if number < 18 else "test") / "ab"[number % 2]
        noise_image(folder / f"{number}.jpg", 30, 20 + number, number)
    return tmp_path / "photos"


AUGMENTED = Transform(
    train=[
        {"_target_": "runner.data.transforms.augment.RandomShift"},
        {"_target_": "runner.data.transforms.augment.RandomFlip"},
    ]
)
NOISY = Transform(sample_train=[{"_target_": "runner.data.transforms.crops.RandomResizedCrop", "size": None}])


def put_together(root: Path, transform: Transform | None = None, make_cache: bool = True, **keys: Any) -> DataModule:
    settings: dict[str, Any] = {"image_size": 16, "batch_size": 5, "num_workers": 0, "split": Split(val=0.2)}
    node = {"_target_": "runner.data.sources.folders.image_folder"}
    data = Data(dataset=node, root=str(root), **(settings | keys))
    return read_splits(data, transform, batch_size=4, make_cache=make_cache)


def assert_same_batches(one: DataModule, other: DataModule) -> None:
    assert (one.mean, one.std, one.classes) == (other.mean, other.std, other.classes)
    assert torch.equal(one.class_counts, other.class_counts)  # type: ignore[arg-type]
    for name, epoch in itertools.product(("train", "val", "test", "train_for_eval"), (0, 1)):
        ours, theirs = (list(getattr(each, name).loader.batches(epoch, 0, 4)) for each in (one, other))
        assert same(ours, theirs)


CASES: dict[str, tuple[Transform, dict[str, Any]]] = {
    "usual": (AUGMENTED, {}),
    "in RAM": (AUGMENTED, {"placement": "ram"}),
    "statistics given": (AUGMENTED, {"normalize": Normalize(mean=[0.5], std=[0.2])}),
    "one by one": (AUGMENTED, {"placement": "disk"}),
    "sample transforms": (NOISY, {"num_workers": 2}),
}


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("case", some([*CASES], 0, 3, 4))
def test_batches_and_samples_that_are_skipped_are_the_same_with_it_and_without(
    photos: Path, case: str, damaged: bool
) -> None:
    transform, keys = CASES[case]
    if damaged:
        keys = keys | {"on_error": "skip"}
        for path in sorted(photos.rglob("*.jpg"))[1::6]:
            path.write_bytes(path.read_bytes()[:40])
    reference = put_together(photos, transform, **{key: value for key, value in keys.items() if key != "placement"})
    for _ in range(2):
        splits = put_together(photos, transform, cache="disk", **keys)
        assert_same_batches(reference, splits)
        read = transform is NOISY or keys.get("placement") == "disk"
        assert isinstance(splits.train.loader, WorkerLoader if read else MemoryLoader)
        assert splits.warnings == []
        assert set(splits.bad_samples._found) == set(reference.bad_samples._found)
        assert len(splits.bad_samples) == (4 if damaged else 0)
        splits.close()


def rows(splits: DataModule) -> dict[str, tuple[str, str]]:
    return {label: (value, reason) for label, value, reason in splits.choices}


def test_the_files_are_beside_the_images_or_where_configured(photos: Path, tmp_path: Path) -> None:
    first = rows(put_together(photos, cache="disk"))
    assert first["data path"] == ("cache file", "18.0 KiB of images, and the CPU computes")
    for split in ("train", "test"):
        path, done = first[f"{split} cache"]
        assert Path(path).parent == tmp_path / "photos.cache"
        assert done.startswith("made in")
    assert rows(put_together(photos, cache="disk"))["test cache"][1] == "opened"
    put_together(photos, cache="disk", cache_dir=str(tmp_path / "elsewhere"))
    assert len(list((tmp_path / "elsewhere").glob("*.json"))) == 2
    assert rows(put_together(photos, cache="disk", placement="ram"))["data path"] == ("in RAM", "as set")


def test_what_reads_images_once_uses_a_cache_that_is_there_and_makes_none(photos: Path, tmp_path: Path) -> None:
    def read_once(placement: Any = "auto") -> DataModule:
        return put_together(photos, make_cache=False, cache="disk", placement=placement)

    splits = read_once()
    assert rows(splits) == rows(read_once())
    assert rows(splits)["data path"] == ("workers", "images are read one by one")
    assert splits.warnings == []
    in_ram = read_once("ram")
    assert rows(in_ram) == rows(splits)
    assert in_ram.warnings == ["data.placement=ram has no effect: data.cache was not made"]
    assert not (tmp_path / "photos.cache").exists()
    put_together(photos, cache="disk")
    assert rows(read_once())["train cache"][1] == "opened"


def test_a_changed_file_is_decoded_again(photos: Path) -> None:
    put_together(photos, cache="disk")
    changed = next((photos / "train" / "a").iterdir())
    Image.new("RGB", (30, 30), (200, 10, 10)).save(changed)
    splits = put_together(photos, cache="disk")
    (warning,) = splits.warnings
    assert "was rebuilt: it was made from other files" in warning
    assert rows(splits)["test cache"][1] == "opened"
    assert_same_batches(put_together(photos), splits)


@pytest.mark.parametrize("key", ["sample_train", "sample_eval"])
def test_crops_from_whole_images_and_a_cache_of_their_middles_exclude_each_other(photos: Path, key: str) -> None:
    crops = Transform(**{key: [{"_target_": "runner.data.transforms.crops.RandomResizedCrop", "size": 16}]})
    with pytest.raises(UserError, match=rf"transform.{key}.0 crops from whole images\n.*allowed: data.cache=null"):
        put_together(photos, crops, cache="disk")


def test_a_run_that_is_asked_to_stop_meanwhile_goes_on_from_the_files(
    photos: Path, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Cache._example

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return example(*args)

    monkeypatch.setattr(Cache, "_example", interrupted)
    splits = put_together(photos, cache="disk", placement="ram")
    assert handled == [signal.SIGTERM]
    assert splits.warnings == [
        "data.cache was not made: a signal asks the run to stop",
        "data.placement=ram has no effect: data.cache was not made",
    ]
    assert_same_batches(put_together(photos), splits)
