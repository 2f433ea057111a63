"""Where images live and who reads them: every choice has its reason, and settings that change nothing are said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from read_splits import data_config
from small_loaders import ARRAYS, CPU, Listed
from torch.utils.data import Dataset, Subset, TensorDataset

from runner.base.errors import UserError
from runner.config.schema.sections import Data
from runner.data import placement
from runner.data.loaders import BatchPlan, MemoryLoader
from runner.data.module import DataModule
from runner.data.placement import WorkerChoice, choose_num_workers, holds_tensors, place
from runner.data.samples import SeededDataset
from runner.data.sources.arrays import CachedImages
from runner.data.workers import WorkerLoader

CUDA = torch.device("cuda", 0)


READ = Listed(ARRAYS)  # the same images, read one by one


def plan(dataset: Dataset[Any] = ARRAYS, device: torch.device = CPU, **keys: Any) -> DataModule:
    data = Data(dataset={"_target_": "some.where"}, **{"batch_size": 40, **keys})
    parts = {"train": (dataset, torch.arange(60)), "val": (dataset, torch.arange(10))}
    made = DataModule(data_config(data, batch_size=16), device, parts, torch.float32)
    place(made, ARRAYS.images[0].nbytes)
    return made


OF_CUDA = "data.pin_memory=true has no effect: it is for copies to a CUDA device"


@pytest.mark.parametrize(
    ("dataset", "keys", "said"),
    [
        (ARRAYS, {}, []),
        (ARRAYS, {"placement": "device"}, ["data.placement=device has no effect: the device is the CPU"]),
        (ARRAYS, {"num_workers": 2}, ["data.num_workers=2 has no effect: the images are in memory"]),
        (ARRAYS, {"prefetch": 4}, ["data.prefetch=4 has no effect: the images are in memory"]),
        (ARRAYS, {"persistent_workers": False}, ["data.persistent_workers=false has no effect: the images are in"]),
        (ARRAYS, {"pin_memory": True}, [OF_CUDA]),
        (ARRAYS, {"timeout_s": 5.0}, ["data.timeout_s=5.0 has no effect: the images are in memory"]),
        (ARRAYS, {"timeout_s": None}, ["data.timeout_s=null has no effect: the images are in memory"]),
        (ARRAYS, {"pin_memory": False}, []),
        (ARRAYS, {"non_blocking": False}, ["data.non_blocking=false has no effect: nothing is copied to another"]),
        (ARRAYS, {"cache": "disk"}, ["data.cache=disk has no effect: the images are in memory"]),
        (ARRAYS, {"cache_dir": "there"}, ["data.cache_dir has no effect: data.cache is null"]),
        (ARRAYS, {"prefetch": 4, "non_blocking": False}, ["data.prefetch=4 has no", "data.non_blocking=false has no"]),
        (READ, {"num_workers": 0}, []),
        (READ, {"num_workers": 1, "prefetch": 4, "persistent_workers": False}, []),
        (READ, {"num_workers": 0, "prefetch": 4}, ["data.prefetch=4 has no effect: no worker process reads"]),
        (READ, {"num_workers": 0, "persistent_workers": False}, ["data.persistent_workers=false has no effect: no"]),
        (READ, {"num_workers": 0, "pin_memory": True}, [OF_CUDA]),
        (READ, {"num_workers": 4096}, ["data.num_workers=4096 is more than the"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_without_effect_are_said_and_no_others(dataset: Any, keys: dict[str, Any], said: list[str]) -> None:
    warnings = [warning for warning in plan(dataset, **keys).warnings if "/dev/shm" not in warning]
    assert len(warnings) == len(said)
    for warning, words in zip(warnings, said, strict=True):
        assert warning.startswith(words)


@pytest.mark.parametrize(
    ("device", "pin_memory", "pins"),
    [(CUDA, "auto", True), (CUDA, True, True), (CUDA, False, False), (CPU, True, False)],
)
def test_memory_is_pinned_for_cuda_alone_and_not_against_the_users_will(
    device: torch.device, pin_memory: Any, pins: bool
) -> None:
    settings, batches = Data(dataset={}, pin_memory=pin_memory), BatchPlan(torch.arange(60), 8)
    assert WorkerLoader(SeededDataset(READ, 0), batches, device, settings)._pin == pins
    assert plan(READ, CUDA, non_blocking=False, num_workers=0).warnings == []


@pytest.mark.parametrize(
    ("free", "placement", "where", "reason"),
    [
        (10**9, "auto", CUDA, "6.3 KiB of images fit"),
        (1000, "auto", CPU, "6.3 KiB of images are over 30% of the device's free memory"),
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


@pytest.mark.parametrize(
    ("dataset", "placement", "words"),
    [
        (ARRAYS, "device", r"'device' needs 0.0 GiB, and 0.0 GiB on cuda:0 are free\n.*allowed: auto or ram"),
        (READ, "device", r"'device' needs .* in memory\n.*or data.cache=disk"),
        (READ, "ram", r"'ram' needs .* in memory\n.*or data.cache=disk"),
    ],
)
def test_images_that_there_is_no_room_for_or_that_are_read_one_by_one_cannot_live_in_memory(
    dataset: Any, placement: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 10**9))
    with pytest.raises(UserError, match=f"data.placement: {words}"):
        plan(dataset, CUDA, placement=placement)


AS_SET = ("data path", "workers", "as set")


@pytest.mark.parametrize(
    ("dataset", "keys", "choices"),
    [
        (ARRAYS, {}, [("data path", "in RAM", "6.3 KiB of images, and the CPU computes")]),
        (ARRAYS, {"placement": "ram"}, [("data path", "in RAM", "as set")]),
        (ARRAYS, {"placement": "device"}, [("data path", "in RAM", "as set")]),
        (ARRAYS, {"placement": "disk", "num_workers": 1}, [AS_SET]),
        (ARRAYS, {"placement": "disk"}, [AS_SET, ("workers", "0", "auto: the samples are in memory")]),
        (READ, {"num_workers": 1}, [("data path", "workers", "images are read one by one")]),
        (READ, {"placement": "disk"}, [AS_SET, ("workers", "0", "auto: fewer than 64 samples")]),
    ],
)
def test_every_choice_is_shown_with_its_reason(dataset: Any, keys: dict[str, Any], choices: list[Any]) -> None:
    assert plan(dataset, **keys).choices == choices


def test_a_cache_is_read_from_its_file_or_copied_into_memory_that_is_large_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"cache": "disk", "cache_dir": str(tmp_path), "num_workers": 0}
    for wanted, copied in (("auto", False), ("ram", True)):
        found = plan(READ, placement=wanted, **keys)
        train, val = (found.split(name, False).loader for name in ("train", "val"))
        source = found.sources["train"]
        assert isinstance(source, CachedImages)
        assert isinstance(train, MemoryLoader)
        assert isinstance(val, MemoryLoader)
        images, targets = train._images, train._targets
        assert (images is not source.images) == copied
        assert val._images is images
        assert torch.equal(images.index_select(0, torch.arange(len(READ))), ARRAYS.images)
        assert torch.equal(targets, ARRAYS.targets)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    assert plan(READ, **keys).in_memory == CPU
    with pytest.raises(UserError, match=r"data.placement: 'ram' needs 0.0 GiB, and 0.0 GiB are available"):
        plan(READ, placement="ram", **keys)


# The number of workers


def chosen(
    wanted: Any = "auto", batch: int = 32, sample_bytes: int = 64, samples: int = 64, **named: Any
) -> WorkerChoice:
    return choose_num_workers(wanted, samples, bytes_ahead=2 * batch * sample_bytes, **named)


def set_limits(monkeypatch: pytest.MonkeyPatch, cores: int, free: int = 2**40) -> None:
    monkeypatch.setattr(placement, "cores", lambda: cores)
    monkeypatch.setattr(placement, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=free)))


def test_there_are_as_many_as_cores_at_most_eight_and_none_for_arrays_and_few_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, cores=3)
    assert chosen() == WorkerChoice(3, "auto: 3 cores")
    assert chosen(arrays=True) == WorkerChoice(0, "auto: the samples are in memory")
    assert chosen(samples=63) == WorkerChoice(0, "auto: fewer than 64 samples")
    assert chosen(2, arrays=True) == chosen(2, samples=1) == WorkerChoice(2)
    set_limits(monkeypatch, cores=64)
    assert chosen() == WorkerChoice(8, "auto: at most 8")


def test_tensors_of_the_user_need_no_workers() -> None:
    tensors = TensorDataset(ARRAYS.images, ARRAYS.targets)
    assert holds_tensors(Subset(tensors, range(9)))
    assert not holds_tensors(READ)
    assert plan(tensors).choices[1] == ("workers", "0", "auto: the samples are in memory")


def test_more_workers_than_cores_or_shared_memory_are_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, cores=2, free=64 * 2**20)
    many = chosen(4, batch=100, sample_bytes=2**20)
    assert many.workers == 4
    assert many.warnings[0] == "data.num_workers=4 is more than the 2 available CPU cores"
    assert many.warnings[1].startswith("data.num_workers=4 is more than the 0 whose batches /dev/shm has room for")
    assert chosen(batch=100, sample_bytes=2**20) == WorkerChoice(0, "auto: as many as /dev/shm has room for")
    assert chosen(batch=20, sample_bytes=2**20) == WorkerChoice(1, "auto: as many as /dev/shm has room for")
    assert chosen(2, batch=10, sample_bytes=2**20).warnings == []


@pytest.mark.parametrize(
    ("cache", "samples"), [(None, 40 + 16), ("disk", 64)], ids=["training and an evaluation", "making a cache"]
)
def test_shared_memory_has_to_hold_the_batches_of_all_loaders_that_have_some_at_once(
    cache: Any, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 2 * 2 * samples * ARRAYS.images[0].nbytes  # workers, batches of each
    keys = {"num_workers": 2, "placement": "disk", "cache": cache, "cache_dir": str(tmp_path) if cache else None}
    for room, said in ((ahead, []), (ahead - 1, ["data.num_workers=2 is more than"])):
        set_limits(monkeypatch, cores=2, free=room)
        warnings = plan(READ, **keys).warnings
        assert [warning[:31] for warning in warnings if "shm" in warning] == said
