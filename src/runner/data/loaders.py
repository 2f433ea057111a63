"""Batches for the engine: gathered from tensors in memory, or read sample by sample (`runner.data.workers`).

Batch k of an epoch is slice k of `EpochOrder`, and the random numbers of a sample depend on (seed, epoch, sample) alone. So a
run has the same bits either way, and resuming starts at a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from runner.base.errors import UserError
from runner.data.sampler import EpochOrder, Indices, sample_of
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


class Prepare(Protocol):
    """Prepares images on the device, see `runner.data.transforms.augment.Pipeline`.

    `per_sample` is whether a sample gets the same result in any batch, and no stateful generator is used.
    """

    per_sample: bool

    def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Transform and normalise a batch."""
        ...


class Fields:
    """Normalises those fields of the data of a batch that are images; all others stay as they are.

    Args:
        names: keys of a mapping, or places in a tuple, of tensors (B, C, H, W) or lists of B tensors (C, H, W).
        prepare: normalises images.
        dtype: of images; with float64, of all floating-point numbers.
    """

    per_sample = True

    def __init__(self, names: Sequence[str], prepare: Prepare, dtype: torch.dtype = torch.float32) -> None:
        self._names, self._prepare, self._wide = tuple(names), prepare, dtype == torch.float64

    def of(self, data: Any) -> Any:
        """The data with normalised images; raises `UserError` if a field is not there or holds no images."""
        if self._names and isinstance(data, Tensor):
            problem = f"names {', '.join(self._names)}, and a batch is one tensor, which has no fields"
            raise UserError("data.images", problem, "[], or samples that are tuples or dicts")
        for name in self._names:
            try:
                key = name if isinstance(data, Mapping) else range(len(data)).index(int(name))
                changed = self._normalised(data[key])
            except (KeyError, IndexError, TypeError, ValueError) as error:
                names = ", ".join(map(str, data)) if isinstance(data, Mapping) else f"0 to {len(data) - 1}"
                raise UserError("data.images", f"'{name}' names no field of images of a batch", names) from error
            if isinstance(data, Mapping):
                data = {**data, key: changed}
            else:
                fields = [changed if place == key else field for place, field in enumerate(data)]
                data = data._make(fields) if hasattr(data, "_make") else tuple(fields)
        if self._wide:
            data = mapped_items(data, Tensor, lambda each: each.double() if each.is_floating_point() else each)
        return data

    def _normalised(self, images: Any) -> Any:
        if isinstance(images, Tensor):
            return self._prepare(images, torch.zeros(len(images), dtype=torch.int64, device=images.device), 0)
        return [self._normalised(image[None])[0] for image in images]


