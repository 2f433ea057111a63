"""A few images of each split at full size, as the data set gives them, and numbers that describe them."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runner.data.samples import SeededDataset, as_target, as_tensor
from runner.verbs.check.context import CheckContext

_MOST = 256  # images of a split
_VALUES = 2**24  # pixels and channels of these images together
_SHARE = 0.05  # of the remaining time, that reading one split may take
SIDE = 16  # of small copies, in pixels


class SampleImages(NamedTuple):
    """Images of a split before augmentation and normalisation.

    Attributes:
        images: float32 (N, C, H, W); values of uint8 divided by 255.
        targets: (N, ...).
        indices: their numbers in the data set, int64 (N,).
        of_bytes: whether the data set gives uint8.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor
    of_bytes: bool


def sample_images(context: CheckContext) -> dict[str, SampleImages]:
    """Images of each split; splits without two readable images of one shape are not in it."""
    found = {}
    for name, (dataset, _) in context.splits.parts.items():
        size = context.splits.channels * context.splits.image_size[0] * context.splits.image_size[1]
        keyed = SeededDataset(dataset, context.config.seed, context.sample_transforms)
        until = context.left * (1 - _SHARE)
        read: list[tuple[Tensor, Tensor, int]] = []
        for index in context.readable(name, max(16, min(_MOST, _VALUES // size))):
            if context.left < until and len(read) >= 2:
                break
            image, target = keyed[0, index]
            image = as_tensor(image)
            if not read or (image.shape, image.dtype) == (read[0][0].shape, read[0][0].dtype):
                read.append((image, as_target(target), index))
        if len(read) < 2:
            continue
        images, targets, indices = zip(*read, strict=True)
        stacked, of_bytes = torch.stack(images), images[0].dtype == torch.uint8
        scaled = stacked.float() / 255 if of_bytes else stacked.float()
        found[name] = SampleImages(scaled, torch.stack(targets), torch.tensor(indices), of_bytes)
    return found


def small(images: Tensor, side: int = SIDE) -> Tensor:
    """Copies of (N, C, H, W) averaged to at most `side` pixels a side."""
    size = (min(side, images.shape[2]), min(side, images.shape[3]))
    return F.adaptive_avg_pool2d(images, size) if images.shape[2:] != size else images


def unit_vectors(images: Tensor) -> Tensor:
    """Images as vectors of length 1 without their mean, so that brightness and contrast do not count: (N, D)."""
    flat = images.flatten(1).double()
    flat = flat - flat.mean(1, keepdim=True)
    made: Tensor = flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-6)
    return made.float()


def features(images: Tensor) -> Tensor:
    """What a linear model can use to tell classes apart wherever the object is: (N, D).

    Mean and deviation of each channel over the whole image and its quarters, and histograms of edge directions.
    """
    parts = []
    for grid in (1, 2, 4):
        mean = F.adaptive_avg_pool2d(images, grid)
        square = F.adaptive_avg_pool2d(images.square(), grid)
        parts += [mean.flatten(1), (square - mean.square()).clamp_min(0).sqrt().flatten(1)]
    grey = images.mean(1)
    if min(grey.shape[1:]) > 2:
        down, right = (grey[:, 2:, 1:-1] - grey[:, :-2, 1:-1]), (grey[:, 1:-1, 2:] - grey[:, 1:-1, :-2])
        size, angle = (down.square() + right.square()).sqrt(), torch.atan2(down, right)
        bins = ((angle / torch.pi + 1) * 4).long().clamp(0, 7)
        edges = torch.stack([torch.where(bins == each, size, 0.0) for each in range(8)], 1)
        parts += [F.adaptive_avg_pool2d(edges, grid).flatten(1) for grid in (1, 2, 4)]
    return torch.cat(parts, 1)


def accuracy(pixels: Tensor, right: Tensor, others: Tensor, theirs: Tensor) -> float:
    """Accuracy of a linear model that is fitted to images and targets, on others."""
    from sklearn.linear_model import RidgeClassifier
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(pixels.numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of singular matrices
        model = RidgeClassifier(alpha=100.0).fit(scaler.transform(pixels.numpy()), right.numpy())
    return float(np.mean(model.predict(scaler.transform(others.numpy())) == theirs.numpy()))
