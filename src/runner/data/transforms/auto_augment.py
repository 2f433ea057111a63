"""RandAugment and TrivialAugment, a batch at a time on the device, with an operation of its own for every image.

The 14 operations and their strengths are torchvision's; blends are rounded where it truncates, so a pixel may differ by one.
Own code instead of torchvision's, which applies one operation to a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from runner.data.sample_rng import SampleRNG
from runner.data.transforms.augment import rounded
from runner.data.transforms.color_jitter import lightness, mean_lightness

Change = Callable[[Tensor, Tensor, Tensor], Tensor]


def _identity(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return images


def _shear_x(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    rows, columns = _places(images)
    return _gathered(images, rows, columns + _beside(sign * strength) * (rows + 0.5))


def _shear_y(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    rows, columns = _places(images)
    return _gathered(images, rows + _beside(sign * strength) * (columns + 0.5), columns)


def _translate_x(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    rows, columns = _places(images)
    return _gathered(images, rows, columns + _beside(sign * strength.trunc()))


def _translate_y(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    rows, columns = _places(images)
    return _gathered(images, rows + _beside(sign * strength.trunc()), columns)


def _rotate(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    # The table holds the sine of angles up to 135 degrees: beyond 90, 2 minus the sine.
    sine = torch.where(strength > 1, 2 - strength, strength)
    cosine = (1 - sine * sine).clamp_min(0).sqrt()
    cosine = _beside(torch.where(strength > 1, -cosine, cosine))
    sine = _beside(sign * sine)
    rows, columns = _places(images)
    middle = [(size - 1) / 2 for size in images.shape[-2:]]
    down, across = rows - middle[0], columns - middle[1]
    return _gathered(images, cosine * down + sine * across + middle[0], cosine * across - sine * down + middle[1])


def _brightness(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _blended(images, torch.zeros((), device=images.device), strength, sign)


def _colour(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _blended(images, lightness(images.float()), strength, sign) if images.shape[1] == 3 else images


def _contrast(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return _blended(images, mean_lightness(images.float(), 255.0), strength, sign)


def _sharpness(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Blend with the image smoothed by a 3x3 kernel of ones, 5 in the middle; the border stays."""
    if min(images.shape[-2:]) < 3:
        return images
    whole = images.to(torch.int16)  # integer sums are the same in any order
    rows = whole[..., :-2, :] + whole[..., 1:-1, :] + whole[..., 2:, :]
    inner = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * whole[..., 1:-1, 1:-1]
    smooth = images.float()
    smooth[..., 1:-1, 1:-1] = (inner.float() / 13).round()
    return _blended(images, smooth, strength, sign)


