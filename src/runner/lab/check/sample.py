"""Statistics of a split from one pass over its samples: targets, value ranges, digests and thumbnails; masks and boxes."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import PIL.Image
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as v2

from runner.config.schema.verbs import Check
from runner.data.loaders import Batch
from runner.data.sampler import Indices
from runner.data.samples import SampleTransform, SeededDataset, as_target, as_tensor
from runner.data.sources.arrays import ImageArrays
from runner.data.splits import targets_of
from runner.instrument.nested import leaves_of, named_tensors, parts_of_rows
from runner.lab.check.result import LIMITS

_SIDE = 16  # pixels of a thumbnail
_CHUNK = 2048
FORMAT = tv_tensors.BoundingBoxFormat
UPRIGHT = (FORMAT.XYXY, FORMAT.XYWH, FORMAT.CXCYWH)


@dataclass
class SplitStats:
    """Statistics of the N images of a split that were measured, in a random order, stratified over the classes."""

    name: str
    dataset: Dataset[Any]
    samples: int  # of the split
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    unreadable: dict[int, str] = field(default_factory=dict)  # the error by index of images that could not be read
    digests: list[bytes] = field(default_factory=list)  # hashes of the bytes of each image
    # averaged to 16 by 16 pixels, float32 (N, C, h, w); none if their sizes differ
    thumbnails: Tensor = field(default_factory=lambda: torch.zeros(0, 1, 1, 1))
    indices: Tensor = field(default_factory=lambda: torch.zeros(0).long())  # in the data set, int64 (N,)
    targets: Tensor = field(default_factory=lambda: torch.zeros(0).long())  # (N, ...)
    # smallest value of each image, float32 (N,); uint8 values are divided by 255
    low: Tensor = field(default_factory=lambda: torch.zeros(0))
    high: Tensor = field(default_factory=lambda: torch.zeros(0))  # largest value, (N,)
    means: Tensor = field(default_factory=lambda: torch.zeros(0, 1))  # of each channel, float32 (N, C)
    stds: Tensor = field(default_factory=lambda: torch.zeros(0, 1))  # (N, C)
    fractions: bool = False  # whether float images have values between whole numbers
    annotated: list[Any] = field(default_factory=list)  # see `Annotated`

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

    def pictures(self, most: int) -> tuple[Tensor, Tensor]:
        """Thumbnails of at most `most` finite images (M, C, h, w), and their targets."""
        rows = self.finite[: len(self.thumbnails)].nonzero().flatten()[:most]
        return self.thumbnails[rows], self.targets[rows]


def is_classes(targets: Tensor) -> bool:
    """True for class numbers, one per sample."""
    return targets.ndim == 1 and not targets.is_floating_point()


def known_targets(dataset: Dataset[Any], indices: Indices) -> Tensor | None:
    """Targets of all samples of a split, if the data set knows them without reading images."""
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


def measure_split(
    name: str, part: tuple[Dataset[Any], Indices], transforms: Sequence[SampleTransform], config: Check, pairs: bool
) -> SplitStats:
    """Measure the samples of a data set that are in a split: all if they are small and in memory, else random ones.

    Of samples that are not `pairs` of image and target, targets, thumbnails, and statistics of pixels are unknown.
    """
    (dataset, indices), most = part, config.samples
    known = known_targets(dataset, indices) if pairs else None
    # All classes should be in the sample, also the rare ones
    order = stratified_order(known if known is not None and is_classes(known) else None, len(indices), config.seed)
    found = SplitStats(name, dataset, len(indices))
    # Drawn samples, such as noise, should not equal those of another split
    seeded = SeededDataset(dataset, sum(name.encode()), transforms, pairs=pairs)
    if pairs and isinstance(dataset, ImageArrays) and not transforms:
        # Images in memory are measured in large pieces, files one after the other
        whole = indices[order[: max(most, LIMITS.whole_bytes // dataset.images[0].numel())]]
        _measure_pairs(found, ((rows, dataset.images[rows], dataset.targets[rows]) for rows in whole.split(_CHUNK)))
        return found
    samples = _readable(seeded, indices[order[:most]].tolist(), found.unreadable, pairs)
    if pairs:
        _measure_pairs(found, ((torch.tensor([index]), *sample) for index, sample in samples))
    else:
        _measure_whole(found, samples)
    return found


def _readable(
    seeded: SeededDataset, indices: Sequence[int], unreadable: dict[int, str], pairs: bool
) -> Iterator[tuple[int, Any]]:
    """The index of each sample and what is read of it; adds the error of those that cannot be read."""
    for index in indices:
        try:
            sample = seeded[0, index]
            if pairs:
                sample = as_tensor(sample[0])[None], as_target(sample[1])[None]
        except MemoryError:
            raise
        except Exception as error:  # a decoder or a custom data set can raise anything
            unreadable[index] = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            yield index, sample


def _measure_pairs(found: SplitStats, source: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Add pieces of indices (N,), images (N, C, H, W) and targets (N, ...)."""
    columns: list[tuple[Tensor, ...]] = []
    for rows, images, targets in source:
        found.shapes[tuple(images.shape[1:])] += len(rows)
        found.dtypes[str(images.dtype).removeprefix("torch.")] += len(rows)
        pixels = scaled(images).flatten(2)
        found.fractions |= images.is_floating_point() and not torch.equal(images, images.round())
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


