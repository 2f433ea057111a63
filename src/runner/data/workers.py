"""Batches read sample by sample, through worker processes or in this one."""

from __future__ import annotations

import atexit
import contextlib
import signal
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from runner.config.errors import DataFailed, UserError
from runner.config.signals import STOPPING
from runner.data import worker_failures
from runner.data.bad_samples import BadSample, ReplacementSampler
from runner.data.cuda_prefetch import prefetch_to_cuda
from runner.data.indices import Indices
from runner.data.loaders import Batch, Mix, Prepare, mixed
from runner.data.sample_rng import hash_ints
from runner.data.sampler import EpochOrder
from runner.data.samples import Read, SampleTransform, SeededDataset, collate


class _Request:
    """Part of an epoch: batches of samples, computed when workers are to read them and kept until they have."""

    def __init__(self, epoch: int, parts: Iterator[Tensor]) -> None:
        self._epoch, self._parts = epoch, parts
        self.pending: deque[Tensor] = deque()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for part in self._parts:
            self.pending.append(part)
            yield [(self._epoch, index) for index in part.tolist()]


class _Slices(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, index) of the request that was made last."""

    def __init__(self) -> None:
        self.request = _Request(0, iter(()))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.request)


def _start_worker(_: int) -> None:
    # A scheduler or a terminal signals the whole process group; only the main process decides what happens then.
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Block signals while workers start: they inherit the mask, so none dies before it can ignore one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silence torch's warning about the number of workers, which `num_workers` reports already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


class WorkerLoader:
    """Batches read sample by sample by worker processes, or by this one.

    Args:
        dataset: map-style data set giving (image, target).
        indices: samples of this split.
        batch_size: samples of a batch; the last one of an epoch may be smaller.
        seed: seed of the sample order and of the draws of each sample.
        shuffle: False keeps the order of `indices`.
        device: where batches are wanted.
        transforms: callables on one image.
        workers: processes; 0 reads in this one.
        prefetch: batches each worker reads ahead.
        persistent: keep workers between epochs.
        pin: page-locked memory.
        non_blocking: copies overlap with computing.
        prepare: what is done to images on the device; None leaves them as they are in the data set.
        mix_batch: blends the samples of a batch; None for nothing.
        replacements: replaces samples that cannot be read; None raises the error.
        on_skipped: called with samples that could not be read, when their batch is taken.
        timeout_s: seconds to wait for a batch of the workers; None waits forever.
        split: name of the split, for messages.

    Attributes:
        check: called with the targets and the samples of every batch, on the CPU, before it is used; may raise.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        indices: Indices,
        batch_size: int,
        seed: int,
        shuffle: bool,
        device: torch.device,
        transforms: Sequence[SampleTransform] = (),
        workers: int = 0,
        prefetch: int = 2,
        persistent: bool = True,
        pin: bool = False,
        non_blocking: bool = True,
        prepare: Prepare | None = None,
        mix_batch: Mix | None = None,
        replacements: ReplacementSampler | None = None,
        on_skipped: Callable[[Sequence[BadSample]], None] = lambda _: None,
        timeout_s: float | None = None,
        split: str = "",
    ) -> None:
        self.check: Callable[[Tensor, Tensor], None] | None = None
        self.samples = len(indices)
        self.batch_size = batch_size
        self.workers = workers
        self._prepare, self._mix = prepare, mix_batch
        self._indices, self._seed, self._shuffle = indices, seed, shuffle
        self._device, self._pin, self._non_blocking = device, pin, non_blocking
        self._slices = _Slices()
        self._persistent = persistent
        self._iterator: Any = None
        self._on_skipped, self._timeout_s = on_skipped, timeout_s
        _LOADERS.add(self)
        with _without_advice():
            self._loader: DataLoader[Any] = DataLoader(
                SeededDataset(dataset, seed, transforms, replacements, split),
                batch_sampler=self._slices,
                num_workers=workers,
                collate_fn=collate,
                pin_memory=pin,
                worker_init_fn=_start_worker,
                prefetch_factor=prefetch if workers else None,
                persistent_workers=persistent and workers > 0,
                timeout=(timeout_s or 0) if workers else 0,
                # An iterator draws a seed for its workers; from the global generator that would change the run's bits.
                generator=torch.Generator().manual_seed(hash_ints(seed, 2)),
            )

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        """Batches `start` to `stop` - 1 of an epoch."""
        order, size = EpochOrder(self.samples, self._seed, epoch, self._shuffle), self.batch_size
        parts = (self._indices[positions] for positions in order.pieces(size, start * size, stop * size))
        batches: Iterator[Batch] = self._copied(_Request(epoch, parts))
        # Only what uses no stateful generator may run before it is requested.
        early = self._prepare is None or self._prepare.per_sample
        if early:
            batches = self._prepared(batches, epoch)
        if self._non_blocking:
            batches = prefetch_to_cuda(batches, self._device)
        if not early:
            batches = self._prepared(batches, epoch)
        return mixed(batches, self._mix, epoch)

    def _copied(self, request: _Request) -> Iterator[Batch]:
        self._slices.request = request
        for read in self._read():
            places = request.pending.popleft()
            if read.skipped:
                self._on_skipped(read.skipped)
            targets = torch.from_numpy(read.targets)
            if self.check is not None:
                self.check(targets, places)
            yield Batch(*(self._to_device(tensor) for tensor in (read.images, targets, places)))

    def _prepared(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        for images, targets, places in batches:
            yield Batch(images if self._prepare is None else self._prepare(images, places, epoch), targets, places)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._pin and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=self._non_blocking)

    def _read(self) -> Iterator[Read]:
        iterator, request = None, self._slices.request
        try:
            with (
                self._watched(request, None if self._iterator is None else self._timeout_s),
                _without_advice(),
                _signals_wait(),
            ):
                iterator = self._iterator = iter(self._loader)
            while True:
                with self._watched(request, self._timeout_s):
                    read = next(iterator, None)
                if read is None:
                    return
                yield read
        except DataFailed:
            raise
        except UserError as error:
            # A worker's exception arrives with the worker's traceback around its message.
            message = str(error).rpartition(f"{UserError.__name__}: ")[2].strip()
            raise UserError(message or str(error)) from error
        finally:
            if not self._persistent:  # an epoch that was left early has not ended them itself
                worker_failures.shut_down(iterator)
                self._iterator = None if self._iterator is iterator else self._iterator

    @contextlib.contextmanager
    def _watched(self, request: _Request, timeout_s: float | None) -> Iterator[None]:
        """Wait for workers; raises `DataFailed` if one dies or nothing comes."""
        if not self.workers:
            yield
            return
        try:
            with worker_failures.wait_for_batch(), worker_failures.time_limit(timeout_s):
                yield
        except (RuntimeError, OSError, EOFError) as error:
            failure = worker_failures.describe_failure([loader._iterator for loader in _LOADERS], error)
            late = isinstance(error, worker_failures.TimedOut) or str(error).startswith("DataLoader timed out")
            if failure is None and not late:
                raise
            worker_failures.kill(self._iterator)
            self.close()
            if failure is not None:
                raise DataFailed("data.num_workers", *failure) from error
            samples = request.pending[0].tolist() if request.pending else []
            shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
            raise DataFailed(
                "data.timeout_s",
                f"no batch came from the workers for {self._timeout_s:g} s; the next batch has the samples {shown}",
                "a larger data.timeout_s, null to wait forever, or data.num_workers=0 to see where reading stops",
            ) from error

    def close(self) -> None:
        """End the worker processes."""
        worker_failures.shut_down(self._iterator)
        self._iterator = self._loader._iterator = None


_LOADERS: weakref.WeakSet[WorkerLoader] = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    """Kill what an error has left running: Python would wait at exit for workers, which ignore its signal to stop."""
    for loader in list(_LOADERS):
        worker_failures.kill(loader._iterator)
        loader.close()
