"""Batches read sample by sample, through worker processes or in this one."""

from __future__ import annotations

import atexit
import contextlib
import math
import signal
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from runner.config.errors import UserError
from runner.data.keyed import mix
from runner.data.loaders import Batch, Mix, Prepare
from runner.data.order import order
from runner.data.overlap import overlapped
from runner.data.samples import Keyed, Read, SampleTransform, collate


class _Slices(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, index) for the part of an epoch that was asked for last."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


# A scheduler signals the whole process group; only the main process decides what happens then.
_LEFT_TO_MAIN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _start_worker(_: int) -> None:
    for number in _LEFT_TO_MAIN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_MAIN)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold signals back while workers start: they begin with our mask, so none dies before it can ignore one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_MAIN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Keep torch from warning about the number of workers, which the assembly has told in our own words."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


class WorkerLoader:
    """Batches read sample by sample by worker processes, or by this one.

    Args:
        dataset: map-style data set giving (image, target).
        indices: samples of this split, int64 of shape (N,).
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
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        indices: Tensor,
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
    ) -> None:
        self.samples = len(indices)
        self.batch_size = batch_size
        self.workers = workers
        self._prepare, self._mix = prepare, mix_batch
        self._indices, self._seed, self._shuffle = indices, seed, shuffle
        self._device, self._pin, self._non_blocking = device, pin, non_blocking
        self._slices = _Slices()
        self._persistent = persistent
        self._iterator: Any = None
        _LOADERS.add(self)
        with _without_advice():
            self._loader: DataLoader[Any] = DataLoader(
                Keyed(dataset, seed, transforms),
                batch_sampler=self._slices,
                num_workers=workers,
                collate_fn=collate,
                pin_memory=pin,
                worker_init_fn=_start_worker,
                prefetch_factor=prefetch if workers else None,
                persistent_workers=persistent and workers > 0,
                # An iterator draws a seed for its workers; from the global generator that would change the run's bits.
                generator=torch.Generator().manual_seed(mix(seed, 2)),
            )

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        """Batches `start` to `stop` - 1 of an epoch."""
        chosen = self._indices[order(self.samples, self._seed, epoch, self._shuffle)]
        stop = min(stop, math.ceil(self.samples / self.batch_size))
        parts = [chosen[batch * self.batch_size : (batch + 1) * self.batch_size] for batch in range(start, stop)]
        batches: Iterator[Batch] = self._copied(parts, epoch)
        # Only what draws from no generator with a state may be done before it is asked for.
        early = self._prepare is None or self._prepare.per_sample
        if early:
            batches = self._prepared(batches, epoch)
        if self._non_blocking:
            batches = overlapped(batches, self._device)
        if not early:
            batches = self._prepared(batches, epoch)
        return batches if self._mix is None else self._mixed(batches, self._mix, epoch)

    def _copied(self, parts: list[Tensor], epoch: int) -> Iterator[Batch]:
        self._slices.batches = [[(epoch, index) for index in part.tolist()] for part in parts]
        for read, places in zip(self._read(), parts, strict=True):
            yield Batch(*(self._to_device(tensor) for tensor in (read.images, torch.from_numpy(read.targets), places)))

    def _prepared(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        for images, targets, places in batches:
            yield Batch(images if self._prepare is None else self._prepare(images, places, epoch), targets, places)

    def _mixed(self, batches: Iterator[Batch], mix_batch: Mix, epoch: int) -> Iterator[Batch]:
        for batch in batches:
            yield Batch(*mix_batch(*batch, epoch), batch.indices)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._pin and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=self._non_blocking)

    def _read(self) -> Iterator[Read]:
        iterator: Any = None
        try:
            with _without_advice(), _signals_wait():
                iterator = self._iterator = iter(self._loader)
            yield from iterator
        except UserError as error:
            # A worker's exception arrives with the worker's traceback around its message.
            message = str(error).rpartition(f"{UserError.__name__}: ")[2].strip()
            raise UserError(message or str(error)) from error
        finally:
            if not self._persistent:  # an epoch that was left early has not ended them itself
                _end(iterator)

    def close(self) -> None:
        """End the worker processes."""
        _end(self._iterator)
        self._iterator = self._loader._iterator = None


def _end(iterator: Any) -> None:
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


_LOADERS: weakref.WeakSet[WorkerLoader] = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    """End what an error has left running: at its end Python waits for workers, which ignore its signal to stop."""
    for loader in list(_LOADERS):
        loader.close()
