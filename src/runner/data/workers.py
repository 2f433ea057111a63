"""Batches read sample by sample, through worker processes or in this one."""

from __future__ import annotations

import contextlib
import math
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from runner.config.errors import UserError
from runner.data.keyed import mix, preserved_rng, seed_generators
from runner.data.loaders import Batch, Mix, Prepare
from runner.data.order import order

SampleTransform = Callable[[Any], Any]


class _Keyed(Dataset[Any]):
    """A data set whose items are asked for as (epoch, index), random draws keyed by both."""

    def __init__(self, dataset: Dataset[Any], seed: int, transforms: Sequence[SampleTransform]) -> None:
        self._dataset, self._seed, self._transforms = dataset, seed, list(transforms)

    def __getitems__(self, places: list[tuple[int, int]]) -> list[tuple[Any, Any, int]]:
        items = []
        with preserved_rng():
            for epoch, index in places:
                seed_generators(self._seed, epoch, index)
                image, target = self._dataset[index]
                for transform in self._transforms:
                    image = transform(image)
                items.append((image, target, index))
        return items

    def __getitem__(self, place: tuple[int, int]) -> tuple[Any, Any, int]:
        return self.__getitems__([place])[0]

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]


class _Slices(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, index) for the part of an epoch that was asked for last."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _collate(items: list[tuple[Any, Any, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack samples; anything that is not a tensor yet becomes one (PIL images as uint8 CHW)."""
    images = [as_tensor(image) for image, _, _ in items]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise UserError(
            f"images of one batch have different shapes, such as {first} and {second}; "
            "set data.image_size, or add a transform that makes them equal (transform.sample_train, sample_eval)"
        )
    targets = torch.stack([as_target(target) for _, target, _ in items])
    return torch.stack(images), targets, torch.tensor([index for _, _, index in items])


def as_target(target: Any) -> Tensor:
    """One target as a tensor; Python's and NumPy's floats become float32.

    Raises:
        UserError: if it is no number.
    """
    try:
        tensor = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"data.dataset: a target is {target!r}, which is not a number") from error
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def as_tensor(image: Any) -> Tensor:
    """One image as a CHW tensor: tensors as they are, arrays and PIL images as uint8 or float.

    Raises:
        UserError: for anything else, or another number of dimensions.
    """
    tensor: Tensor
    if isinstance(image, Tensor):
        tensor = image
    else:
        array = np.asarray(image)
        if array.dtype == object or array.ndim not in (2, 3):
            kind = type(image).__name__
            raise UserError(
                f"data.dataset: gave {kind} where an image was expected (a tensor, an array or a PIL image)"
            )
        tensor = torch.from_numpy(array.copy())
        if tensor.ndim == 3:
            tensor = tensor.permute(2, 0, 1).contiguous()
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3:
        raise UserError(f"data.dataset: an image has shape {tuple(tensor.shape)}; expected (channels, height, width)")
    return tensor if tensor.dtype == torch.uint8 or tensor.is_floating_point() else tensor.float()


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
        self._prepare, self._mix = prepare, mix_batch
        self._indices, self._seed, self._shuffle = indices, seed, shuffle
        self._device, self._non_blocking = device, non_blocking
        self._slices = _Slices()
        with _without_advice():
            self._loader: DataLoader[Any] = DataLoader(
                _Keyed(dataset, seed, transforms),
                batch_sampler=self._slices,
                num_workers=workers,
                collate_fn=_collate,
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
        self._slices.batches = [[(epoch, index) for index in part.tolist()] for part in parts]
        for tensors in self._read():
            images, targets, places = (tensor.to(self._device, non_blocking=self._non_blocking) for tensor in tensors)
            if self._prepare is not None:
                images = self._prepare(images, places, epoch)
            if self._mix is not None:
                images, targets = self._mix(images, targets, places, epoch)
            yield Batch(images, targets, places)

    def _read(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        try:
            with _without_advice(), _signals_wait():
                iterator = iter(self._loader)
            yield from iterator
        except UserError as error:
            # A worker's exception arrives with the worker's traceback around its message.
            message = str(error).rpartition(f"{UserError.__name__}: ")[2].strip()
            raise UserError(message or str(error)) from error

    def close(self) -> None:
        """End the worker processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None
