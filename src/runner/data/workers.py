"""Batches read sample by sample, through worker processes or in this one; reports workers that die or hang.

Uses private attributes of torch's DataLoader iterators (`_workers`, `_shutdown`, `_shutdown_workers`), nowhere else used;
tests/data/test_worker_failures.py notices a change.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import math
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from runner.base.errors import DataFailed, UserError
from runner.base.signals import STOPPING
from runner.config.schema.sections import Data
from runner.data.bad_samples import BadSample
from runner.data.loaders import BatchPlan, Loader
from runner.data.sample_rng import hash_ints
from runner.data.sampler import sample_of
from runner.data.samples import SHARED_MEMORY, SeededDataset
from runner.instrument.nested import mapped_items
from runner.instrument.profiler_ranges import PREPARE, WAIT, Mark, items_in_range

_ADVICE = {
    "SIGKILL": " (the system kills processes that take too much memory)",
    "SIGBUS": " (as happens when the shared memory in /dev/shm is full)",
}
_PATIENCE_S = 2.0
_END_S = 5.0
_LOOKS = 1000
_IN_MAIN = "data.num_workers=0, which reads in the main process"
_FROM_A_WORKER = "in DataLoader worker process"
_OF_TORCH = "torch.utils.data._utils.signal_handling"
_LATE = "DataLoader timed out"
_WAIT_S = 5.0  # torch looks after the workers whenever a wait is over


class _Requests:
    """The `batches` of samples of an epoch that are to be read, computed when needed and `pending` until they came."""

    def begin(self, epoch: int, batches: Iterator[Tensor]) -> None:
        self._epoch, self._batches = epoch, batches
        self.pending: deque[Tensor] = deque()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, pending = self._epoch, self.pending
        for batch in self._batches:
            pending.append(batch)
            yield [(epoch, place) for place in batch.tolist()]


def _as_read(batch: Any) -> Any:
    return batch  # the reader has made it


def _start_worker(_: int) -> None:
    # A scheduler or a terminal signals the whole process group; only the main process decides what happens then.
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Block signals while workers start: they inherit the mask, so none dies before it can ignore one.

    And silence torch's warning about the number of workers, which `num_workers` reports already.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerLoader(Loader):
    """Batches read sample by sample by worker processes, or by this one; the other arguments are those of `Loader`.

    Args:
        reader: reads the samples.
        settings: how workers read ahead, and how what they read is copied to the device.
        workers: number of processes; with 0, this process reads.
        on_skipped: called with samples that could not be read, when their batch is taken.

    Attributes:
        check: called with the targets and the samples of every batch, on the CPU, before it is used; may raise.
    """

    workers: int

    def __init__(
        self,
        reader: SeededDataset,
        plan: BatchPlan,
        device: torch.device,
        settings: Data,
        *,
        workers: int = 0,
        on_skipped: Callable[[Sequence[BadSample]], None] = lambda _: None,
    ) -> None:
        super().__init__(plan, device)
        # The task sets it later, once targets have a meaning
        self.check: Callable[[Tensor, Tensor], None] | None = None
        self.workers = workers
        self._pin = device.type == "cuda" and settings.pin_memory is not False
        self._prefetches = settings.non_blocking
        self.reader = reader
        # One object for all epochs, as a DataLoader cannot be given another sampler.
        self._requests = _Requests()
        self._persistent, self._timeout_s = settings.persistent_workers, settings.timeout_s
        self._on_skipped = on_skipped
        self._iterator: Any = None
        _LOADERS.add(self)
        # In other threads no signal tells that a worker has died, and torch looks after them only where it has no limit
        timed = workers > 0 and threading.current_thread() is threading.main_thread()
        # In parts, as torch's limit counts the time in which this process is stopped
        limit = self._timeout_s if timed else None
        wait_s = 0.0 if limit is None else min(limit / 2, _WAIT_S)
        self._waits = 1 if limit is None else math.ceil(limit / wait_s)
        with _starting():
            self._loader: DataLoader[Any] = DataLoader(
                reader,
                batch_sampler=self._requests,
                num_workers=workers,
                collate_fn=_as_read,
                pin_memory=self._pin,
                worker_init_fn=_start_worker,
                timeout=wait_s,
                prefetch_factor=settings.prefetch if workers else None,
                persistent_workers=self._persistent and workers > 0,
                # An iterator draws a seed for its workers; from the global generator that would change the run's bits.
                generator=torch.Generator().manual_seed(hash_ints(plan.seed, 2)),
            )

    def _copied(self, places: Iterator[Tensor], epoch: int) -> Iterator[tuple[Any, Tensor]]:
        self._requests.begin(epoch, places)
        pending = self._requests.pending
        for data, skipped in self._read():
            drawn = pending.popleft()
            if self.reader.encoded is not None:
                data = self.reader.on_device(data, epoch, drawn, self.device, skipped)
            if skipped:
                self._on_skipped(skipped)
            data = mapped_items(data, np.ndarray, as_numbers)
            if self.check is not None:
                self.check(data[1], sample_of(drawn))
            yield mapped_items(data, Tensor, self._moved), self._moved(drawn)

    def _moved(self, tensor: Tensor) -> Tensor:
        if self._pin and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=self._prefetches)

    def _read(self) -> Iterator[tuple[Any, list[BadSample]]]:
        iterator, pending = None, self._requests.pending
        try:
            with self._watched(pending), _starting():
                iterator = self._iterator = iter(self._loader)
            while True:
                with self._watched(pending):
                    read = _next(iterator, self._waits)
                if read is None:
                    return
                yield read
        except UserError as error:
            # A worker's exception arrives with the worker's traceback around its message.
            _, found, message = str(error).rpartition(f"{type(error).__name__}: ")
            if not found:
                raise
            raise type(error)(message.strip()) from error
        finally:
            if not self._persistent:  # an epoch that was left early has not ended them itself
                _shut_down(iterator)
                self._iterator = None if self._iterator is iterator else self._iterator

    @contextlib.contextmanager
    def _watched(self, pending: deque[Tensor]) -> Iterator[None]:
        """Wait for workers; raises `DataFailed` if one dies or nothing comes."""
        if not self.workers:
            yield
            return
        try:
            with _deaths_raised():
                yield
        # The workers themselves tell more than the error of torch
        except (RuntimeError, OSError, EOFError) as error:
            failure = _failure_of(error)
            if failure is None and str(error).startswith(_LATE):
                # The samples that were requested first are those that a worker hangs on
                samples = sample_of(pending[0]).tolist() if pending else []
                shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
                late = f"no batch came from the workers for {self._timeout_s:g} s"
                allowed = "a larger one, null to wait forever, or data.num_workers=0 to see where reading stops"
                failure = DataFailed("data.timeout_s", f"{late}; the next batch has the samples {shown}", allowed)
            if failure is None:
                raise
            # After a failure no worker can be trusted to end by itself.
            _kill(self._iterator)
            self.close()
            raise failure from error

    def close(self) -> None:
        """End the worker processes."""
        _shut_down(self._iterator)
        self._iterator = self._loader._iterator = None


def _next(iterator: Any, waits: int) -> Any:
    """What is read next, or None; it is waited for so many times."""
    for _ in range(waits - 1):
        try:
            return next(iterator, None)
        except RuntimeError as error:
            if not str(error).startswith(_LATE):
                raise
    return next(iterator, None)


@contextlib.contextmanager
def _deaths_raised() -> Iterator[None]:
    """Raise RuntimeError if a worker is dead or dies in the meantime; only in the main thread, which gets the signals.

    Torch's handler of SIGCHLD does so wherever the main process is, which would leave a step half done. So it is removed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGCHLD)
    if getattr(before, "__module__", "") == _OF_TORCH:  # of a loader in user code
        before = signal.SIG_DFL

    def look(number: int | None = None, frame: FrameType | None = None) -> None:
        if number is not None and callable(before):
            before(number, frame)
        if _dead_worker() is None:
            return
        # Torch tries temporary files after a broken connection; one that is half made would be deleted twice
        if all(each.f_globals.get("__name__") != "tempfile" for each, _ in traceback.walk_stack(frame)):
            raise RuntimeError("a worker process has ended")

    signal.signal(signal.SIGCHLD, look)
    try:
        look()
        yield
    finally:
        # Torch installs its handler when the first workers start, which happens inside of this block
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _failure_of(error: Exception) -> DataFailed | None:
    """What to raise for an error that came while a batch was waited for; None if all workers are well."""
    text = str(error)
    # The usual failure in containers has advice of its own
    if _FROM_A_WORKER in text and SHARED_MEMORY in text:
        problem = f"a worker process cannot put a batch into shared memory: {text.strip().rpartition('Error: ')[2]}"
        allowed = f"more space in /dev/shm, a smaller data.batch_size, or {_IN_MAIN}"
        return DataFailed("data.num_workers", problem, allowed)
    # A broken connection is seen a moment before the system reports that the process at its other end is gone.
    broken = not isinstance(error, RuntimeError) and _FROM_A_WORKER not in text
    for _ in range(_LOOKS if broken else 1):
        if (failure := _dead_worker()) is not None:
            return failure
        time.sleep(0.01)
    return None


