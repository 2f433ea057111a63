"""Settings of the data path that change nothing are said, and those that contradict each other refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from read_splits import data_config
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.config.schema.sections import Data
from runner.data.placement import DataPlacement, plan_placement
from runner.data.sources.arrays import CachedImages
from runner.data.sources.synthetic import synthetic
from runner.data.workers import worker_options

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ARRAYS = synthetic(samples=24, image_size=6)["train"]


class Read(Dataset[Any]):
    """Images that are read one by one."""

    def __len__(self) -> int:
        return len(ARRAYS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return ARRAYS[index]


def plan(dataset: Dataset[Any] = ARRAYS, device: torch.device = CPU, **keys: Any) -> DataPlacement:
    data = Data(dataset={"_target_": "some.where"}, **keys)
    parts = {"train": (dataset, torch.arange(24)), "val": (dataset, torch.arange(4))}
    return plan_placement(data_config(data, batch_size=16), parts, ([], []), device, ARRAYS.images[0])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, []),
        ({"placement": "device"}, ["data.placement=device has no effect: the device is the CPU"]),
        ({"num_workers": 2}, ["data.num_workers=2 has no effect: the images are in memory"]),
        ({"prefetch": 4}, ["data.prefetch=4 has no effect: the images are in memory"]),
        ({"persistent_workers": False}, ["data.persistent_workers=false has no effect: the images are in memory"]),
        ({"pin_memory": True}, ["data.pin_memory=true has no effect: it is for copies to a CUDA device"]),
        ({"timeout_s": 5.0}, ["data.timeout_s=5.0 has no effect: the images are in memory"]),
        ({"timeout_s": None}, ["data.timeout_s=null has no effect: the images are in memory"]),
        ({"pin_memory": False}, []),
        ({"non_blocking": False}, ["data.non_blocking=false has no effect: nothing is copied to another device"]),
        ({"cache": "disk"}, ["data.cache=disk has no effect: the images are in memory"]),
        ({"cache_dir": "there"}, ["data.cache_dir has no effect: data.cache is null"]),
        ({"prefetch": 4, "non_blocking": False}, ["data.prefetch=4 has no", "data.non_blocking=false has no"]),
    ],
    ids=str,
)
def test_settings_without_effect_on_data_in_memory(keys: dict[str, Any], said: list[str]) -> None:
    warnings = plan(**keys).warnings
    assert len(warnings) == len(said)
    for warning, words in zip(warnings, said, strict=True):
        assert warning.startswith(words)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_workers": 0}, []),
        ({"num_workers": 1, "prefetch": 4, "persistent_workers": False}, []),
        ({"num_workers": 0, "prefetch": 4}, ["data.prefetch=4 has no effect: no worker process reads"]),
        ({"num_workers": 0, "persistent_workers": False}, ["data.persistent_workers=false has no effect: no worker"]),
        (
            {"num_workers": 0, "pin_memory": True},
            ["data.pin_memory=true has no effect: it is for copies to a CUDA device"],
        ),
    ],
    ids=str,
)
def test_settings_without_effect_on_images_read_one_by_one(keys: dict[str, Any], said: list[str]) -> None:
    warnings = plan(Read(), **keys).warnings
    assert len(warnings) == len(said)
    for warning, words in zip(warnings, said, strict=True):
        assert warning.startswith(words)


def test_memory_is_pinned_for_cuda_alone_and_not_against_the_users_will() -> None:
    reading = {"num_workers": 0}

    def pins(device: torch.device, **keys: Any) -> bool:
        options = worker_options(Data(dataset={"_target_": "some.where"}, **reading, **keys), device)
        return bool(options["pin"])

    assert pins(CUDA)
    assert pins(CUDA, pin_memory=True)
    assert not pins(CUDA, pin_memory=False)
    assert not pins(CPU, pin_memory=True)
    assert plan(Read(), CUDA, non_blocking=False, **reading).warnings == []


@pytest.mark.parametrize(
    ("free", "placement", "where", "reason"),
    [
        (10**9, "auto", CUDA, "0.0 MiB of images fit"),
        (1000, "auto", CPU, "0.0 MiB of images are over 30% of the device's free memory"),
        (10**9, "device", CUDA, "as set"),
        (10**9, "ram", CPU, "as set"),
    ],
)
def test_images_live_on_a_gpu_that_has_room(
    free: int, placement: str, where: torch.device, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    found = plan(device=CUDA, placement=placement)
    assert found.in_memory == where
    assert found.choices == [("data path", "on cuda:0" if where == CUDA else "in RAM", reason)]
    assert found.warnings == []
    said = plan(device=CUDA, placement=placement, pin_memory=True, non_blocking=False).warnings
    assert [warning.split()[0] for warning in said] == ["data.pin_memory=true", "data.non_blocking=false"]


def test_images_that_a_gpu_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 10**9))
    with pytest.raises(
        UserError, match=r"'device' needs 0.0 GiB, and 0.0 GiB on cuda:0 are free\n.*allowed: auto or ram"
    ):
        plan(device=CUDA, placement="device")


@pytest.mark.parametrize("placement", ["device", "ram"])
def test_images_read_one_by_one_cannot_live_in_memory_without_a_cache(placement: str) -> None:
    with pytest.raises(UserError, match=r"needs a data set of image tensors in memory\n.*or data.cache=disk"):
        plan(Read(), placement=placement)


def test_a_cache_is_read_from_its_file_or_copied_into_memory_that_is_large_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"cache": "disk", "cache_dir": str(tmp_path), "num_workers": 0}
    dataset = Read()
    for placement, copied in (("auto", False), ("ram", True)):
        found = plan(dataset, placement=placement, **keys)
        images, targets = found.stored(dataset)
        source = found.source(dataset)
        assert isinstance(source, CachedImages)
        assert (images is not source.images) == copied
        assert found.stored(dataset)[0] is images
        assert torch.equal(images.index_select(0, torch.arange(len(dataset))), ARRAYS.images)
        assert torch.equal(targets, ARRAYS.targets)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    assert plan(dataset, **keys).in_memory == CPU
    with pytest.raises(UserError, match=r"data.placement: 'ram' needs 0.0 GiB, and 0.0 GiB are available"):
        plan(dataset, placement="ram", **keys)
