"""Statistics of a split from one pass over its images: targets, value ranges, digests and thumbnails."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.sampler import Indices
from runner.data.samples import SampleTransform, SeededDataset, as_target, as_tensor
from runner.data.sources.arrays import ImageArrays
from runner.data.splits import targets_of

THUMBNAIL_SIDE = 16
_WHOLE_BYTES = 2**28  # of images in memory that are all measured
_CHUNK = 2048
_KEPT_BYTES = 2**25  # of images that are read one by one
_Measured = tuple[Tensor, Tensor, Tensor, Tensor, list[bytes]]  # low, high, means, stds and digests


@dataclass
class SplitStats:
    """Statistics of the images of a split that were measured.

    Attributes:
        name: of the split.
        dataset: the data set that the split is read from.
        samples: samples of the split.
        asked: samples that were to be measured.
        indices: which samples were, int64 (N,).
        targets: theirs, (N, ...).
        low, high: smallest and largest value of each image, float32 (N,); uint8 values are divided by 255.
        means, stds: of each image's channels, float32 (N, C).
        digests: hashes of the bytes of each image.
        thumbnails: at most `samples` of the images averaged to 16 by 16 pixels, float32 (M, C, h, w).
        thumbnail_rows: positions of these images among the N, int64 (M,).
        shapes, dtypes: number of images of each.
        whole_numbers: whether float images hold whole numbers only.
        unreadable: the error by index of images that could not be read.
        kept: image and target by index of the first images that were read one by one, so that they are read once.
    """

    name: str
    dataset: Dataset[Any]
    samples: int
    asked: int
    indices: Tensor
    targets: Tensor
    low: Tensor
    high: Tensor
    means: Tensor
    stds: Tensor
    digests: list[bytes]
    thumbnails: Tensor
    thumbnail_rows: Tensor
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    whole_numbers: bool = True
    unreadable: dict[int, str] = field(default_factory=dict)
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def read(self) -> int:
        """Number of images that were read, including those that failed."""
        return max(sum(self.shapes.values()), len(self.indices)) + len(self.unreadable)

    @property
    def finite(self) -> Tensor:
        """Which images hold finite values only, bool (N,)."""
        return self.low.isfinite() & self.high.isfinite() & self.means.isfinite().all(1)

    @property
    def constant(self) -> Tensor:
        """Which images hold a single value, bool (N,)."""
        return self.low == self.high

    def channel_statistics(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation of each channel over all finite images, float64 (C,); None if there are none."""
        good = self.finite
        if not bool(good.any()):
            return None
        means, stds = self.means[good].double(), self.stds[good].double()
        mean = means.mean(0)
        return mean, ((stds**2 + means**2).mean(0) - mean**2).clamp_min(0).sqrt()


