"""Batches for the engine: gathered from tensors in memory, or read sample by sample (`runner.data.workers`).

Batch k of an epoch is slice k of `EpochOrder`, and the random numbers of a sample depend on (seed, epoch, sample) alone. So a
run has the same bits either way, and resuming starts at a slice.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from runner.base.errors import UserError
from runner.data.sampler import EpochOrder, Indices, sample_of
from runner.data.transforms.augment import Pipeline
from runner.distributed.world import World, gathered_rows, rows
from runner.instrument.nested import mapped_items, rows_of, tensors_in

# Batches are gathered and prepared many at a time, as many as fit into a cache (CPU) or hide launches (GPU).
_CHUNK_BYTES = {"cpu": 2**21}
_CHUNK_BYTES_ELSEWHERE = 2**26
# Slices start at the alignment of an allocation: matrix libraries round differently on other addresses.
_ALIGNMENT = {"cpu": 64}
_ALIGNMENT_ELSEWHERE = 512


class Batch(NamedTuple):
    """Samples on the device.

    Attributes:
        data: images (B, C, H, W), as the model takes them, and targets, (B,) int64 classes or (B, ...) float values.
        indices: identity of each sample in its data set, (B,) int64.
    """

    data: Any
    indices: Tensor

    @property
    def images(self) -> Tensor:
        """(B, C, H, W), as the model takes them."""
        images: Tensor = self.data[0]
        return images

    @property
    def targets(self) -> Tensor:
        """(B,) int64 classes or (B, ...) float values."""
        targets: Tensor = self.data[1]
        return targets

    def first(self, count: int) -> Batch:
        """At most `count` samples: the first ones."""
        return Batch(rows_of(self.data, len(self.indices), slice(count)), self.indices[:count])


class Fields:
    """Prepares those fields of the data of a batch that are images; all others stay as they are.

    Args:
        names: keys of a mapping, or places in a tuple, of tensors (B, C, H, W) or lists of B tensors (C, H, W).
        prepare: prepares images: see `Pipeline`, and its `per_sample`.
        wide: convert all floating-point numbers to float64.
    """

    def __init__(self, names: Sequence[str], prepare: Pipeline, wide: bool = False) -> None:
        self._names, self._prepare, self._wide = tuple(names), prepare, wide

    @property
    def per_sample(self) -> bool:
        """See `Pipeline`."""
        return self._prepare.per_sample

    def __call__(self, data: Any, indices: Tensor, epoch: int) -> Any:
        """The data with prepared images; raises `UserError` if a field is not there or holds no images."""
        for name in self._names:
            key, images = self._field(data, name)
            if isinstance(images, Tensor):
                changed: Any = self._prepare(images, indices, epoch)
            else:
                each = enumerate(images)
                changed = [self._prepare(image[None], indices[i : i + 1], epoch)[0] for i, image in each]
            if isinstance(data, Mapping):
                data = {**data, key: changed}
            else:
                fields = [changed if place == key else field for place, field in enumerate(data)]
                data = data._make(fields) if hasattr(data, "_make") else tuple(fields)
        if self._wide:
            data = mapped_items(data, Tensor, lambda each: each.double() if each.is_floating_point() else each)
        return data

    def _field(self, data: Any, name: str) -> tuple[Any, Any]:
        """The key and the images of a field."""
        if isinstance(data, Tensor):
            problem = f"names {', '.join(self._names)}, and a batch is one tensor, which has no fields"
            raise UserError("data.images", problem, "[], or samples that are tuples or dicts")
        with contextlib.suppress(KeyError, IndexError, TypeError, ValueError, AttributeError):
            key = name if isinstance(data, Mapping) else range(len(data)).index(int(name))
            images = data[key]
            if all(image.ndim > 2 for image in ([images[0]] if isinstance(images, Tensor) else images)):
                return key, images
        names = ", ".join(map(str, data)) if isinstance(data, Mapping) else f"0 to {len(data) - 1}"
        raise UserError("data.images", f"'{name}' names no field of images of a batch", names)


Mix = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Blends samples of a batch: (images, targets, indices, epoch) -> (images, targets)."""
Tensors = TypeVar("Tensors", bound=tuple[Any, ...])


