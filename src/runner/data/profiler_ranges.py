"""A loader whose work is done in named ranges, for profiling."""

from __future__ import annotations

import copy

from runner.data.loaders import Loader
from runner.data.workers import WorkerLoader
from runner.instrument.profiler_ranges import PREPARE, WAIT, Mark, items_in_range


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
    inner = copy.copy(loader)
    inner._chunk = min(loader._chunk, at_once)
    if isinstance(inner, WorkerLoader) and isinstance(loader, WorkerLoader):
        read = loader._read
        inner._read = lambda: items_in_range(read, mark, WAIT)  # type: ignore[method-assign]
    outer = copy.copy(inner)
    outer.batches = lambda *part: items_in_range(lambda: inner.batches(*part), mark, PREPARE)  # type: ignore[method-assign]
    outer.close = loader.close  # type: ignore[method-assign]  # a copy does not know of the workers that it started
    return outer
