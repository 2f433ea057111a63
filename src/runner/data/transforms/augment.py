"""Batch transforms: they run on the device on a whole batch, with random numbers of its own for each sample.

A batch transform is any callable `(images, rng) -> images`: images of shape (B, C, H, W), uint8 with values 0 to 255 or
float with values 0 to 1, and `rng` a `runner.data.sample_rng.SampleRNG` of the samples. With the same `rng`, a sample
gets the same result in any batch. A transform that promises this with `per_sample = True`, and uses no other randomness,
receives many batches at a time, which is faster.

This module moves and hides pixels; see also `resized_crop`, `color_jitter`, `auto_augment`, and `mixing`, which blends
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.base.errors import UserError
from runner.data.sample_rng import SampleRNG

BatchTransform = Callable[[Tensor, SampleRNG], Tensor]
Padding = Literal["zeros", "edge", "reflect"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CIRCLE = 2**24
# Float images that are normalised together on the CPU, to stay in its cache; only for batches above a size.
_BLOCK_BYTES = 2**19
_LARGE_BYTES = 2**23


class RandomShift:
    """Shift each image by up to a share of its size along both axes: a random crop of the padded image.

    Args:
        share: largest shift as a share of height and width, from 0 to 0.5; rounded, but at least one pixel if above 0.
        padding: of the border: `zeros`, the pixels of the `edge`, or the mirrored image (`reflect`).
    """

    per_sample = True

    def __init__(self, share: float = 0.125, padding: Padding = "zeros") -> None:
        if not 0 <= share <= 0.5:
            raise ValueError(f"share must be from 0 to 0.5, got {share}")
        if padding not in ("zeros", "edge", "reflect"):
            raise ValueError(f"padding must be zeros, edge or reflect, got '{padding}'")
        self.share = share
        self.padding = padding

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Shift `images`."""
        if self.share == 0:
            return images
        _, _, height, width = images.shape
        up, left = (max(1, round(self.share * size)) for size in (height, width))
        if self.padding == "reflect":  # a single row cannot be reflected
            up, left = min(up, height - 1), min(left, width - 1)
        places = 2 * left + 1
        place = rng.integers((2 * up + 1) * places)
        # Pixels of the padded image before the first one of the crop: row * (width + 2 * left) + column.
        first = place + place.div(places, rounding_mode="floor") * (width - 1)
        windows = _rows_copied if images.device.type == "cpu" else _pixels_gathered
        return windows(_padded(images, up, left, self.padding), first, height, width)


def _padded(images: Tensor, up: int, left: int, padding: Padding) -> Tensor:
    """`images` with `up` more rows above and below, and `left` more columns on both sides; any dtype."""
    padded = F.pad(images, (left, left, up, up))  # of other paddings, it has no bytes
    if padding != "zeros":
        height, width = images.shape[-2:]
        for part, axis, margin, size in ((padded.narrow(2, up, height), 3, left, width), (padded, 2, up, height)):
            low, high = part.narrow(axis, 0, margin), part.narrow(axis, margin + size, margin)
            if padding == "edge":
                low.copy_(part.narrow(axis, margin, 1).expand_as(low))
                high.copy_(part.narrow(axis, margin + size - 1, 1).expand_as(high))
            else:
                low.copy_(part.narrow(axis, margin + 1, margin).flip(axis))
                high.copy_(part.narrow(axis, size - 1, margin).flip(axis))
    return padded


def _rows_copied(padded: Tensor, first: Tensor, height: int, width: int) -> Tensor:
    """From each image of contiguous (B, C, H, W) the window (C, height, width) that starts at pixel `first` (B,)."""
    # The windows at all places are a view; selecting one for each image copies whole rows.
    _, channels, rows, columns = padded.shape
    length = (channels - 1) * rows * columns + (height - 1) * columns + width
    places = padded.numel() - length + 1
    windows = padded.as_strided((places, channels, height, width), (1, rows * columns, columns, 1))
    images = torch.arange(0, padded.numel(), channels * rows * columns)
    return windows.index_select(0, images + first)


