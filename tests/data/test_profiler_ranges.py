"""Loaders in ranges give the same batches, and say what they spend their time on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_loaders import ARRAYS, CPU, Listed, same, small_loader
from torch import Tensor

from runner.data.loaders import Loader
from runner.data.transforms.augment import Pipeline, RandomShift
from runner.data.workers import loader_in_ranges
from runner.instrument.profiler_ranges import PREPARE, WAIT


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


class Noting(Listed):
    def __init__(self, diary: Diary) -> None:
        super().__init__(ARRAYS)
        self.diary = diary

    def __getitem__(self, index: int) -> Any:
        self.diary.note("read")
        return super().__getitem__(index)


def made(workers: int | None, diary: Diary) -> Loader:
    """A loader of two whole batches and one of two samples, which notes where it reads and augments."""

    class Shift(RandomShift):
        def __call__(self, images: Tensor, rng: Any) -> Tensor:
            diary.note("augment")
            return super().__call__(images, rng)

    prepare = Pipeline([Shift(0.25)], [0.5], [0.25], 0, CPU)
    return small_loader(workers, Noting(diary), torch.arange(10), prepare=prepare, batch_size=4)


@pytest.mark.parametrize("workers", [None, 0])
def test_the_batches_are_the_same_and_the_loader_itself_stays_as_it_is(workers: int | None) -> None:
    diary = Diary()
    loader = made(workers, diary)
    with_ranges = loader_in_ranges(loader, diary, 1)
    assert (with_ranges.samples, with_ranges.batch_size) == (loader.samples, loader.batch_size)
    assert loader.workers == (None if workers is None else 0)
    for start in (0, 1):
        diary.book.clear()
        plain = list(loader.batches(2, start, 3))
        assert {event.partition(" in ")[2] for event in diary.book} == {"nothing"}
        assert same(list(with_ranges.batches(2, start, 3)), plain)
    with_ranges.close()


def test_reading_is_waiting_and_everything_else_is_preparing() -> None:
    diary = Diary()
    for batch in loader_in_ranges(made(0, diary), diary, 9).batches(0, 0, 3):
        diary.note(f"step of {len(batch.images)}")
    one, last = [f"read in {WAIT}"] * 4, [f"read in {WAIT}"] * 2
    augment = f"augment in {PREPARE}"
    assert diary.book == [
        *one, augment, "step of 4 in nothing", *one, augment, "step of 4 in nothing", *last, augment, "step of 2 in nothing",
    ]  # fmt: skip


def test_images_in_memory_are_prepared_and_never_waited_for() -> None:
    diary = Diary()
    for _ in loader_in_ranges(made(None, diary), diary, 9).batches(0, 0, 3):
        diary.note("step")
    assert set(diary.book) == {f"augment in {PREPARE}", "step in nothing"}


@pytest.mark.parametrize(("at_once", "times"), [(1, 3), (2, 2), (9, 1)])
def test_batches_are_gathered_at_most_so_many_at_a_time(at_once: int, times: int) -> None:
    diary = Diary()
    loader = made(None, diary)
    assert len(list(loader_in_ranges(loader, diary, at_once).batches(0, 0, 3))) == 3
    assert len(diary.book) == times
    assert loader._chunk > 9, "the loader of the run itself stays as it is"


def test_closing_a_marked_loader_ends_the_workers_of_the_loader_itself() -> None:
    loader = small_loader(1, persistent_workers=True)
    with_ranges = loader_in_ranges(loader, Diary(), 9)
    list(with_ranges.batches(0, 0, 3))
    (worker,) = loader._iterator._workers
    with_ranges.close()
    assert not worker.is_alive()
    assert loader._iterator is None