def _measure_whole(found: SplitStats, samples: Iterable[tuple[int, Any]]) -> None:
    """Add samples of any kind."""
    read, low, high = list[int](), list[float](), list[float]()
    for index, sample in samples:
        leaves = leaves_of(sample)
        found.shapes[()] += 1
        read.append(index)
        # The same picture counts as the same sample, whatever else is said of it
        found.digests.append(digest_of([leaf for leaf in leaves if is_image(leaf)] or leaves))
        numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        low.append(0.0 if all(bool(number.isfinite().all()) for number in numbers) else math.nan)
        # A single number, such as a seed, may occur several times, as a constant image may
        single = [each for each in leaves if isinstance(each, Number) or getattr(each, "shape", None) == ()]
        high.append(low[-1] if len(leaves) == len(single) == 1 else 1.0)
        if about := _annotated(index, sample):
            found.annotated.append(about)
    found.indices, found.low, found.high = torch.tensor(read).long(), torch.tensor(low), torch.tensor(high)
    found.means = found.stds = torch.zeros(len(read), 1)


def scaled(images: Tensor) -> Tensor:
    """Images as float32; uint8 values are divided by 255."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def thumbnails(images: Tensor) -> Tensor:
    """Copies of (N, C, H, W) averaged to at most 16 pixels a side."""
    size = (min(_SIDE, images.shape[2]), min(_SIDE, images.shape[3]))
    return F.adaptive_avg_pool2d(images, size) if images.shape[2:] != size else images


def is_image(leaf: Any) -> bool:
    """True for an image of torchvision's transforms, or of PIL."""
    return isinstance(leaf, tv_tensors.Image | PIL.Image.Image)


def digest_of(value: Any) -> bytes:
    """A hash of the bytes of everything in nested containers; of plain objects, that of their attributes."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in leaves_of(value):
        kind: Any = type(leaf)
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().as_subclass(Tensor).flatten().view(torch.uint8).numpy()
        elif kind.__repr__ is object.__repr__:  # an address
            leaf = digest_of(getattr(leaf, "__dict__", kind.__name__))
        found.update(leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode())
    return found.digest()


def digests_of(batch: Batch) -> list[bytes]:
    """The same of each sample of a batch."""
    rows = len(batch.indices)
    return [digest_of(row) for row in parts_of_rows(batch.data, rows, rows)]


def unit_vectors(images: Tensor) -> Tensor:
    """Images as vectors of length 1 without their mean, so that brightness and contrast do not count: (N, D)."""
    flat = images.flatten(1).double()
    flat = flat - flat.mean(1, keepdim=True)
    return F.normalize(flat, dim=1, eps=1e-6).float()


@dataclass(frozen=True)
class Annotated:
    """What a sample says about its image."""

    index: int  # in the data set
    size: tuple[int, ...]  # height and width of the image
    masks: set[tuple[int, ...]]  # the same of masks
    values: set[int]  # of masks of classes
    boxes: Tensor | None  # XYXY, float64 (N, 4)
    labels: Tensor | None  # those of the boxes, (N,)


def _annotated(index: int, sample: Any) -> Annotated | None:
    """What a sample says about its image; None without an image, or without masks and boxes."""
    leaves = leaves_of(sample)
    image = next((leaf for leaf in leaves if is_image(leaf)), None)
    masks = [leaf for leaf in leaves if isinstance(leaf, tv_tensors.Mask)]
    upright = [leaf for leaf in leaves if isinstance(leaf, tv_tensors.BoundingBoxes) and leaf.format in UPRIGHT]
    plain = [v2.convert_bounding_box_format(each, new_format=FORMAT.XYXY).as_subclass(Tensor) for each in upright]
    boxes = [each.double() for each in plain]
    if image is None or not (boxes or masks):
        return None
    labels = next((each for name, each in named_tensors(sample) if name.rpartition(".")[2] == "labels"), None)
    of_classes = [mask for mask in masks if not boxes or mask.ndim == 2]  # others belong to the boxes
    values = {int(value) for mask in of_classes for value in mask.unique()}
    sizes = {tuple(mask.shape[-2:]) for mask in masks}
    return Annotated(index, tuple(v2.get_size(image)), sizes, values, boxes[0] if boxes else None, labels)
