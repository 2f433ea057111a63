"""Statistics of a split from one pass over its images: targets, value ranges, digests and thumbnails."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.sampler import Indices
from runner.data.samples import SampleTransform, SeededDataset, as_target, as_tensor
from runner.data.sources.arrays import ImageArrays
from runner.data.splits import targets_of

_SIDE = 16  # pixels of a thumbnail
_WHOLE_BYTES = 2**28  # of images in memory that are all measured
_CHUNK = 2048


@dataclass
class SplitStats:
    """Statistics of the N images of a split that were measured, in a random order, stratified over the classes."""

    name: str
    dataset: Dataset[Any]
    samples: int  # of the split
    shapes: Counter[tuple[int, ...]]
    dtypes: Counter[str]
    unreadable: dict[int, str]  # the error by index of images that could not be read
    digests: list[bytes]  # hashes of the bytes of each image
    thumbnails: Tensor  # averaged to 16 by 16 pixels, float32 (N, C, h, w); none if their sizes differ
    indices: Tensor  # in the data set, int64 (N,)
    targets: Tensor  # (N, ...)
    low: Tensor  # smallest value of each image, float32 (N,); uint8 values are divided by 255
    high: Tensor  # largest value, (N,)
    means: Tensor  # of each channel, float32 (N, C)
    stds: Tensor  # (N, C)

    @property
    def read(self) -> int:
        """Number of images that were read, including those that failed."""
        return sum(self.shapes.values()) + len(self.unreadable)

    @property
    def finite(self) -> Tensor:
        """Which images hold finite values only, bool (N,)."""
        return self.low.isfinite() & self.high.isfinite() & self.means.isfinite().all(1)

    @property
    def constant(self) -> Tensor:
        """Which images hold a single value, bool (N,)."""
        return self.low == self.high

    def channel_statistics(self) -> Tensor:
        """Mean and standard deviation of each channel over all finite images, float64 (2, C); NaN if there are none."""
        means, stds = self.means[self.finite].double(), self.stds[self.finite].double()
        mean = means.mean(0)
        return torch.stack([mean, ((stds**2 + means**2).mean(0) - mean**2).clamp_min(0).sqrt()])

    def pictures(self, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Thumbnails of at most `most` finite images (M, C, h, w), their targets and their indices."""
        rows = self.finite[: len(self.thumbnails)].nonzero().flatten()[:most]
        return self.thumbnails[rows], self.targets[rows], self.indices[rows]


def is_classes(targets: Tensor) -> bool:
    """True for class numbers, one per sample."""
    return targets.ndim == 1 and not targets.is_floating_point()


def known_targets(part: tuple[Dataset[Any], Indices]) -> Tensor | None:
    """Targets of all samples of a split, if the data set knows them without reading images."""
    dataset, indices = part
    known = targets_of(dataset)
    return known[indices[:]] if known is not None and len(known) == len(dataset) else None  # type: ignore[arg-type]


def stratified_order(targets: Tensor | None, samples: int, seed: int) -> Tensor:
    """A random order of all samples in which every prefix is a stratified sample, int64 (N,).

    The first sample of each class comes first. After that each class advances in proportion to its size. `targets` are
    class numbers, int64 (N,), or None if they are not known without reading.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(samples, generator=generator)
    if targets is None:
        return order
    _, kinds, counts = torch.unique(targets[order], return_inverse=True, return_counts=True)
    rank = torch.empty_like(kinds)  # of each sample among those of its class
    rank[kinds.argsort(stable=True)] = torch.arange(samples) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    share = (rank + torch.rand(samples, generator=generator)) / counts[kinds]
    return order[torch.where(rank == 0, share - 1, share).argsort()]


def compute_split_stats(
    name: str, part: tuple[Dataset[Any], Indices], transforms: Sequence[SampleTransform], most: int, seed: int
) -> SplitStats:
    """Measure a split: all of it if it is small and in memory, otherwise a random sample of `most` images.

    `part` is the data set and which of its samples are in the split.
    """
    dataset, indices = part
    known = known_targets(part)
    # All classes should be in the sample, also the rare ones
    order = stratified_order(known if known is not None and is_classes(known) else None, len(indices), seed)
    none, no_channels = torch.zeros(0), torch.zeros(0, 1)
    found = SplitStats(
        *(name, dataset, len(indices), Counter(), Counter(), {}, [], torch.zeros(0, 1, 1, 1)),
        *(none.long(), none.long(), none, none, no_channels, no_channels),
    )
    source: Iterator[tuple[Tensor, Tensor, Tensor]]
    # Images in memory are measured in large pieces, files one after the other
    if isinstance(dataset, ImageArrays) and not transforms:
        whole = order[: max(most, _WHOLE_BYTES // dataset.images[0].numel())]
        source = ((rows, dataset.images[rows], dataset.targets[rows]) for rows in torch.split(indices[whole], _CHUNK))
    else:
        source = _one_by_one(SeededDataset(dataset, 0, transforms), indices[order[:most]].tolist(), found.unreadable)
    columns: list[tuple[Tensor, ...]] = []
    for rows, images, targets in source:
        found.shapes[tuple(images.shape[1:])] += len(rows)
        found.dtypes[str(images.dtype).removeprefix("torch.")] += len(rows)
        pixels = scaled(images).flatten(2)
        measured = rows, targets, pixels.amin((1, 2)), pixels.amax((1, 2)), pixels.mean(2), pixels.std(2, correction=0)
        if columns and any(a.shape[1:] != b.shape[1:] for a, b in zip(measured, columns[0][1:], strict=True)):
            continue  # other channels or another target shape than the first: counted only
        columns.append((thumbnails(scaled(images)), *measured))
        # Digests find duplicates without keeping the images
        numbers = images.contiguous().flatten(1).view(torch.uint8).numpy()
        found.digests += [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in numbers]
    if columns:
        small, *others = zip(*columns, strict=True)
        if len({each.shape[1:] for each in small}) == 1:
            found.thumbnails = torch.cat(small)
        found.indices, found.targets, found.low, found.high, found.means, found.stds = map(torch.cat, others)
    return found


def _one_by_one(
    seeded: SeededDataset, indices: Sequence[int], unreadable: dict[int, str]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Index, image and target of each sample, as batches of one; adds the error of those that cannot be read."""
    for index in indices:
        try:
            image, target = seeded[0, index]
            image, target = as_tensor(image), as_target(target)
        except MemoryError:
            raise
        except Exception as error:  # a decoder or a custom data set can raise anything
            unreadable[index] = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            yield torch.tensor([index]), image[None], target[None]


def scaled(images: Tensor) -> Tensor:
    """Images as float32; uint8 values are divided by 255."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def thumbnails(images: Tensor, side: int = _SIDE) -> Tensor:
    """Copies of (N, C, H, W) averaged to at most `side` pixels a side."""
    size = (min(side, images.shape[2]), min(side, images.shape[3]))
    return F.adaptive_avg_pool2d(images, size) if images.shape[2:] != size else images
