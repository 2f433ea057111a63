"""Synthetic images that can be learned: for tests, benchmarks and first steps without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from runner.data.sources.arrays import ImageArrays

_DEFAULT_SIZE = 32
_MIDDLE = 128
_CONTRAST = 48.0
# Patterns are random on this coarse grid and enlarged: smooth shapes instead of white noise.
_GRID = 4
# Fixed, since the chunks decide which random number goes to which sample.
_CHUNK = 256
_MOST = 2**33  # bytes of images and of what they are made from: a checkpoint's config may name any size


def synthetic(
    samples: int = 1024,
    image_size: int | None = None,
    channels: int = 3,
    classes: int = 10,
    *,
    kind: Literal["classification", "regression"] = "classification",
    noise: float = 0.5,
    seed: int = 0,
) -> dict[str, ImageArrays]:
    """Noisy copies of a smooth pattern for each class, or images whose target can be computed from their pixels.

    The result is a pure function of the arguments; the global random state is neither read nor changed.

    Args:
        samples: number of training images; a quarter as many are added for testing.
        image_size: height and width in pixels; None means 32.
        channels: colour channels.
        classes: number of classes, equally frequent; without effect for regression.
        kind: 'classification' gives int64 class indices. 'regression' gives float32 values of about unit variance:
            the projection of the pixels on one hidden pattern, so that a linear model can reach an error of zero.
        noise: standard deviation of the noise of a pixel, in units of the pattern's own.
        seed: seed of the patterns and of the samples.

    Returns:
        'train' and 'test', made from the same patterns.

    Raises `ValueError` if a number is out of its range, or the images would take over 8 GiB.
    """
    side = _DEFAULT_SIZE if image_size is None else image_size
    for name, value in (("samples", samples), ("image_size", side), ("channels", channels), ("classes", classes)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    size = channels * side**2 * (samples * 5 // 4 + 4 * (classes + 4 * min(samples, _CHUNK)))
    if size > _MOST:
        raise ValueError(f"image_size, samples, channels and classes are too large: {size:,} bytes, at most {_MOST:,}")
    if not 0 <= noise < float("inf"):
        raise ValueError(f"noise must be a number from 0 on, got {noise}")
    make, generator = _classified if kind == "classification" else _measured, Generator().manual_seed(seed)
    coarse = torch.randn(classes if make is _classified else 1, channels, _GRID, _GRID, generator=generator)
    patterns = F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=False)
    counts = {"train": samples, "test": max(1, samples // 4)}
    return {split: make(count, patterns, noise, generator) for split, count in counts.items()}


def _classified(count: int, patterns: Tensor, noise: float, generator: Generator) -> ImageArrays:
    classes = len(patterns)
    targets = (torch.arange(count) % classes)[torch.randperm(count, generator=generator)]
    images = _render(targets, lambda chunk: patterns[chunk], noise, generator)
    return ImageArrays(images, targets, tuple(str(index) for index in range(classes)))


def _measured(count: int, patterns: Tensor, noise: float, generator: Generator) -> ImageArrays:
    # A mean other than zero: a network that pools over the whole image then sees the target as well.
    pattern = 1.0 + patterns
    strength = torch.randn(count, generator=generator)
    images = _render(strength, lambda chunk: chunk.view(-1, 1, 1, 1) * pattern, noise, generator)
    # Integer sums are the same in any order, so the targets do not depend on the number of threads.
    weights = (pattern * 64).round().to(torch.int64)
    sums = torch.cat(
        [((chunk.to(torch.int64) - _MIDDLE) * weights).sum((1, 2, 3)) for chunk in torch.split(images, _CHUNK)]
    )
    scale = 64 / (_CONTRAST * float(weights.square().sum()))
    return ImageArrays(images, (sums.double() * scale).float())


def _render(sources: Tensor, draw: Callable[[Tensor], Tensor], noise: float, generator: Generator) -> Tensor:
    """Images uint8 (N, C, H, W) from `draw` of the sources, in chunks to bound the memory."""
    chunks = []
    for chunk in torch.split(sources, _CHUNK):
        clean = draw(chunk)
        noisy = clean + noise * torch.randn(clean.shape, generator=generator)
        chunks.append((_MIDDLE + _CONTRAST * noisy).round_().clamp_(0, 255).to(torch.uint8))
    return torch.cat(chunks)