def stratified_order(targets: Tensor | None, samples: int, seed: int) -> Tensor:
    """A random order of all samples in which every prefix is a stratified sample.

    The first sample of each class comes first. After that each class advances in proportion to its size.

    Args:
        targets: class numbers, int64 (N,), or None if they are not known without reading.
        samples: N.
        seed: of the order.

    Returns:
        int64 (N,).
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
    in_time: Callable[[int], bool],
) -> SplitStats:
    """Measure a split: all of it if it is small and in memory, otherwise a random sample, stratified over the classes.

    Args:
        name: of the split.
        part: the data set that it is read from, and which of its samples are in the split.
        transforms: of one image, as for an evaluation.
        most: images to read one by one, and to keep thumbnails of.
        seed: of the sample.
        in_time: called with the number of images read so far before each image is read from disk; False stops reading.
    """
    dataset, indices = part
    known = targets_of(dataset)
    classes = known is not None and known.ndim == 1 and not known.is_floating_point() and len(known) == len(dataset)  # type: ignore[arg-type]
    order = stratified_order(known[indices[:]] if known is not None and classes else None, len(indices), seed)
    if isinstance(dataset, ImageArrays) and not transforms:
        return _measure_in_memory(name, dataset, indices, order, most)
    return _measure_one_by_one(name, part, order[:most], transforms, in_time)


def _measure_in_memory(name: str, dataset: ImageArrays, indices: Indices, order: Tensor, most: int) -> SplitStats:
    places, rank = order[: max(most, _WHOLE_BYTES // dataset.images[0].numel())].sort()
    chosen, rows = indices[places], (rank < most).nonzero().flatten()
    measured = _concatenate([_measure(dataset.images[part]) for part in torch.split(chosen, _CHUNK)])
    small, shape = thumbnails(_scaled(dataset.images[chosen[rows]])), tuple(dataset.images.shape[1:])
    counts: tuple[Any, Any] = Counter({shape: len(chosen)}), Counter({"uint8": len(chosen)})
    targets = dataset.targets[chosen]
    return SplitStats(name, dataset, len(indices), len(places), chosen, targets, *measured, small, rows, *counts)


def _measure_one_by_one(
    name: str,
    part: tuple[Dataset[Any], Indices],
    places: Tensor,
    transforms: Sequence[SampleTransform],
    in_time: Callable[[int], bool],
) -> SplitStats:
    dataset, indices = part
    keyed, whole, room = SeededDataset(dataset, 0, transforms), True, _KEPT_BYTES
    rows: list[tuple[int, Tensor, _Measured, Tensor]] = []  # index, target, measurements and thumbnail
    shapes: Counter[tuple[int, ...]] = Counter()
    dtypes: Counter[str] = Counter()
    unreadable: dict[int, str] = {}
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for read, index in enumerate(indices[places].tolist()):
        if not in_time(read):
            break
        try:
            image, target = keyed[0, index]
            image, target = as_tensor(image), as_target(target)
        except MemoryError:
            raise
        except Exception as error:  # a decoder or a custom data set can raise anything
            unreadable[index] = " ".join(f"{type(error).__name__}: {error}".split())
            continue
        shapes[tuple(image.shape)] += 1
        dtypes[str(image.dtype).removeprefix("torch.")] += 1
        if image.shape[0] != next(iter(shapes))[0] or (rows and target.shape != rows[0][1].shape):
            continue  # other channels or another target shape than the first: counted only
        if image.is_floating_point():
            whole = whole and bool((image == image.round()).all())
        if image.nbytes <= room:
            room -= image.nbytes
            kept[index] = image, target
        rows.append((index, target, _measure(image[None]), thumbnails(_scaled(image[None]))))
    chosen, targets, measured, small = zip(*rows, strict=True) if rows else ((), (), (), ())
    alike = len({tuple(image.shape) for image in small}) == 1
    return SplitStats(
        name,
        dataset,
        len(indices),
        len(places),
        torch.tensor(chosen, dtype=torch.int64),
        torch.stack(targets) if targets else torch.zeros(0, dtype=torch.int64),
        *_concatenate(measured or (_measure(torch.zeros(0, 1, 1, 1)),)),
        torch.cat(small) if alike else torch.zeros(0, 1, 1, 1),
        torch.arange(len(chosen) if alike else 0),
        *(shapes, dtypes, whole, unreadable, kept),
    )


def _measure(images: Tensor) -> _Measured:
    """Smallest and largest value, mean and deviation of the channels, and hash of each image of a batch."""
    rows = images.contiguous().flatten(1).view(torch.uint8).numpy()
    digests = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
    pixels = _scaled(images).flatten(2)
    return pixels.amin((1, 2)), pixels.amax((1, 2)), pixels.mean(2), pixels.std(2, unbiased=False), digests


def _concatenate(parts: Sequence[_Measured]) -> _Measured:
    low, high, means, stds, digests = zip(*parts, strict=True)
    return (
        torch.cat(low),
        torch.cat(high),
        torch.cat(means),
        torch.cat(stds),
        [each for some in digests for each in some],
    )


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def thumbnails(images: Tensor, side: int = THUMBNAIL_SIDE) -> Tensor:
    """Copies of (N, C, H, W) averaged to at most `side` pixels a side."""
    size = (min(side, images.shape[2]), min(side, images.shape[3]))
    return F.adaptive_avg_pool2d(images, size) if images.shape[2:] != size else images
