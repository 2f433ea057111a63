"""Loaders in ranges give the same batches, and say what they spend their time on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.loaders import BatchPlan, Fields, Loader, MemoryLoader
from runner.data.samples import SeededDataset
from runner.data.sources.arrays import ImageArrays
from runner.data.transforms.augment import Pipeline, RandomShift
from runner.data.workers import WorkerLoader, loader_in_ranges
from runner.instrument.profiler_ranges import PREPARE, WAIT

CPU = torch.device("cpu")
NAMES = tuple(str(number) for number in range(4))
IMAGES = torch.arange(10 * 3 * 4 * 4, dtype=torch.int64).remainder(251).to(torch.uint8).view(10, 3, 4, 4)


class Diary:
    """Notes in which ranges things happen."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.book: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.open.append(name)
        yield
        self.open.pop()

    def note(self, event: str) -> None:
        self.book.append(f"{event} in {self.open[-1] if self.open else 'nothing'}")


class Noting(Dataset[Any]):
    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.diary.note("read")
        return IMAGES[index], index % 4


def pipeline(diary: Diary) -> Fields:
    class Shift(RandomShift):
        def __call__(self, images: Tensor, rng: Any) -> Tensor:
            diary.note("augment")
            return super().__call__(images, rng)

    return Fields(["0"], Pipeline([Shift(0.25)], [0.5], [0.25], 0, CPU))


def memory(diary: Diary) -> Loader:
    return MemoryLoader(
        IMAGES, torch.arange(10) % 4, BatchPlan(torch.arange(10), 4, 0, True), CPU, prepare=pipeline(diary)
    )


def disk(diary: Diary) -> Loader:
    return WorkerLoader(
        SeededDataset(Noting(diary), 0), BatchPlan(torch.arange(10), 4, 0, True), CPU, prepare=pipeline(diary)
    )


@pytest.mark.parametrize("make", [memory, disk])
def test_the_batches_are_the_same(make: Callable[[Diary], Loader]) -> None:
    diary = Diary()
    plain, loader = make(diary), make(diary)
    with_ranges = loader_in_ranges(loader, diary, 1)
    assert (with_ranges.samples, with_ranges.batch_size) == (plain.samples, plain.batch_size)
    for start in (0, 1):
        pairs = zip(plain.batches(2, start, 3), with_ranges.batches(2, start, 3), strict=True)
        assert (
            sum(
                all(torch.equal(x, y) for x, y in zip((*a.data, a.indices), (*b.data, b.indices), strict=True))
                for a, b in pairs
            )
            == 3 - start
        )
    with_ranges.close()


def test_reading_is_waiting_and_everything_else_is_preparing() -> None:
    diary = Diary()
    for batch in loader_in_ranges(disk(diary), diary, 9).batches(0, 0, 3):
        diary.note(f"step of {len(batch.images)}")
    one, last = [f"read in {WAIT}"] * 4, [f"read in {WAIT}"] * 2
    augment = f"augment in {PREPARE}"
    assert diary.book == [
        *one, augment, "step of 4 in nothing", *one, augment, "step of 4 in nothing", *last, augment, "step of 2 in nothing",
    ]  # fmt: skip


def test_images_in_memory_are_prepared_and_never_waited_for() -> None:
    diary = Diary()
    for _ in loader_in_ranges(memory(diary), diary, 9).batches(0, 0, 3):
        diary.note("step")
    assert set(diary.book) == {f"augment in {PREPARE}", "step in nothing"}


@pytest.mark.parametrize(("at_once", "times"), [(1, 4), (2, 2), (3, 2), (9, 1)])
def test_batches_are_gathered_at_most_so_many_at_a_time(at_once: int, times: int) -> None:
    diary = Diary()
    images = IMAGES[:8].repeat(2, 1, 1, 1)
    loader = MemoryLoader(
        images, torch.arange(16) % 4, BatchPlan(torch.arange(16), 4, 0, True), CPU, prepare=pipeline(diary)
    )
    assert len(list(loader_in_ranges(loader, diary, at_once).batches(0, 0, 4))) == 4
    assert len(diary.book) == times
    assert loader._chunk > 9, "the loader of the run itself stays as it is"


def test_the_loader_itself_stays_as_it_is() -> None:
    diary = Diary()
    loader = disk(diary)
    loader_in_ranges(loader, diary, 9)
    list(loader.batches(0, 0, 1))
    assert set(diary.book) == {"read in nothing", "augment in nothing"}


def test_how_samples_are_read_is_known() -> None:
    diary = Diary()
    assert (memory(diary).workers, memory(diary).resident) == (None, CPU)
    assert (disk(diary).workers, disk(diary).resident) == (0, None)


def test_closing_a_marked_loader_ends_the_workers_of_the_loader_itself() -> None:
    arrays, diary = ImageArrays(IMAGES, torch.arange(10) % 4, NAMES), Diary()
    loader = WorkerLoader(SeededDataset(arrays, 0), BatchPlan(torch.arange(10), 4, 0, True), CPU, workers=1)
    with_ranges = loader_in_ranges(loader, diary, 9)
    list(with_ranges.batches(0, 0, 3))
    (worker,) = loader._iterator._workers
    with_ranges.close()
    assert not worker.is_alive()
    assert loader._iterator is None
