"""A few images of each split in full size, as the data set returns them, and linear models of their features."""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.data.samples import SeededDataset, as_target, as_tensor
from runner.verbs.check.context import CheckContext

MOST_SAMPLES = 256
_VALUES = 2**24  # pixels and channels of these samples together
_SHARE = 0.05  # of the time left, for reading one split


def most_samples(context: CheckContext) -> int:
    """How many images in full size to look at together."""
    return max(16, min(MOST_SAMPLES, _VALUES // math.prod(context.splits.image_shape)))


def sample_images(context: CheckContext) -> dict[str, tuple[Tensor, Tensor]]:
    """Images of each split that has at least two of one shape, before augmentation and normalization, and their targets.

    Images are float32 (N, C, H, W); uint8 values are divided by 255.
    """
    found = {}
    for name, (dataset, _) in context.splits.parts.items():
        seeded = SeededDataset(dataset, context.config.seed, context.sample_transforms)
        until = context.left * (1 - _SHARE)
        images: list[Tensor] = []
        targets: list[Tensor] = []
        for index in context.readable(name, most_samples(context)):
            if context.left < until and len(images) >= 2:
                break
            image, target = seeded[0, index]
            image = as_tensor(image)
            if not images or (image.shape, image.dtype) == (images[0].shape, images[0].dtype):
                images.append(image)
                targets.append(as_target(target))
        if len(images) >= 2:
            scale = 255 if images[0].dtype == torch.uint8 else 1
            found[name] = torch.stack(images).float() / scale, torch.stack(targets)
    return found


def image_features(images: Tensor) -> Tensor:
    """Features that tell classes apart wherever the object is: (N, D).

    Mean and deviation of each channel over the whole image and its parts, and histograms of edge directions.
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


def linear_accuracy(features: Tensor, targets: Tensor, others: Tensor, other_targets: Tensor) -> float:
    """Accuracy on other samples of a linear model that is fitted to features (N, D) and classes (N,)."""
    from sklearn.linear_model import RidgeClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about singular matrices
        model = make_pipeline(StandardScaler(), RidgeClassifier(alpha=100.0)).fit(features.numpy(), targets.numpy())
        return float(model.score(others.numpy(), other_targets.numpy()))


def chance_level(targets: Tensor) -> float:
    """Accuracy of always predicting the most frequent class."""
    return float(torch.bincount(targets.clamp_min(0)).max()) / len(targets)
