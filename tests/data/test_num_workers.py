"""The number of workers is chosen by what reading takes, reported with its reason, and changes nothing else."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from read_splits import data_config
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.schema.sections import Data
from runner.data import num_workers
from runner.data.num_workers import WorkerChoice, choose_num_workers
from runner.data.placement import plan_placement
from runner.data.samples import SeededDataset


class Slow(Dataset[Any]):
    """Takes a while for each sample, draws random numbers, and counts its readings."""

    def __init__(self, seconds: float, samples: int = 1000) -> None:
        self.seconds, self.samples, self.read = seconds, samples, 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read += 1
        if self.seconds:
            time.sleep(self.seconds)
        return torch.rand(1, 4, 4) + random.random() + float(np.random.rand()), 0


def chosen(
    dataset: Slow, wanted: Any = "auto", batch: int = 32, prefetch: int = 2, sample_bytes: int = 64
) -> WorkerChoice:
    indices = torch.arange(len(dataset))
    return choose_num_workers(
        wanted,
        SeededDataset(dataset, 0),
        indices,
        batch,
        bytes_ahead=prefetch * batch * sample_bytes,
    )


def test_slow_samples_get_workers_and_quick_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(num_workers, "cores", lambda: 3)
    found = chosen(Slow(0.004))
    assert found == WorkerChoice(3, "auto: 3 cores")
    assert chosen(Slow(0), batch=4).reason.startswith("auto: a sample takes 0.")
    assert chosen(Slow(0), batch=4).workers == 0
    assert chosen(Slow(0.004, samples=5)).workers == 0
    monkeypatch.setattr(num_workers, "cores", lambda: 64)
    assert chosen(Slow(0.004)).workers == 16


@pytest.mark.parametrize(("seconds", "most"), [(0.05, 7), (0.3, 1)])
def test_measuring_is_short_and_draws_nothing(seconds: float, most: int) -> None:
    dataset = Slow(seconds)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index,union-attr]
    chosen(dataset)
    assert dataset.read <= most
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index,union-attr]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_number_that_was_set_is_taken_without_reading() -> None:
    dataset = Slow(1)
    assert chosen(dataset, wanted=1) == WorkerChoice(1)
    assert chosen(dataset, wanted=0) == WorkerChoice(0)
    assert dataset.read == 0


def shared_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(num_workers, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=free)))


def test_more_workers_than_cores_or_shared_memory_are_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_memory(monkeypatch, 64 * 2**20)
    monkeypatch.setattr(num_workers, "cores", lambda: 2)
    many = chosen(Slow(0), wanted=4, batch=100, sample_bytes=2**20)
    assert many.workers == 4
    assert many.warnings[0] == "data.num_workers=4 is more than the 2 available CPU cores"
    assert many.warnings[1].startswith("data.num_workers=4 is more than the 0 whose batches /dev/shm has room for")
    assert chosen(Slow(0.01), batch=100, sample_bytes=2**20) == WorkerChoice(
        0, "auto: as many as /dev/shm has room for"
    )
    assert chosen(Slow(0.01), batch=20, sample_bytes=2**20) == WorkerChoice(1, "auto: as many as /dev/shm has room for")
    assert chosen(Slow(0.01), wanted=2, batch=10, sample_bytes=2**20).warnings == []


@pytest.mark.parametrize(
    ("keys", "samples"), [({}, 40 + 16), ({"cache": "disk"}, 64)], ids=["training and an evaluation", "making a cache"]
)
def test_shared_memory_has_to_hold_the_batches_of_all_loaders_that_have_some_at_once(
    keys: dict[str, Any], samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 2 * 2 * samples * 16  # workers, batches of each, bytes of an image
    data = Data(dataset={"_target_": "some.where"}, batch_size=40, num_workers=2, placement="disk")
    data = dataclasses.replace(data, **keys, cache_dir=str(tmp_path) if keys else None)
    dataset = Listed()
    parts = {"train": (dataset, torch.arange(100)), "val": (dataset, torch.arange(10))}
    for room, said in ((ahead, []), (ahead - 1, ["data.num_workers=2 is more than"])):
        shared_memory(monkeypatch, room)
        monkeypatch.setattr(num_workers, "cores", lambda: 2)
        plan = plan_placement(data_config(data, batch_size=16), parts, ([], []), torch.device("cpu"), dataset[0][0])
        assert [warning[:31] for warning in plan.warnings if "shm" in warning] == said


class Listed(Dataset[Any]):
    """Images of 16 bytes."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1, 4, 4), index, dtype=torch.uint8), 0