def _posterize(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Keep as many bits as `strength`."""
    masks = torch.tensor([256 - 2 ** (8 - bits) for bits in range(9)], dtype=torch.uint8)
    return images & masks.to(images.device, non_blocking=True)[strength.long()].view(-1, 1, 1, 1)


def _solarize(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Invert the pixels that are not below `strength`, a share of white."""
    return torch.where(images >= _beside(strength * 255)[:, None], 255 - images, images)


def _auto_contrast(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Stretch each channel to the whole range."""
    pixels = images.float()
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    flat = high == low
    scale = torch.where(flat, 1.0, 255 / torch.where(flat, 1.0, high - low))
    return rounded((pixels - torch.where(flat, 0.0, low)).mul_(scale).clamp_(0, 255))


def _equalize(images: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """Equalize the histogram of each channel."""
    flat = images.flatten(2)
    levels = torch.arange(256, device=images.device, dtype=torch.uint8).expand(*flat.shape[:2], 256).contiguous()
    # The cumulative histogram, from sorted pixels: adding up counts is not deterministic on every device.
    up_to = torch.searchsorted(flat.sort(-1).values, levels, right=True)
    brightest = flat.amax(-1, keepdim=True)
    of_brightest = (flat == brightest).sum(-1, keepdim=True)
    step = (flat.shape[-1] - of_brightest) // 255
    table = (up_to + step // 2) // step.clamp_min(1)
    table = torch.cat([torch.zeros_like(table[..., :1]), table[..., :-1]], -1).clamp_(0, 255).to(torch.uint8)
    table = torch.where(step == 0, levels, table)
    return table.gather(2, flat.long()).view_as(images)


_CHANGES: tuple[Change, ...] = (
    _identity, _shear_x, _shear_y, _translate_x, _translate_y, _rotate, _brightness,
    _colour, _contrast, _sharpness, _posterize, _solarize, _auto_contrast, _equalize,
)  # fmt: skip


class _Policy:
    """Operations on each image, with a table of the strength of each operation at each magnitude.

    Args:
        bins: magnitudes, from none to the largest.
        shear, shift, degrees, blend, bits: strengths at the largest magnitude: shear, translation (in pixels, or as a share
            of the side), rotation, factor of the blends, bits that are lost.
        of_side: whether the translation is a share.
    """

    per_sample = True

    def __init__(self, bins: int, shear: float, shift: float, degrees: float, blend: float, bits: int, of_side: bool):
        if bins < 2:
            raise ValueError(f"num_magnitude_bins must be at least 2, got {bins}")
        shares = [place / (bins - 1) for place in range(bins)]
        angles = [math.radians(degrees * share) for share in shares]
        sines = [math.sin(angle) if angle <= math.pi / 2 else 2 - math.sin(angle) for angle in angles]
        nothing = [0.0] * bins
        rows = [
            nothing,
            *([shear * share for share in shares],) * 2,
            *([shift * share for share in shares],) * 2,
            sines,
            *([blend * share for share in shares],) * 4,
            [8.0 - round(bits * share) for share in shares],
            [1.0 - share for share in shares],
            nothing,
            nothing,
        ]
        self._strengths, self._of_side = torch.tensor(rows), of_side

    def _changed(self, images: Tensor, rng: SampleRNG, level: Tensor) -> Tensor:
        """Apply one operation to each image, uint8, at its level (B,)."""
        if self._strengths.device != images.device:
            self._strengths = self._strengths.to(images.device)
        chosen, sign = rng.integers(len(_CHANGES)), 1.0 - 2.0 * rng.integers(2)
        # Reading the choices would wait for the device: there, all operations are computed and one is selected.
        make = _made_where_chosen if images.device.type == "cpu" else _made_and_selected
        images = images.clone(memory_format=torch.contiguous_format)
        for number, change in enumerate(_CHANGES[1:], 1):
            strength = self._strengths[number][level]
            if self._of_side and change in (_translate_x, _translate_y):
                strength = strength * images.shape[-1 if change is _translate_x else -2]
            images = make(change, images, chosen == number, strength, sign)
        return images


def _made_where_chosen(change: Change, images: Tensor, chosen: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    rows = chosen.nonzero()[:, 0]
    if len(rows):
        images[rows] = change(images[rows], strength[rows], sign[rows])
    return images


def _made_and_selected(change: Change, images: Tensor, chosen: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    return torch.where(chosen.view(-1, 1, 1, 1), change(images, strength, sign), images)


def _as_bytes(images: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply an operation on uint8 images to images that may be floats from 0 to 1."""
    if images.dtype == torch.uint8:
        return change(images)
    return change(rounded(images.float() * 255)).to(images.dtype) / 255


class RandAugment(_Policy):
    """Several of 14 operations on each image, all at one magnitude (Cubuk et al. 2020).

    Float images are computed with 8 bits per pixel.

    Args:
        num_ops: operations, one after the other.
        magnitude: their strength, from 0 to `num_magnitude_bins` - 1.
        num_magnitude_bins: strengths from none to the largest.
    """

    def __init__(self, num_ops: int = 2, magnitude: int = 9, num_magnitude_bins: int = 31) -> None:
        super().__init__(num_magnitude_bins, 0.3, 150 / 331, 30.0, 0.9, 4, of_side=True)
        if num_ops < 1 or not 0 <= magnitude < num_magnitude_bins:
            raise ValueError(
                f"num_ops must be at least 1 and magnitude from 0 to {num_magnitude_bins - 1}, got {num_ops} and {magnitude}"
            )
        self.num_ops, self.magnitude = num_ops, magnitude

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Change `images`."""
        level = torch.full_like(rng.indices, self.magnitude)

        def change(images: Tensor) -> Tensor:
            for _ in range(self.num_ops):
                images = self._changed(images, rng, level)
            return images

        return _as_bytes(images, change)


class TrivialAugment(_Policy):
    """One of 14 operations on each image, its magnitude random in a wide range (Müller & Hutter 2021).

    Float images are computed with 8 bits per pixel. `num_magnitude_bins` are the strengths from none to the largest.
    """

    def __init__(self, num_magnitude_bins: int = 31) -> None:
        super().__init__(num_magnitude_bins, 0.99, 32.0, 135.0, 0.99, 6, of_side=False)
        self.num_magnitude_bins = num_magnitude_bins

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Change `images`."""
        level = rng.integers(self.num_magnitude_bins)
        return _as_bytes(images, lambda images: self._changed(images, rng, level))


def _beside(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)


def _places(images: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (1, H, 1) and columns (1, 1, W) of the pixels, as floats."""
    height, width = images.shape[-2:]
    rows, columns = (torch.arange(size, device=images.device, dtype=torch.float32) for size in (height, width))
    return rows.view(1, -1, 1), columns.view(1, 1, -1)


def _gathered(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels nearest to places that broadcast to (B, H, W); zeros outside of the image."""
    batch, channels, height, width = images.shape
    row, column = ((places + 0.5).floor().expand(batch, height, width) for places in (rows, columns))
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    place = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).long().view(batch, 1, -1)
    found = images.flatten(2).gather(2, place.expand(-1, channels, -1)).view_as(images)
    return found * inside[:, None]


def _blended(images: Tensor, others: Tensor, strength: Tensor, sign: Tensor) -> Tensor:
    """`images` times a factor, plus `others` times 1 minus the factor."""
    factor = (1 + sign * strength).view(-1, 1, 1, 1)
    # Each operation rounds separately: a sample has the same bits in any batch.
    return rounded((images.float() * factor).add_(others * (1 - factor)).clamp_(0, 255))