@dataclass(frozen=True)
class BatchPlan:
    """The samples of a split, and how batches are made of them: divided, prepared and mixed.

    `seed` is that of their order, which `shuffle=False` keeps. Without `prepare` and `mix`, images and targets are those of the
    data set.
    """

    indices: Indices
    batch_size: int
    seed: int = 0
    shuffle: bool = False
    prepare: Fields | None = None
    mix: Mix | None = None


class Loader:
    """The batches of a split; the last one of an epoch may be smaller."""

    workers: int | None = None  # processes that read the samples, 0 where this one does; None if they are in memory

    def __init__(self, plan: BatchPlan, device: torch.device) -> None:
        self.samples, self.batch_size = len(plan.indices), plan.batch_size
        self.device, self.prepare, self._plan = device, plan.prepare, plan
        self._chunk = 1  # batches that are made together
        self._prefetches = True
        self.world = World()  # of which each rank gets its rows of every batch
        self.draws: Callable[[int], EpochOrder] | None = None  # gives another order of an epoch; see `sample_of`

    def __len__(self) -> int:
        """Batches of an epoch."""
        return math.ceil(self.samples / self.batch_size)

    def _copied(self, places: Iterator[Tensor], epoch: int) -> Iterator[tuple[Any, Tensor]]:
        """Data and places on the device, in the same pieces; see `sample_of`."""
        raise NotImplementedError

    def batches(self, epoch: int, start: int, stop: int, step: int = 1) -> Iterator[Batch]:
        """Batches `start` to `stop` - 1 of an epoch, or every `step`-th of them; of each batch the rows of this rank."""
        # The order is a function of seed and epoch, so any part of it can be computed without the rest
        order = EpochOrder(self.samples, self._plan.seed, epoch, self._plan.shuffle)
        if self.draws is not None:
            order = self.draws(epoch)
            if order.samples != self.samples:
                problem = f"gives {order.samples:,} samples in epoch {epoch + 1}, and {self.samples:,} in the first one"
                raise UserError("data.batch_sampler", problem, "the same number in each epoch")
        numbers = range(start, stop, step)
        copied = self._copied((self._places(positions) for positions in self._pieces(order, numbers)), epoch)
        # Random numbers of samples are keyed by their number, so preparing ahead does not change them. What uses a stateful
        # generator may not run before it is requested: then only the copies are made ahead.
        early = self.prepare is None or self.prepare.per_sample
        if self._prefetches and not early:
            copied = prefetch_to_cuda(copied, self.device)
        batches = self._prepared(copied, epoch)
        if self._prefetches and early:
            batches = prefetch_to_cuda(batches, self.device)
        # Mixing takes two samples of one batch, so it comes after everything that treats them alone
        if self._plan.mix is not None:
            batches = self._mixed(self._plan.mix, batches, epoch, numbers)
        # Callers want the numbers of the samples
        return (
            batches if self.draws is None else (batch._replace(indices=sample_of(batch.indices)) for batch in batches)
        )

    def _pieces(self, order: EpochOrder, numbers: range) -> Iterator[Tensor]:
        """The positions of this rank's rows of the batches `numbers`, several batches together where they follow each other."""
        size = self.batch_size
        if numbers.step == 1:
            pieces = order.pieces(self._chunk * size, numbers.start * size, numbers.stop * size)
        else:
            pieces = (order.slice(number * size, (number + 1) * size) for number in numbers)
        if self.world.size == 1:
            yield from pieces
            return
        # Whole batches have one shape and are cut together; a last, partial one is cut by itself.
        for piece in pieces:
            whole = len(piece) // size * size
            if whole:
                yield piece[:whole].view(-1, size)[:, self._rows(size)].reshape(-1)
            if whole < len(piece):
                yield piece[whole:][self._rows(len(piece) - whole)]

    def _places(self, positions: Tensor) -> Tensor:
        """The samples of the data set at positions of the split; with `draws` both may have the numbers of draws."""
        if self.draws is None:
            return self._plan.indices[positions]
        samples: Tensor = sample_of(positions)
        return positions - samples + self._plan.indices[samples]

    def _rows(self, samples: int) -> slice:
        """This rank's rows of a batch; the first row where it has none, as every rank has to take every step."""
        found = rows(samples, self.world.rank, self.world.size)
        return found if found.start < found.stop else slice(0, 1)

    def _mixed(self, mix: Mix, batches: Iterator[Batch], epoch: int, numbers: range) -> Iterator[Batch]:
        """Blend each batch as a whole, with the rows of the other ranks if there are any, and keep the own ones."""
        for batch, number in zip(batches, numbers, strict=False):
            (images, targets), indices, own = batch.data, batch.indices, slice(None)
            if self.world.size > 1:
                samples = min(self.batch_size, self.samples - number * self.batch_size)
                own = self._rows(samples)
                parts = images, targets, indices
                images, targets, indices = (gathered_rows(each, samples, self.world) for each in parts)
            images, targets = mix(images, targets, indices, epoch)
            yield Batch((images[own], targets[own]), batch.indices)

    def _prepared(self, copied: Iterator[tuple[Any, Tensor]], epoch: int) -> Iterator[Batch]:
        own = self._rows(self.batch_size)
        size = own.stop - own.start
        for data, places in copied:
            if self.prepare is not None:
                data = self.prepare(data, places, epoch)
            if len(places) <= size:
                yield Batch(data, places)
                continue
            # Several batches were prepared together, and are cut apart again
            images, targets = data
            pieces = torch.split(images, size)
            bytes_of_batch = size * images.shape[1:].numel() * images.element_size()
            if bytes_of_batch % _ALIGNMENT.get(self.device.type, _ALIGNMENT_ELSEWHERE):
                pieces = tuple(piece.clone() for piece in pieces)
            yield from map(Batch, zip(pieces, torch.split(targets, size), strict=True), torch.split(places, size))

    def close(self) -> None:
        """End worker processes."""


