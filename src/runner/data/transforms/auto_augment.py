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
from runner.data.transforms.augment import chosen_from, rounded
from runner.data.transforms.color_jitter import lightness, mean_lightness


def _rotated(rows: Tensor, columns: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    # `by` is the sine of angles up to 135 degrees, with their sign: beyond 90, 2 minus the sine.
    sine = torch.where(by.abs() > 1, 2 - by.abs(), by.abs())
    cosine = (1 - sine * sine).clamp_min(0).sqrt()
    cosine, sine = torch.where(by.abs() > 1, -cosine, cosine), sine * by.sign()
    middle = [(places.numel() - 1) / 2 for places in (rows, columns)]
    down, across = rows - middle[0], columns - middle[1]
    return cosine * down + sine * across + middle[0], cosine * across - sine * down + middle[1]


def _smooth(images: Tensor) -> Tensor | None:
    """The image smoothed by a 3x3 kernel of ones, 5 in the middle; the border stays."""
    if min(images.shape[-2:]) < 3:
        return None
    whole = images.to(torch.int16)  # integer sums are the same in any order
    rows = whole[..., :-2, :] + whole[..., 1:-1, :] + whole[..., 2:, :]
    inner = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * whole[..., 1:-1, 1:-1]
    smooth = images.float()
    smooth[..., 1:-1, 1:-1] = (inner.float() / 13).round()
    return smooth


def _posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep so many bits."""
    masks = torch.tensor([256 - 2 ** (8 - kept) for kept in range(9)], dtype=torch.uint8)
    return images & masks.to(images.device, non_blocking=True)[bits.abs().long()].view(-1, 1, 1, 1)


def _solarize(images: Tensor, share: Tensor) -> Tensor:
    """Invert the pixels that are not below a share of white."""
    return torch.where(images >= (share.abs() * 255).view(-1, 1, 1, 1), 255 - images, images)


def _auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to the whole range."""
    pixels = images.float()
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    flat = high == low
    scale = torch.where(flat, 1.0, 255 / torch.where(flat, 1.0, high - low))
    return rounded((pixels - torch.where(flat, 0.0, low)).mul_(scale).clamp_(0, 255))


def _equalize(images: Tensor, _: Tensor) -> Tensor:
    """Equalize the histogram of each channel, whose counts are integers: the same in any order of the pixels."""
    from torchvision.transforms.v2.functional import equalize  # takes a second, and most runs do not use it

    equalized: Tensor = equalize(images)
    return equalized


# Where the pixels come from: rows (1, H, 1), columns (1, 1, W) and amounts (B, 1, 1) to places that broadcast to (B, H, W).
_MOVES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "shear_x": lambda rows, columns, by: (rows, columns + by * (rows + 0.5)),
    "shear_y": lambda rows, columns, by: (rows + by * (columns + 0.5), columns),
    "translate_x": lambda rows, columns, by: (rows, columns + by.trunc()),
    "translate_y": lambda rows, columns, by: (rows + by.trunc(), columns),
    "rotate": _rotated,
}
# What is blended with the image, of which 1 minus the amount is kept; None changes nothing.
_BLENDS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "brightness": lambda images: torch.zeros((), device=images.device),
    "colour": lambda images: lightness(images.float()) if images.shape[1] == 3 else None,
    "contrast": lambda images: mean_lightness(images.float(), 255.0),
    "sharpness": _smooth,
}
_LEVELS = {
    "posterize": _posterize, "solarize": _solarize, "auto_contrast": _auto_contrast, "equalize": _equalize,
}  # fmt: skip
_OPERATIONS = ("identity", *_MOVES, *_BLENDS, *_LEVELS)


def changed(operation: str, images: Tensor, amount: Tensor) -> Tensor:
    """Apply an operation to images, uint8 (B, C, H, W), by amounts (B,), whose sign is the direction."""
    if operation in _MOVES:
        batch, channels, *sizes = images.shape
        rows, columns = (torch.arange(size, device=images.device, dtype=torch.float32) for size in sizes)
        places = _MOVES[operation](rows.view(1, -1, 1), columns.view(1, 1, -1), amount.view(-1, 1, 1))
        row, column = ((place + 0.5).floor().expand(batch, *sizes) for place in places)
        inside = (row >= 0) & (row < sizes[0]) & (column >= 0) & (column < sizes[1])
        nearest = (row.clamp(0, sizes[0] - 1) * sizes[1] + column.clamp(0, sizes[1] - 1)).long().view(batch, 1, -1)
        found = images.flatten(2).gather(2, nearest.expand(-1, channels, -1)).view_as(images)
        return found * inside[:, None]
    if operation in _LEVELS:
        return _LEVELS[operation](images, amount)
    others = _BLENDS[operation](images)
    if others is None:
        return images
    factor = (1 + amount).view(-1, 1, 1, 1)
    # Each operation rounds separately: a sample has the same bits in any batch.
    return rounded((images.float() * factor).add_(others * (1 - factor)).clamp_(0, 255))


