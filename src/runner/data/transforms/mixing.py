"""Mixing of the samples of a batch in training: mixup, CutMix, or one of several per batch.

A way to mix is any callable `(images, targets, rng) -> (images, targets)`: images float (B, C, H, W) as the model takes
them, targets of their type whose first axis is the batch (classes are already probabilities, (B, C)), and `rng` a
`runner.data.sample_rng.SampleRNG` of the samples. Partners and weights follow from the seed, the epoch and the samples of the
batch. Own code instead of torchvision's `MixUp` and `CutMix`, which draw one weight per batch from the global generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import UserError
from runner.data.sample_rng import SampleRNG, beta
from runner.data.transforms.augment import chosen_from, outside

BatchMix = Callable[[Tensor, Tensor, SampleRNG], tuple[Tensor, Tensor]]

_STREAM = -1  # batch transforms have the streams from 0 on


class Mixup:
    """A weighted mean of each sample and another one of its batch, images and targets alike (Zhang et al. 2018).

    Args:
        alpha: the weights are from Beta(alpha, alpha), one for each sample; 0.1 to 0.4 is usual, 1 is uniform.
        p: probability of each sample to be blended.
    """

    def __init__(self, alpha: float = 0.2, p: float = 1.0) -> None:
        self._weights, self.p = beta(alpha), _chance(p)
        self.alpha = alpha

    def __call__(self, images: Tensor, targets: Tensor, rng: SampleRNG) -> tuple[Tensor, Tensor]:
        """Blend images and targets with the same weights."""
        partners = rng.partners()
        weights = self._weights(rng.uniform())
        if self.p < 1:
            weights = torch.where(rng.uniform() < self.p, weights, 1.0)
        others = _picked(images, partners)
        return others.lerp_(images, _beside(weights, images)), _blended(targets, partners, weights)


class CutMix:
    """A rectangle of each image replaced by that of another image of its batch (Yun et al. 2019).

    The rectangle has the image's proportions and its centre is anywhere, so part of it may be outside. Targets are weighted
    by the number of pixels of each image.

    Args:
        alpha: the area that is kept, before clipping, is from Beta(alpha, alpha), for each sample.
        p: probability of each sample to get a rectangle.
    """

    def __init__(self, alpha: float = 1.0, p: float = 1.0) -> None:
        self._areas, self.p = beta(alpha), _chance(p)
        self.alpha = alpha

    def __call__(self, images: Tensor, targets: Tensor, rng: SampleRNG) -> tuple[Tensor, Tensor]:
        """Exchange rectangles, and blend targets accordingly."""
        height, width = images.shape[-2:]
        partners = rng.partners()
        half = (1 - self._areas(rng.uniform())).sqrt() / 2
        if self.p < 1:
            half = torch.where(rng.uniform() < self.p, half, 0.0)
        inside = []
        for size in (height, width):
            middles = (torch.arange(size, device=images.device) + 0.5) / size
            inside.append((middles - rng.uniform()[:, None]).abs() < half[:, None])
        rows, columns = inside
        replaced = rows.sum(1) * columns.sum(1)
        weights = 1 - replaced.to(images.dtype) / (height * width)
        replacing = outside(rows, columns) == 0
        return chosen_from(replacing, _picked(images, partners), images), _blended(targets, partners, weights)


class OneOf:
    """One of several ways to mix for each batch, all equally likely; `choices` are callables such as `Mixup` and `CutMix`."""

    def __init__(self, choices: list[Any]) -> None:
        if not choices or not all(callable(choice) for choice in choices):
            raise ValueError("choices must be a list of at least one way to mix")
        self.choices: Sequence[BatchMix] = list(choices)

    def __call__(self, images: Tensor, targets: Tensor, rng: SampleRNG) -> tuple[Tensor, Tensor]:
        """Mix one way."""
        chosen = rng.batch_integer(len(self.choices))
        if images.device.type != "cpu":
            return self._selected(images, targets, rng, chosen)
        number = int(chosen)
        return self.choices[number](images, targets, rng.fork(number))

    def _selected(self, images: Tensor, targets: Tensor, rng: SampleRNG, chosen: Tensor) -> tuple[Tensor, Tensor]:
        # Reading the choice would wait for the device, so all are computed.
        mixed = images, targets
        for number, mix in enumerate(self.choices):
            made = mix(images, targets, rng.fork(number))
            mixed = torch.where(chosen == number, made[0], mixed[0]), torch.where(chosen == number, made[1], mixed[1])
        return mixed


class Mixing:
    """A way to mix as loaders call it: `runner.data.loaders.Mix`; `num_classes` is None if targets are numbers."""

    def __init__(self, mix: BatchMix, seed: int, num_classes: int | None) -> None:
        self.mix, self.seed, self.num_classes = mix, seed, num_classes

    def __call__(self, images: Tensor, targets: Tensor, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Blend images, float (B, C, H, W), and targets: classes, integer (B,), labels, integer (B, L), or numbers or
        probabilities, float (B, ...).

        `indices` identify the samples in their data set, int64 (B,), on the same device. Returns images of the same shape, and
        targets of the images' type, (B, num_classes) for classes. Raises `UserError` if targets are integers of another shape, or
        the number of classes is not known.
        """
        if not targets.is_floating_point() and targets.ndim != 2:
            if targets.ndim != 1 or self.num_classes is None:
                shape = tuple(targets.shape[1:])
                what = f"a sample's have shape {shape}" if shape else "their number is not known"
                allowed = "transform.mix=null, or a data set that names its classes and gives one for each sample"
                raise UserError("transform.mix", f"blends classes as probabilities, but {what}", allowed)
            # Not one_hot, which reads the targets on the host to check them.
            targets = targets[:, None] == torch.arange(self.num_classes, device=targets.device)
        return self.mix(images, targets.to(images.dtype), SampleRNG(self.seed, epoch, indices, _STREAM))


def _chance(p: float) -> float:
    if not 0 < p <= 1:
        raise ValueError(f"p must be above 0 and at most 1, got {p}")
    return p


def _picked(images: Tensor, places: Tensor) -> Tensor:
    """A copy of the images at `places`, in the same memory layout, which index_select alone does not keep."""
    if images.is_contiguous():
        return images.index_select(0, places)
    return images.permute(0, 2, 3, 1).index_select(0, places).permute(0, 3, 1, 2)


def _beside(weights: Tensor, values: Tensor) -> Tensor:
    return weights.view(-1, *(1,) * (values.ndim - 1)).to(values.dtype)


def _blended(targets: Tensor, partners: Tensor, weights: Tensor) -> Tensor:
    return torch.lerp(targets.index_select(0, partners), targets, _beside(weights, targets))
