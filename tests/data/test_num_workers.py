"""The number of workers is chosen by the cores and the shared memory, and reported with its reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from read_splits import data_config
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.schema.sections import Data
from runner.data import num_workers
from runner.data.num_workers import WorkerChoice, choose_num_workers
from runner.data.placement import plan_placement


def chosen(
    wanted: Any = "auto", batch: int = 32, sample_bytes: int = 64, samples: int = 64, **named: Any
) -> WorkerChoice:
    return choose_num_workers(wanted, samples, bytes_ahead=2 * batch * sample_bytes, **named)


def test_there_are_as_many_as_cores_at_most_eight_and_none_for_arrays_and_few_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(num_workers, "cores", lambda: 3)
    assert chosen() == WorkerChoice(3, "auto: 3 cores")
    assert chosen(arrays=True) == WorkerChoice(0, "auto: the images are arrays in memory")
    assert chosen(samples=63) == WorkerChoice(0, "auto: fewer than 64 samples")
    assert chosen(2, arrays=True) == chosen(2, samples=1) == WorkerChoice(2)
    monkeypatch.setattr(num_workers, "cores", lambda: 64)
    assert chosen() == WorkerChoice(8, "auto: at most 8")


def shared_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(num_workers, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=free)))


def test_more_workers_than_cores_or_shared_memory_are_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_memory(monkeypatch, 64 * 2**20)
    monkeypatch.setattr(num_workers, "cores", lambda: 2)
    many = chosen(4, batch=100, sample_bytes=2**20)
    assert many.workers == 4
    assert many.warnings[0] == "data.num_workers=4 is more than the 2 available CPU cores"
    assert many.warnings[1].startswith("data.num_workers=4 is more than the 0 whose batches /dev/shm has room for")
    assert chosen(batch=100, sample_bytes=2**20) == WorkerChoice(0, "auto: as many as /dev/shm has room for")
    assert chosen(batch=20, sample_bytes=2**20) == WorkerChoice(1, "auto: as many as /dev/shm has room for")
    assert chosen(2, batch=10, sample_bytes=2**20).warnings == []


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
