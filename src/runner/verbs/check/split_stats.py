"""What is seen of a split by reading its images once: targets, statistics and fingerprints of each, and small copies."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.indices import Indices
from runner.data.samples import SampleTransform, SeededDataset, as_target, as_tensor
from runner.data.sources.arrays import ImageArrays
from runner.data.splits import targets_of

_SIDE = 16  # of the small copies, in pixels
_WHOLE_BYTES = 2**28  # of images in memory that are looked at whole
_CHUNK = 2048
_KEPT_BYTES = 2**25  # of images that are read one by one


@dataclass
class SplitStats:
    """What was seen of a split.

    Attributes:
        name: of the split.
        dataset: that it is read from.
        samples: how many it has.
        asked: how many were to be looked at.
        indices: identities of those that were looked at, int64 (N,).
        targets: theirs, (N, ...).
        low, high: smallest and largest value of each image, float32 (N,); values of uint8 as a share of 255.
        means, stds: of each image's channels, float32 (N, C).
        digests: of the bytes of each image.
        small: copies of at most `samples` of the images, averaged to 16 by 16 pixels, float32 (M, C, h, w).
        rows: which of those that were looked at they are, int64 (M,).
        shapes, dtypes: how many images have which.
        whole_numbers: whether float images hold whole numbers alone.
        unreadable: reason by identity of those that could not be read.
        kept: image and target by identity of the first that were read one by one, so that they need not be read again.
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
    small: Tensor
    rows: Tensor
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    whole_numbers: bool = True
    unreadable: dict[int, str] = field(default_factory=dict)
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def read(self) -> int:
        """How many were looked at, those that could not be read among them."""
        return max(sum(self.shapes.values()), len(self.indices)) + len(self.unreadable)

    @property
    def finite(self) -> Tensor:
        """Which images hold finite values alone, bool (N,)."""
        return self.low.isfinite() & self.high.isfinite() & self.means.isfinite().all(1)

    @property
    def constant(self) -> Tensor:
        """Which images hold one and the same value, bool (N,)."""
        return self.low == self.high


def spread(samples: int, count: int) -> Tensor:
    """Evenly spread places, int64 of at most `count`; all of fewer samples."""
    return torch.arange(samples) if samples <= count else torch.arange(count) * samples // count


