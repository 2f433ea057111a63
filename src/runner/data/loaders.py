"""Batches for the engine, and the loader that makes them from tensors in memory.

The same batches come from tensors in memory, or from workers that read sample by sample (`runner.data.workers`). Batch k of
an epoch is slice k of `EpochOrder`, and the random numbers of a sample depend on (seed, epoch, sample) alone. So a run has the
same bits either way, and resuming starts at a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from runner.data.cuda_prefetch import prefetch_to_cuda
from runner.data.indices import Indices
from runner.data.sampler import EpochOrder
from runner.data.sources.stored_images import StoredImages

# Batches are gathered and prepared many at a time, as many as fit into a cache (CPU) or hide launches (GPU).
_CHUNK_BYTES = {"cpu": 2**21}
_CHUNK_BYTES_ELSEWHERE = 2**26
# Slices start at the alignment of an allocation: matrix libraries round differently on other addresses.
_ALIGNMENT = {"cpu": 64}
_ALIGNMENT_ELSEWHERE = 512


class Batch(NamedTuple):
    """Samples on the device.

    Attributes:
        images: (B, C, H, W), as the model takes them.
        targets: (B,) int64 classes or (B, ...) float values.
        indices: identity of each sample in its data set, (B,) int64.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor


class Prepare(Protocol):
    """Prepares images on the device, see `runner.data.transforms.augment.Pipeline`.

    `per_sample` is whether a sample gets the same result in any batch, and no stateful generator is used.
    """

    per_sample: bool

    def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Transform and normalise a batch."""
        ...


Mix = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Blends samples of a batch: (images, targets, indices, epoch) -> (images, targets)."""


class Loader(Protocol):
    """A source of batches for the engine."""

    samples: int
    batch_size: int

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        """Batches `start` to `stop` - 1 of an epoch."""
        ...

    def close(self) -> None:
        """End worker processes."""
        ...


class MemoryLoader:
    """Batches gathered from tensors in memory.

    Args:
        images: uint8 (N, C, H, W) of the whole data set, where they stay: on the device, in RAM or in a file.
        targets: (N, ...) likewise.
        indices: samples of this split.
        batch_size: samples of a batch; the last one of an epoch may be smaller.
        seed: seed of the sample order.
        shuffle: False keeps the order of `indices`.
        device: where batches are wanted.
        prepare: prepares images on the device; None keeps them as in the data set.
        mix_batch: blends the samples of a batch; None for nothing.
        source_of: (samples, epoch) -> samples to read instead, int64 (B,) on the CPU; None for the samples themselves.
    """

    def __init__(
        self,
        images: Tensor | StoredImages,
        targets: Tensor,
        indices: Indices,
        batch_size: int,
        seed: int,
        shuffle: bool,
        device: torch.device,
        prepare: Prepare | None = None,
        mix_batch: Mix | None = None,
        source_of: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        self.samples = len(indices)
        self.batch_size = batch_size
        self._images, self._targets = images, targets
        self._indices = indices
        self._seed, self._shuffle, self._device = seed, shuffle, device
        self._prepare, self._mix, self._source_of = prepare, mix_batch, source_of
        self._chunk = self._batches_at_once()

    def _batches_at_once(self) -> int:
        """Batches that are gathered together; each batch is a slice of them."""
        if self._prepare is not None and not self._prepare.per_sample:
            return 1
        bytes_of_batch = max(1, self.batch_size * self._images.shape[1:].numel() * 4)
        return max(1, _CHUNK_BYTES.get(self._device.type, _CHUNK_BYTES_ELSEWHERE) // bytes_of_batch)

    def _starts_right(self, images: Tensor) -> bool:
        """Whether each batch of a chunk is aligned like an allocation."""
        bytes_of_batch = self.batch_size * images.shape[1:].numel() * images.element_size()
        return bytes_of_batch % _ALIGNMENT.get(self._device.type, _ALIGNMENT_ELSEWHERE) == 0

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        """Batches `start` to `stop` - 1 of an epoch."""
        batches = self._gathered(epoch, start, stop)
        # Only what uses no stateful generator may run before it is requested.
        if self._images.device != self._device and (self._prepare is None or self._prepare.per_sample):
            batches = prefetch_to_cuda(batches, self._device)
        return mixed(batches, self._mix, epoch)

    def _gathered(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        size = self.batch_size
        order = EpochOrder(self.samples, self._seed, epoch, self._shuffle)
        for positions in order.pieces(self._chunk * size, start * size, stop * size):
            samples = self._indices[positions]
            chosen = _moved(samples, self._images.device)
            sources = chosen
            if self._source_of is not None:
                sources = _moved(self._source_of(samples, epoch), self._images.device)
            images, targets, places = (
                self._on_device(tensor)
                for tensor in (self._images.index_select(0, sources), self._targets.index_select(0, sources), chosen)
            )
            if self._prepare is not None:
                images = self._prepare(images, places, epoch)
            pieces = images.split(size)  # type: ignore[no-untyped-call]
            if not self._starts_right(images):  # transforms may have changed the size
                pieces = tuple(piece.clone() for piece in pieces)
            parts = (pieces, *(torch.split(tensor, size) for tensor in (targets, places)))
            for some, theirs, where in zip(*parts, strict=True):
                yield Batch(some, theirs, where)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return _moved(tensor, self._device)

    def close(self) -> None:
        """Nothing to end."""


def mixed(batches: Iterator[Batch], mix_batch: Mix | None, epoch: int) -> Iterator[Batch]:
    """Batches whose samples are blended; the batches themselves where `mix_batch` is None."""
    return batches if mix_batch is None else (Batch(*mix_batch(*batch, epoch), batch.indices) for batch in batches)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; the copy is not waited for."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