class MemoryLoader(Loader):
    """Batches gathered from tensors in memory; the other arguments are those of `Loader`.

    Args:
        images: uint8 (N, C, H, W) of the whole data set, where they stay: on the device, in RAM or in a file.
        targets: (N, ...) likewise.
        source_of: (samples, epoch) -> samples to read instead, int64 (B,) on the CPU; None for the samples themselves.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        plan: BatchPlan,
        device: torch.device,
        source_of: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        super().__init__(plan, device)
        self._images, self._targets, self._source_of = images, targets, source_of
        self._prefetches = images.device != device
        if plan.prepare is None or plan.prepare.per_sample:
            bytes_of_batch = max(1, self.batch_size * images.shape[1:].numel() * 4)
            self._chunk = max(1, _CHUNK_BYTES.get(device.type, _CHUNK_BYTES_ELSEWHERE) // bytes_of_batch)

    def _copied(self, places: Iterator[Tensor], epoch: int) -> Iterator[tuple[Any, Tensor]]:
        home, device = self._images.device, self.device
        for some in places:
            chosen = sources = _moved(some, home)
            if self._source_of is not None:
                sources = _moved(self._source_of(sample_of(some), epoch), home)
            elif self.draws is not None:
                sources = sample_of(chosen)
            images, targets = self._images.index_select(0, sources), self._targets.index_select(0, sources)
            yield (_moved(images, device), _moved(targets, device)), _moved(chosen, device)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; the copy is not waited for."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def prefetch_to_cuda(batches: Iterator[Tensors], device: torch.device) -> Iterator[Tensors]:
    """The same tuples of tensors, each made one ahead on its own stream; elsewhere, each when it is requested.

    The producer must use no stateful generator: one batch is always made before it is requested, and a checkpoint written in
    between must not depend on that.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The inputs of batches, such as the statistics of the normalisation, were computed on the other stream.
    side.wait_stream(torch.cuda.current_stream(device))

    def made() -> Tensors | None:
        with torch.cuda.stream(side):
            return next(batches, None)

    # The batch after the current one is made while the device trains on this one
    upcoming = made()
    while upcoming is not None:
        batch = upcoming
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for tensor in tensors_in(batch):
            # Their memory belongs to the side stream, which must not reuse it before this one is done with them.
            tensor.record_stream(current)
        upcoming = made()
        yield batch
