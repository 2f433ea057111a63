"""On CUDA the next batch is made while this one is used, in the right order of streams; elsewhere nothing changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_loaders import PART, joined, read, small_loader
from torch import Tensor

from runner.data.loaders import Batch, prefetch_to_cuda

CUDA = torch.device("cuda", 0)


class Gpu:
    """What is asked of CUDA's streams, noted in the order in which it happens: there is no GPU where the tests run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.inside = False
        main, side = (SimpleNamespace(wait_stream=self._waits(name)) for name in ("main", "side"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self._on_side())
        self.main = main

    def _waits(self, name: str) -> Any:
        return lambda other: self.log.append(f"{name} waits for {'main' if other is self.main else 'side'}")

    @contextlib.contextmanager
    def _on_side(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False


class Item(Tensor):
    """A tensor of a batch that notes what is asked of it about streams."""

    def __new__(cls, gpu: Gpu, number: int) -> Item:
        return Tensor._make_subclass(cls, torch.zeros(1))

    def __init__(self, gpu: Gpu, number: int) -> None:
        self.gpu, self.number = gpu, number

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        assert stream is self.gpu.main
        self.gpu.log.append(f"keep {self.number}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def making(gpu: Gpu, count: int) -> Iterator[Any]:
    for number in range(count):
        assert gpu.inside, "batches are made on the side stream"
        gpu.log.append(f"make {number}")
        yield (Item(gpu, number),)


def test_a_batch_is_made_one_ahead_and_waited_for_before_it_is_used(gpu: Gpu) -> None:
    for batch in prefetch_to_cuda(making(gpu, 3), CUDA):
        assert not gpu.inside
        gpu.log.append(f"use {batch[0].number}")
    wanted = """side waits for main, make 0,
        main waits for side, keep 0, make 1, use 0,
        main waits for side, keep 1, make 2, use 1,
        main waits for side, keep 2, use 2"""
    assert gpu.log == [line.strip() for line in wanted.replace("\n", " ").split(",")]


def test_without_batches_there_are_none(gpu: Gpu) -> None:
    assert list(prefetch_to_cuda(making(gpu, 0), CUDA)) == []


def test_elsewhere_a_batch_is_made_when_it_is_requested() -> None:
    batches = iter([(torch.zeros(1),), (torch.ones(1),)])
    next(prefetch_to_cuda(batches, torch.device("cpu")))
    assert len(list(batches)) == 1


class Preparing:
    """Notes whether it is called while a batch is made ahead."""

    def __init__(self, per_sample: bool) -> None:
        self.per_sample = per_sample
        self.ahead: list[bool] = []
        self.making = False

    def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        self.ahead.append(self.making)
        return images.float()


@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("workers", [None, 0])
def test_only_what_has_no_random_state_is_prepared_ahead(
    workers: int | None, per_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Preparing(per_sample)

    def marking(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
        while True:
            prepare.making = True
            batch = next(batches, None)
            prepare.making = False
            if batch is None:
                return
            yield batch

    def mix(images: Tensor, targets: Tensor, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        assert not prepare.making
        return images, targets

    monkeypatch.setattr("runner.data.loaders.prefetch_to_cuda", marking)
    loader = small_loader(workers, prepare=prepare, mix=mix)
    loader._prefetches = True  # as if the batches were wanted on another device than that of the images
    assert len(joined(read(loader)).images) == len(PART)
    assert prepare.ahead
    assert all(ahead == per_sample for ahead in prepare.ahead)