def _pixels_gathered(padded: Tensor, first: Tensor, height: int, width: int) -> Tensor:
    """The same for devices on which a gather is fast."""
    batch, channels, _, columns = padded.shape
    down = torch.arange(height, device=padded.device)[:, None] * columns
    pixels = (down + torch.arange(width, device=padded.device)).view(1, 1, -1) + first[:, None, None]
    chosen = padded.view(batch, channels, -1).gather(2, pixels.expand(-1, channels, -1))
    return chosen.view(batch, channels, height, width)


class RandomFlip:
    """Mirror images left to right.

    Args:
        p: probability of each image in each epoch.
        alternate: mirror an image at even intervals instead (Jordan 2024, arXiv:2404.00498): with p=0.5 in every other
            epoch, starting with a random one of the two. So the model sees both sides equally often.
    """

    per_sample = True

    def __init__(self, p: float = 0.5, alternate: bool = False) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"p must be from 0 to 1, got {p}")
        self.p = p
        self.alternate = alternate

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Mirror some of `images`."""
        if self.p == 0:
            return images
        if not self.alternate:
            return chosen_from(rng.uniform() < self.p, images.flip(-1), images)
        # A point that moves by p of a circle per epoch is inside an arc of length p at even intervals; exact in integers.
        stride = round(self.p * _CIRCLE)
        places = (rng.without_epoch().integers(_CIRCLE) + rng.epoch * stride % _CIRCLE) % _CIRCLE
        return chosen_from(places < stride, images.flip(-1), images)


def chosen_from(chosen: Tensor, inputs: Tensor, others: Tensor) -> Tensor:
    """`inputs` (B, C, H, W) where `chosen` and `others` elsewhere; `inputs` is overwritten on the CPU.

    `chosen` is bool, of shape (B,) to choose whole images, or (B, 1, H, W) to choose pixels.
    """
    chosen = chosen.view(-1, 1, 1, 1) if chosen.ndim == 1 else chosen
    if inputs.device.type != "cpu":
        return torch.where(chosen, inputs, others)
    # torch.where on the CPU goes element by element if the condition is broadcast.
    kind = _INTEGERS[inputs.element_size()]
    mask = chosen.to(kind).neg_()
    bits, other_bits = inputs.view(kind), others.view(kind)
    bits.bitwise_xor_(other_bits).bitwise_and_(mask).bitwise_xor_(other_bits)
    return inputs


class RandomBrightnessContrast:
    """Scale the distance from mid grey and add light, each by a uniform random amount; values stay in range.

    `brightness` is the largest change as a share of white, `contrast` that of the distance from mid grey.
    """

    per_sample = True

    def __init__(self, brightness: float = 0.2, contrast: float = 0.2) -> None:
        if brightness < 0 or contrast < 0:
            raise ValueError(f"brightness and contrast must be at least 0, got {brightness} and {contrast}")
        self.brightness = brightness
        self.contrast = contrast

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Change light and contrast of `images`."""
        white = 255.0 if images.dtype == torch.uint8 else 1.0
        scale = (1 + self.contrast * (2 * rng.uniform() - 1))[:, None, None, None]
        shift = (self.brightness * white * (2 * rng.uniform() - 1))[:, None, None, None]
        changed = (
            images.to(torch.float32, copy=True).sub_(white / 2).mul_(scale).add_(shift + white / 2).clamp_(0, white)
        )
        return rounded(changed) if images.dtype == torch.uint8 else changed.to(images.dtype)


def rounded(pixels: Tensor) -> Tensor:
    """Float pixels from 0 to 255 as uint8; the input is overwritten."""
    # Through int16, as the CPU does not vectorise the conversion of floats to uint8.
    return pixels.round_().to(torch.int16).to(torch.uint8)


def outside(rows: Tensor, columns: Tensor) -> Tensor:
    """1 where a pixel is not in both a chosen row and a chosen column: uint8 (B, 1, H, W), of bool (B, H) and (B, W)."""
    # Not bool: the CPU goes element by element if operands of that type are broadcast.
    chosen = rows.to(torch.uint8)[:, None, :, None] & columns.to(torch.uint8)[:, None, None, :]
    return chosen.bitwise_xor_(1)