class _Policy:
    """Operations on each image, with a table of the strength of each operation at each magnitude.

    `bins` are the magnitudes, from none to the largest; the numbers after it are the strengths at the largest: shear,
    translation (in pixels, or a share of the side if `of_side`), rotation, factor of the blends, and bits that are lost.
    """

    per_sample = True

    def __init__(
        self, bins: int, *, shear: float, shift: float, degrees: float, blend: float, bits: int, of_side: bool
    ) -> None:
        if bins < 2:
            raise ValueError(f"num_magnitude_bins must be at least 2, got {bins}")
        shares = [place / (bins - 1) for place in range(bins)]
        angles = [math.radians(degrees * share) for share in shares]
        largest = {"shear_x": shear, "shear_y": shear, "translate_x": shift, "translate_y": shift}
        largest |= dict.fromkeys(_BLENDS, blend)
        rows = {name: [most * share for share in shares] for name, most in largest.items()}
        rows["rotate"] = [math.sin(angle) if angle <= math.pi / 2 else 2 - math.sin(angle) for angle in angles]
        rows["posterize"] = [8.0 - round(bits * share) for share in shares]
        rows["solarize"] = [1.0 - share for share in shares]
        self._strengths = torch.tensor([rows.get(name, [0.0] * bins) for name in _OPERATIONS])
        self._of_side = of_side

    def _changed(self, images: Tensor, rng: SampleRNG, level: Tensor) -> Tensor:
        """Apply one operation to each image, uint8, at its level (B,)."""
        if self._strengths.device != images.device:
            self._strengths = self._strengths.to(images.device)
        chosen, sign = rng.integers(len(_OPERATIONS)), 1.0 - 2.0 * rng.integers(2)
        # Reading the choices would wait for the device: there, all operations are computed and one is selected.
        make = _made_where_chosen if images.device.type == "cpu" else _made_and_selected
        images = images.clone(memory_format=torch.contiguous_format)
        for number, operation in enumerate(_OPERATIONS[1:], 1):
            amount = sign * self._strengths[number][level]
            if self._of_side and operation.startswith("translate"):
                amount = amount * images.shape[-1 if operation == "translate_x" else -2]
            images = make(operation, images, chosen == number, amount)
        return images


def _made_where_chosen(operation: str, images: Tensor, chosen: Tensor, amount: Tensor) -> Tensor:
    rows = chosen.nonzero()[:, 0]
    if len(rows):
        images[rows] = changed(operation, images[rows], amount[rows])
    return images


def _made_and_selected(operation: str, images: Tensor, chosen: Tensor, amount: Tensor) -> Tensor:
    return torch.where(chosen.view(-1, 1, 1, 1), changed(operation, images, amount), images)


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
        p: probability of each operation; timm's recipes have 0.5.
    """

    def __init__(self, num_ops: int = 2, magnitude: int = 9, num_magnitude_bins: int = 31, p: float = 1.0) -> None:
        super().__init__(num_magnitude_bins, shear=0.3, shift=150 / 331, degrees=30.0, blend=0.9, bits=4, of_side=True)
        if num_ops < 1 or not 0 <= magnitude < num_magnitude_bins:
            raise ValueError(
                f"num_ops must be at least 1 and magnitude from 0 to {num_magnitude_bins - 1}, got {num_ops} and {magnitude}"
            )
        if not 0 <= p <= 1:
            raise ValueError(f"p must be from 0 to 1, got {p}")
        self.num_ops, self.magnitude, self.p = num_ops, magnitude, p

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Change `images`."""
        level = torch.full_like(rng.indices, self.magnitude)

        def change(images: Tensor) -> Tensor:
            for _ in range(self.num_ops):
                others = self._changed(images, rng, level)
                images = others if self.p == 1 else chosen_from(rng.uniform() < self.p, others, images)
            return images

        return _as_bytes(images, change)


class TrivialAugment(_Policy):
    """One of 14 operations on each image, its magnitude random in a wide range (Müller & Hutter 2021).

    Float images are computed with 8 bits per pixel. `num_magnitude_bins` are the strengths from none to the largest.
    """

    def __init__(self, num_magnitude_bins: int = 31) -> None:
        super().__init__(num_magnitude_bins, shear=0.99, shift=32.0, degrees=135.0, blend=0.99, bits=6, of_side=False)
        self.num_magnitude_bins = num_magnitude_bins

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Change `images`."""
        level = rng.integers(self.num_magnitude_bins)
        return _as_bytes(images, lambda images: self._changed(images, rng, level))
