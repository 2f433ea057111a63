"""A loader whose work is done in named ranges, for profiling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from runner.data.cache_file import CachedImages
from runner.data.loaders import Batch, Loader, MemoryLoader
from runner.data.samples import SeededDataset
from runner.data.sources.arrays import ImageArrays
from runner.data.workers import WorkerLoader
from runner.instrument.profiler_ranges import PREPARE, WAIT, Mark, items_in_range


@dataclass(frozen=True)
class Reading:
    """How a loader comes by its samples.

    Attributes:
        workers: processes that read them one by one, 0 where this one does; None if they are in memory.
        resident: where they are in memory; None if they are read.
        could_be_resident: whether they are read although they are tensors, in memory or in a cache file, and stay as they are.
    """

    workers: int | None
    resident: torch.device | None
    could_be_resident: bool


def reading(loader: Loader) -> Reading:
    """How a loader comes by its samples."""
    if isinstance(loader, MemoryLoader):
        return Reading(None, loader._images.device, False)
    assert isinstance(loader, WorkerLoader), "there are two kinds of loaders"
    keyed = loader._loader.dataset
    assert isinstance(keyed, SeededDataset), "a worker loader reads with keyed draws"
    as_they_are = keyed._cut is None and not keyed._transforms
    tensors = isinstance(keyed._dataset, ImageArrays | CachedImages)
    return Reading(loader._loader.num_workers, None, tensors and as_they_are)


def loader_in_ranges(loader: Loader, mark: Mark, at_once: int) -> Loader:
    """The same batches, made in ranges.

    `data wait` is the time until samples that are read one by one have come: from worker processes, or read in this one
    where there are none. `copy and augment` is everything else about a batch: gathering it from memory, moving it to the
    device, transforming and normalising it.

    Args:
        loader: stays as it is; closing either closes both.
        mark: gives the ranges; those inside another count by themselves.
        at_once: most batches that are gathered together from memory, so that a few steps show what many cost on average.
    """
    if isinstance(loader, WorkerLoader):
        inner, read = copy.copy(loader), loader._read
        inner._read = lambda: items_in_range(read, mark, WAIT)  # type: ignore[method-assign]
        return _LoaderInRanges(inner, mark, loader.close)
    if isinstance(loader, MemoryLoader):
        gathers = copy.copy(loader)
        gathers._chunk = min(loader._chunk, at_once)
        return _LoaderInRanges(gathers, mark, loader.close)
    return _LoaderInRanges(loader, mark, loader.close)


class _LoaderInRanges:
    def __init__(self, inner: Loader, mark: Mark, close: Callable[[], None]) -> None:
        self.samples, self.batch_size = inner.samples, inner.batch_size
        self._inner, self._mark = inner, mark
        self._close = close  # of the loader itself: a copy does not know of the workers that it started

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        return items_in_range(lambda: self._inner.batches(epoch, start, stop), self._mark, PREPARE)

    def close(self) -> None:
        self._close()