def _dead_worker() -> DataFailed | None:
    """What to raise for a worker of any loader that has ended too early, if there is one."""
    for iterator in [loader._iterator for loader in _LOADERS]:
        # Once an iterator ends its workers, they may have ended with status 0.
        busy = not getattr(iterator, "_shutdown", True)
        for number, worker in enumerate(getattr(iterator, "_workers", ())):
            if worker.exitcode or (worker.exitcode == 0 and busy):
                problem = f"worker process {number} (pid {worker.pid}) {_how_it_ended(worker.exitcode)}"
                allowed = f"fewer workers, a smaller data.prefetch or data.batch_size, or {_IN_MAIN}"
                return DataFailed("data.num_workers", problem, allowed)
    return None


def _how_it_ended(exitcode: int) -> str:
    if exitcode == 0:
        return "ended with status 0 (the data set or a transform may have called exit())"
    if exitcode > 0:
        return f"ended with status {exitcode}"
    # Real-time signals have a number alone
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else f"signal {-exitcode}"
    return f"was killed by {name}{_ADVICE.get(name, '')}"


def _shut_down(iterator: Any) -> None:
    """Ask an iterator's workers to end, and kill those that do not end soon.

    torch alone would wait 5 seconds for each frozen worker, and as long again after a SIGTERM.
    """
    if not hasattr(iterator, "_workers"):  # it reads in this process, or there is none
        return
    if sys.is_finalizing():  # a thread started now never runs, and start() would wait for it forever
        _kill(iterator)
        iterator._shutdown_workers()
        return
    # A worker that hangs in a read would block the end of the run
    impatience = threading.Timer(_PATIENCE_S, _send_sigkill, (iterator,))
    impatience.daemon = True
    impatience.start()
    try:
        iterator._shutdown_workers()
    finally:
        impatience.cancel()
        impatience.join()
    _kill(iterator)


def _kill(iterator: Any) -> None:
    """Kill what is left of an iterator's workers."""
    _send_sigkill(iterator)
    for worker in getattr(iterator, "_workers", ()):
        worker.join(_END_S)


def _send_sigkill(iterator: Any) -> None:
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()


def as_numbers(array: np.ndarray) -> Any:
    """An array of numbers as a tensor; others stay as they are."""
    return torch.from_numpy(array) if array.dtype.kind in "biufc" else array


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


_LOADERS: weakref.WeakSet[WorkerLoader] = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    """Kill what an error has left running: Python would wait at exit for workers, which ignore its signal to stop."""
    for loader in list(_LOADERS):
        _kill(loader._iterator)
        loader.close()
        # Epochs that are still open have nothing left to end. Where dill is installed, torch imports it, it keeps __main__,
        # and what that holds is freed when this program's modules are empty already.
        loader._persistent = True