def drawn(targets: Tensor | None, samples: int, seed: int) -> Tensor:
    """All places in a random order of which every start is a stratified sample.

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


def look(
    name: str,
    dataset: Dataset[Any],
    indices: Indices,
    transforms: Sequence[SampleTransform],
    most: int,
    seed: int,
    in_time: Callable[[int], bool],
) -> SplitStats:
    """SplitStats at a split: at all of it if it is small and in memory, otherwise at a random sample, stratified over the classes.

    Args:
        name: of the split.
        dataset: that it is read from.
        indices: its samples in it.
        transforms: of one image, as for an evaluation.
        most: images to read one by one, and to keep small copies of.
        seed: of the sample.
        in_time: called with the number of images read so far, before each one that is read from disk; False stops reading.
    """
    known = targets_of(dataset)
    classes = known is not None and known.ndim == 1 and not known.is_floating_point() and len(known) == len(dataset)  # type: ignore[arg-type]
    order = drawn(known[indices[:]] if known is not None and classes else None, len(indices), seed)
    if isinstance(dataset, ImageArrays) and not transforms:
        return _in_memory(name, dataset, indices, order, most)
    return _one_by_one(name, dataset, indices, order[:most], transforms, in_time)


def _in_memory(name: str, dataset: ImageArrays, indices: Indices, order: Tensor, most: int) -> SplitStats:
    places, rank = order[: max(most, _WHOLE_BYTES // dataset.images[0].numel())].sort()
    chosen = indices[places]
    seen = _joined([_seen(dataset.images[part]) for part in torch.split(chosen, _CHUNK)])
    rows = (rank < most).nonzero().flatten()
    shapes, dtypes = Counter([tuple(dataset.images.shape[1:])] * len(chosen)), Counter(["uint8"] * len(chosen))
    small = _small(dataset.images[chosen[rows]])
    targets = dataset.targets[chosen]
    return SplitStats(name, dataset, len(indices), len(places), chosen, targets, *seen, small, rows, shapes, dtypes)


def _one_by_one(
    name: str,
    dataset: Dataset[Any],
    indices: Indices,
    places: Tensor,
    transforms: Sequence[SampleTransform],
    in_time: Callable[[int], bool],
) -> SplitStats:
    keyed = SeededDataset(dataset, 0, transforms)
    chosen: list[int] = []
    targets: list[Tensor] = []
    seen: list[_Seen] = []
    small: list[Tensor] = []
    shapes: Counter[tuple[int, ...]] = Counter()
    dtypes: Counter[str] = Counter()
    unreadable, whole = {}, True
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    room = _KEPT_BYTES
    for read, index in enumerate(indices[places].tolist()):
        if not in_time(read):
            break
        try:
            image, target = keyed[0, index]
            image, target = as_tensor(image), as_target(target)
        except MemoryError:
            raise
        except Exception as error:  # what a decoder or a data set of one's own raises has no end
            unreadable[index] = " ".join(f"{type(error).__name__}: {error}".split())
            continue
        shapes[tuple(image.shape)] += 1
        dtypes[str(image.dtype).removeprefix("torch.")] += 1
        if image.shape[0] != next(iter(shapes))[0] or (targets and target.shape != targets[0].shape):
            continue  # of other channels or targets than the first: counted, and no more
        if image.is_floating_point():
            whole = whole and bool((image == image.round()).all())
        if image.nbytes <= room:
            room -= image.nbytes
            kept[index] = image, target
        chosen.append(index)
        targets.append(target)
        seen.append(_seen(image[None]))
        small.append(_small(image[None]))
    none = torch.zeros(0)
    joined = _joined(seen) if seen else _Seen(none, none, none[:, None], none[:, None], [])
    alike = len({tuple(image.shape) for image in small}) == 1
    return SplitStats(
        name,
        dataset,
        len(indices),
        len(places),
        torch.tensor(chosen, dtype=torch.int64),
        torch.stack(targets) if targets else none.long(),
        *joined,
        torch.cat(small) if alike else none.view(0, 1, 1, 1),
        torch.arange(len(chosen) if alike else 0),
        shapes,
        dtypes,
        whole,
        unreadable,
        kept,
    )


class _Seen(NamedTuple):
    """Of each image of a batch: smallest and largest value, mean and deviation of the channels, digest."""

    low: Tensor
    high: Tensor
    means: Tensor
    stds: Tensor
    digests: list[bytes]


def _joined(parts: Sequence[_Seen]) -> _Seen:
    low, high, means, stds, digests = zip(*parts, strict=True)
    all_digests = [digest for some in digests for digest in some]
    return _Seen(torch.cat(low), torch.cat(high), torch.cat(means), torch.cat(stds), all_digests)


def _seen(images: Tensor) -> _Seen:
    raw = images.contiguous()
    digests = [
        hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        for row in raw.view(len(raw), -1).view(torch.uint8).numpy()
    ]
    pixels = _scaled(images).flatten(2)
    low, high = pixels.amin((1, 2)), pixels.amax((1, 2))
    return _Seen(low, high, pixels.mean(2), pixels.std(2, unbiased=False), digests)


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def _small(images: Tensor) -> Tensor:
    """Averaged to 16 by 16 pixels at most, with both sides alike for all images that are larger."""
    pixels = _scaled(images)
    side = (min(_SIDE, pixels.shape[2]), min(_SIDE, pixels.shape[3]))
    return F.adaptive_avg_pool2d(pixels, side) if pixels.shape[2:] != side else pixels