class RandomErasing:
    """Set a random rectangle of each image to zero with probability `p` (Zhong et al. 2020; DeVries & Taylor 2017).

    `share` is the largest side of the rectangle as a share of height and width.
    """

    per_sample = True

    def __init__(self, p: float = 0.5, share: float = 0.25) -> None:
        if not 0 <= p <= 1 or not 0 < share <= 1:
            raise ValueError(f"p must be from 0 to 1 and share above 0 and at most 1, got p={p} and share={share}")
        self.p = p
        self.share = share

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Erase rectangles in some of `images`."""
        if self.p == 0:
            return images
        chosen = rng.uniform() < self.p
        inside = []
        for size in images.shape[-2:]:
            length = 1 + rng.integers(max(1, round(self.share * size)))
            start = (rng.uniform() * (size + 1 - length)).long()
            places = torch.arange(size, device=images.device)
            inside.append((places >= start[:, None]) & (places < (start + length)[:, None]))
        # A product, as masked_fill goes element by element if its mask is broadcast over the channels.
        return images * outside(inside[0] & chosen[:, None], inside[1]).to(images.dtype)


class Pipeline:
    """Batch transforms in order, each with its own stream of random numbers, then normalisation.

    `mean` and `std` are statistics for pixels in [0, 1], one value for all channels or one for each. The attribute `of_bytes`
    is the factor and the subtrahend that normalise pixels from 0 to 255, (1, C, 1, 1) of type `dtype` each; `per_sample` is
    whether a sample gets the same result in any batch, and no stateful generator is used.
    """

    def __init__(
        self,
        transforms: Sequence[BatchTransform],
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        device: torch.device,
        *,
        channels_last: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.transforms = list(transforms)
        self.per_sample = all(getattr(transform, "per_sample", False) for transform in transforms)
        self.seed, self._dtype = seed, dtype
        self._channels = len(mean)
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        # x * scale - shift, for pixels up to 255 and for pixels up to 1; computed in float64.
        inverse = 1 / torch.tensor(std, dtype=torch.float64).view(1, -1, 1, 1)
        shift = torch.tensor(mean, dtype=torch.float64).view(1, -1, 1, 1) * inverse
        self.of_bytes, self._of_floats = (
            (scale.to(device, dtype), shift.to(device, dtype)) for scale in (inverse / 255, inverse)
        )

    def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Transform and normalise images (B, C, H, W) or frames (B, T, C, H, W), of bytes or floats from 0 to 1, to `dtype`.

        `indices` identify the samples in their data set, int64 of shape (B,), on the device of `images`. Raises `UserError` if
        the statistics do not fit the channels.
        """
        for stream, transform in enumerate(self.transforms):
            images = transform(images, SampleRNG(self.seed, epoch, indices, stream))
        if self._channels not in (1, images.shape[-3]):
            problem = f"has {self._channels} values, but the images have {images.shape[-3]} channels"
            raise UserError("data.normalize", problem, "one value per channel, or null to measure them")
        if images.ndim > 4:
            return torch.unflatten(self._normalised(images.flatten(0, -4)), 0, images.shape[:-3])
        return self._normalised(images)

    def _normalised(self, images: Tensor) -> Tensor:
        scale, shift = self.of_bytes if images.dtype == torch.uint8 else self._of_floats
        # Arithmetic with a value per channel is slow in NHWC, so it comes before the conversion.
        converts = self._format == torch.channels_last and images.shape[1] > 1
        if images.device.type == "cpu" and (converts or 4 * images.numel() > _LARGE_BYTES):
            normalised = torch.empty(images.shape, dtype=self._dtype, memory_format=self._format)
            size = max(1, _BLOCK_BYTES // (4 * images[0].numel()))
            for given, place in zip(torch.split(images, size), torch.split(normalised, size), strict=True):
                if converts:
                    place.copy_(given.to(self._dtype, copy=True).mul_(scale).sub_(shift))
                else:
                    place.copy_(given).mul_(scale).sub_(shift)
            return normalised
        # Two operations instead of one fused: they round the same wherever in a batch a pixel is.
        return images.to(self._dtype, memory_format=self._format, copy=True).mul_(scale).sub_(shift)


def as_shown(mean: Sequence[float] | None, std: Sequence[float] | None, reason: str = "") -> tuple[str, str, str]:
    """What images are normalised with, as a row of (label, value, reason)."""
    if mean is None or std is None:
        return "normalize", "none", "pixels in [0, 1]"
    means, deviations = (", ".join(f"{value:.4f}" for value in values) for values in (mean, std))
    return "normalize", f"mean {means}, std {deviations}", reason
