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
    """Statistics of the N images of a split that were measured."""

    name: str
    dataset: Dataset[Any]
    samples: int  # of the split
    shapes: Counter[tuple[int, ...]]
    dtypes: Counter[str]
    whole_numbers: bool  # whether float images hold whole numbers only
    unreadable: dict[int, str]  # the error by index of images that could not be read
    digests: list[bytes]  # hashes of the bytes of each image
    thumbnails: Tensor  # M of the images, averaged to 16 by 16 pixels, float32 (M, C, h, w)
    thumbnail_rows: Tensor  # their positions among the N, int64 (M,)
    grey: Tensor  # all images averaged in the same way, without color, float32 (N, 1, h, w); as thumbnails, empty if they differ
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


def is_classes(targets: Tensor) -> bool:
    """Whether targets are class numbers, one per sample."""
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
    name: str,
    part: tuple[Dataset[Any], Indices],
    transforms: Sequence[SampleTransform],
    most: int,
    seed: int,
) -> SplitStats:
    """Measure a split: all of it if it is small and in memory, otherwise a random sample, stratified over the classes.

    `part` is the data set and which of its samples are in the split. At most `most` images are read one by one, and at most
    as many thumbnails are made.
    """
    dataset, indices = part
    known = known_targets(part)
    order = stratified_order(known if known is not None and is_classes(known) else None, len(indices), seed)
    unreadable: dict[int, str] = {}

    def one_by_one() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        seeded = SeededDataset(dataset, 0, transforms)
        for index in indices[order[:most]].tolist():
            try:
                image, target = seeded[0, index]
                image, target = as_tensor(image), as_target(target)
            except MemoryError:
                raise
            except Exception as error:  # a decoder or a custom data set can raise anything
                unreadable[index] = " ".join(f"{type(error).__name__}: {error}".split())
            else:
                yield torch.tensor([index]), image[None], target[None]

    source: Iterator[tuple[Tensor, Tensor, Tensor]]
    if isinstance(dataset, ImageArrays) and not transforms:
        places, rank = order[: max(most, _WHOLE_BYTES // dataset.images[0].numel())].sort()
        shown, chunks = rank < most, torch.split(indices[places], _CHUNK)
        source = ((rows, dataset.images[rows], dataset.targets[rows]) for rows in chunks)
    else:
        shown = torch.ones(most, dtype=torch.bool)
        source = one_by_one()
    shapes: Counter[tuple[int, ...]] = Counter()
    dtypes: Counter[str] = Counter()
    columns: list[tuple[Tensor, ...]] = []
    small: list[Tensor] = []
    grey: list[Tensor] = []
    digests: list[bytes] = []
    whole_numbers = True
    for rows, images, targets in source:
        shapes[tuple(images.shape[1:])] += len(rows)
        dtypes[str(images.dtype).removeprefix("torch.")] += len(rows)
        if columns and (images.shape[1] != columns[0][-1].shape[1] or targets.shape[1:] != columns[0][1].shape[1:]):
            continue  # other channels or another target shape than the first: counted only
        if images.is_floating_point():
            whole_numbers = whole_numbers and bool((images == images.round()).all())
        averaged = thumbnails(_scaled(images))
        small.append(averaged[shown[len(digests) : len(digests) + len(rows)]])
        grey.append(averaged.mean(1, keepdim=True))
        pixels = images.contiguous().flatten(1).view(torch.uint8).numpy()
        digests += [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in pixels]
        columns.append((rows, targets, *_measured(images)))
    if len({each.shape[1:] for each in small}) != 1:
        small, grey, shown = [torch.zeros(0, 1, 1, 1)], [torch.zeros(0, 1, 1, 1)], shown[:0]
    none = torch.zeros(0, dtype=torch.int64)
    return SplitStats(
        *(name, dataset, len(indices), shapes, dtypes, whole_numbers, unreadable, digests),
        *(torch.cat(small), shown[: len(digests)].nonzero().flatten(), torch.cat(grey)),
        *map(torch.cat, zip(*(columns or [(none, none, *_measured(torch.zeros(0, 1, 1, 1)))]), strict=True)),
    )


def _measured(images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Smallest and largest value of each image of a batch, mean and deviation of its channels."""
    pixels = _scaled(images).flatten(2)
    return pixels.amin((1, 2)), pixels.amax((1, 2)), pixels.mean(2), pixels.std(2, unbiased=False)


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def thumbnails(images: Tensor, side: int = _SIDE) -> Tensor:
    """Copies of (N, C, H, W) averaged to at most `side` pixels a side."""
    size = (min(side, images.shape[2]), min(side, images.shape[3]))
    return F.adaptive_avg_pool2d(images, size) if images.shape[2:] != size else images