Mix = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Blends samples of a batch: (images, targets, indices, epoch) -> (images, targets)."""
Tensors = TypeVar("Tensors", bound=tuple[Any, ...])


@dataclass(frozen=True)
class BatchPlan:
    """The samples of a split, and how they are divided into batches; `seed` is that of their order, which `shuffle=False` keeps."""

    indices: Indices
    batch_size: int
    seed: int = 0
    shuffle: bool = False


class Loader:
    """The batches of a split.

    The last batch of an epoch may be smaller. Without `prepare` and `mix_batch`, images and targets are those of the data set.
    """

    workers: int | None = None  # processes that read the samples, 0 where this one does; None if they are in memory
    resident: torch.device | None = None  # where the images are in memory; None if they are read

    def __init__(
        self,
        plan: BatchPlan,
        device: torch.device,
        *,
        prepare: Prepare | Fields | None = None,
        mix_batch: Mix | None = None,
    ) -> None:
        self.samples, self.batch_size = len(plan.indices), plan.batch_size
        self._plan, self._device, self._prepare, self._mix = plan, device, prepare, mix_batch
        self._chunk = 1  # batches that are made together
        self._prefetches = True
        self.world = World()  # of which each rank gets its rows of every batch
        self.draws: Callable[[int], EpochOrder] | None = None  # gives another order of an epoch; see `sample_of`

    def _copied(self, places: Iterator[Tensor], epoch: int) -> Iterator[tuple[Any, Tensor]]:
        """Data and places on the device, in the same pieces; see `sample_of`."""
        raise NotImplementedError

    def batches(self, epoch: int, start: int, stop: int, step: int = 1) -> Iterator[Batch]:
        """Batches `start` to `stop` - 1 of an epoch, or every `step`-th of them; of each batch the rows of this rank."""
        # The order is a function of seed and epoch, so any part of it can be computed without the rest
        size, order = self.batch_size, EpochOrder(self.samples, self._plan.seed, epoch, self._plan.shuffle)
        if self.draws is not None:
            order = self.draws(epoch)
            if order.samples != self.samples:
                problem = f"gives {order.samples:,} samples in epoch {epoch + 1}, and {self.samples:,} in the first one"
                raise UserError("data.batch_sampler", problem, "the same number in each epoch")
        # One rank and all batches: positions can be computed many batches at a time.
        if self.world.size == step == 1:
            pieces = order.pieces(self._chunk * size, start * size, stop * size)
        else:
            pieces = self._own_pieces(order, range(start, stop, step))
        copied = self._copied((self._places(positions) for positions in pieces), epoch)
        # Only what uses no stateful generator may run before it is requested.
        early = self._prepare is None or self._prepare.per_sample
        # Random numbers of samples are keyed by their number, so preparing ahead does not change them
        if self._prefetches and not early:
            copied = prefetch_to_cuda(copied, self._device)
        batches = self._prepared(copied, epoch)
        if self._prefetches and early:
            batches = prefetch_to_cuda(batches, self._device)
        # Mixing takes two samples of one batch, so it comes after everything that treats them alone
        mix = self._mix
        if mix is not None and self.world.size > 1:
            batches = self._mixed(mix, batches, epoch, range(start, stop, step))
        elif mix is not None:
            batches = (
                Batch(mix(batch.images, batch.targets, batch.indices, epoch), batch.indices) for batch in batches
            )
        # Callers want the numbers of the samples
        return (
            batches if self.draws is None else (batch._replace(indices=sample_of(batch.indices)) for batch in batches)
        )

    def _places(self, positions: Tensor) -> Tensor:
        """The samples of the data set at positions of the split; with `draws` both may have the numbers of draws."""
        if self.draws is None:
            return self._plan.indices[positions]
        samples: Tensor = sample_of(positions)
        return positions - samples + self._plan.indices[samples]

    def _own_pieces(self, order: EpochOrder, numbers: range) -> Iterator[Tensor]:
        """The positions of this rank's rows of the batches `numbers`, several batches together where they are whole."""
        size, whole = self.batch_size, self.samples // self.batch_size
        at_once = self._chunk if numbers.step == 1 else 1
        # Whole batches have one shape and are gathered together; the last, partial one is cut by itself.
        for first in range(numbers.start, numbers.stop, at_once * numbers.step):
            last = min(first + at_once, numbers.stop)
            if first < whole:
                last = min(last, whole)
                positions = order.slice(first * size, last * size).view(last - first, size)
                yield positions[:, self._rows(size)].reshape(-1)
            for partial in range(max(first, whole), min(first + at_once, numbers.stop)):
                positions = order.slice(partial * size, (partial + 1) * size)
                yield positions[self._rows(len(positions))]

    def _rows(self, samples: int) -> slice:
        """This rank's rows of a batch; the first row where it has none, as every rank has to take every step."""
        found = rows(samples, self.world.rank, self.world.size)
        return found if found.start < found.stop else slice(0, 1)

    def _mixed(self, mix: Mix, batches: Iterator[Batch], epoch: int, numbers: range) -> Iterator[Batch]:
        """Blend each batch as a whole, with the rows of the other ranks, and keep the own ones."""
        for number, batch in zip(numbers, batches, strict=True):
            samples = min(self.batch_size, self.samples - number * self.batch_size)
            whole = [
                gathered_rows(tensor, samples, self.world) for tensor in (batch.images, batch.targets, batch.indices)
            ]
            images, targets = mix(whole[0], whole[1], whole[2], epoch)
            own = self._rows(samples)
            yield Batch((images[own], targets[own]), batch.indices)

    def _prepared(self, copied: Iterator[tuple[Any, Tensor]], epoch: int) -> Iterator[Batch]:
        own = self._rows(self.batch_size)
        size = own.stop - own.start
        for data, places in copied:
            if isinstance(self._prepare, Fields):
                yield Batch(self._prepare.of(data), places)
                continue
            images, targets = data
            if self._prepare is not None:
                images = self._prepare(images, places, epoch)
            if len(images) <= size:
                yield Batch((images, targets), places)
                continue
            # Several batches were prepared together, and are cut apart again
            pieces = torch.split(images, size)
            bytes_of_batch = size * images.shape[1:].numel() * images.element_size()
            if bytes_of_batch % _ALIGNMENT.get(self._device.type, _ALIGNMENT_ELSEWHERE):
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
        *,
        prepare: Prepare | None = None,
        mix_batch: Mix | None = None,
        source_of: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        super().__init__(plan, device, prepare=prepare, mix_batch=mix_batch)
        self._images, self._targets, self._source_of = images, targets, source_of
        self.resident, self._prefetches = images.device, images.device != device
        if prepare is None or prepare.per_sample:
            bytes_of_batch = max(1, self.batch_size * images.shape[1:].numel() * 4)
            self._chunk = max(1, _CHUNK_BYTES.get(device.type, _CHUNK_BYTES_ELSEWHERE) // bytes_of_batch)

    def _copied(self, places: Iterator[Tensor], epoch: int) -> Iterator[tuple[Any, Tensor]]:
        home, device = self._images.device, self._device
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
    """The same tuples of tensors, each made one ahead on its own stream; on other devices than CUDA, just `batches`.

    The producer must use no stateful generator: one batch is always made before it is requested, and a checkpoint written in
    between must not depend on that.
    """
    return _ahead(batches, device) if device.type == "cuda" else batches


def _ahead(batches: Iterator[Tensors], device: torch.device) -> Iterator[Tensors]:
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
