"""Random changes of colour, a batch at a time on the device.

Own code instead of torchvision's, which uses one factor for a whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.data.sample_rng import SampleRNG
from runner.data.transforms.augment import rounded

# Weights of red, green and blue in the lightness of a pixel (ITU-R BT.601).
_LIGHTNESS = (0.299, 0.587, 0.114)
_FIXED_POINT = 2**16


class ColorJitter:
    """Change brightness, contrast, saturation and hue of each image, in this order, with its own random factors.

    The four are those of torchvision's `ColorJitter`: pixels times a factor; distances from the mean lightness of the image,
    and of each pixel from its own lightness, times a factor; hues turned. Factors are uniform from 1 - x to 1 + x, at least
    0; the hue is turned by up to `hue` of the circle in either direction. The order is fixed; torchvision's is random. Values
    are clipped after each change. Uint8 is computed in float32 and rounded once.

    Args:
        brightness, contrast, saturation: largest changes of the factors.
        hue: largest turn, from 0 to 0.5; like `saturation`, it needs 3 channels unless 0.
    """

    per_sample = True

    def __init__(
        self, brightness: float = 0.4, contrast: float = 0.4, saturation: float = 0.4, hue: float = 0.0
    ) -> None:
        if min(brightness, contrast, saturation) < 0:
            values = f"{brightness}, {contrast} and {saturation}"
            raise ValueError(f"brightness, contrast and saturation must be at least 0, got {values}")
        if not 0 <= hue <= 0.5:
            raise ValueError(f"hue must be from 0 to 0.5, got {hue}")
        self.brightness, self.contrast, self.saturation, self.hue = brightness, contrast, saturation, hue

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Change the colours of `images`.

        Raises `ValueError` if saturation or hue is to change, and there are not 3 channels.
        """
        if (self.saturation or self.hue) and images.shape[1] != 3:
            raise ValueError(f"saturation and hue must be 0 for images of {images.shape[1]} channels instead of 3")
        white = 255.0 if images.dtype == torch.uint8 else 1.0
        pixels = images.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        # Every operation rounds separately, and none sums floats: a sample has the same bits in any batch.
        if self.brightness:
            pixels.mul_(_factor(self.brightness, rng)).clamp_(0, white)
        if self.contrast:
            mean = mean_lightness(pixels, white)
            pixels.sub_(mean).mul_(_factor(self.contrast, rng)).add_(mean).clamp_(0, white)
        if self.saturation:
            grey = lightness(pixels)
            pixels.sub_(grey).mul_(_factor(self.saturation, rng)).add_(grey).clamp_(0, white)
        if self.hue:
            turn = (2 * rng.uniform() - 1) * (6 * self.hue)
            pixels = _turned(pixels, turn.view(-1, 1, 1, 1))
        return rounded(pixels) if images.dtype == torch.uint8 else pixels.to(images.dtype)


def _factor(most: float, rng: SampleRNG) -> Tensor:
    low = max(0.0, 1 - most)
    return (low + (1 + most - low) * rng.uniform()).view(-1, 1, 1, 1)


def lightness(pixels: Tensor) -> Tensor:
    """(B, 1, H, W) of (B, C, H, W): the weighted mean of three channels, the plain mean of any other number."""
    channels = pixels.shape[1]
    weights = _LIGHTNESS if channels == 3 else (1 / channels,) * channels
    weighted = pixels[:, :1] * weights[0]
    for channel in range(1, channels):
        weighted += pixels[:, channel : channel + 1] * weights[channel]
    return weighted


def mean_lightness(pixels: Tensor, white: float) -> Tensor:
    """(B, 1, 1, 1). Summed as integers: a sum of floats depends on its order, which depends on the batch and threads."""
    unit = _FIXED_POINT / white
    whole = lightness(pixels).mul_(unit).round_().to(torch.int32)
    return whole.sum((2, 3), keepdim=True).float() / (unit * whole[0].numel())


def _turned(pixels: Tensor, turn: Tensor) -> Tensor:
    """Pixels (B, 3, H, W) with their hues turned by `turn` sixths of the circle, (B, 1, 1, 1), each from -6 to 6.

    Value is the largest channel of a pixel, chroma the difference to the smallest. A channel is the value minus a share of
    the chroma that depends on the hue alone, which is piecewise linear in the hue (Smith 1978).
    """
    red, green, blue = pixels.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # Products with 0 and 1 instead of torch.where, which is several times slower on the CPU.
    divisor = chroma + (1 - chroma.sign())
    not_red, not_green = (value - red).sign_(), (value - green).sign_()
    of_blue = ((red - green) / divisor).add_(4).mul_(not_green)
    of_green = ((blue - red) / divisor).add_(2).mul_(1 - not_green)
    of_red = ((green - blue) / divisor).mul_(1 - not_red)
    hue = of_blue.add_(of_green).mul_(not_red).add_(of_red).add_(turn[:, 0])
    turned = torch.empty_like(pixels)
    for channel, offset in enumerate((5, 3, 1)):
        place = hue + offset
        place.sub_((place / 6).floor_().mul_(6))
        part = torch.minimum(place, 4 - place).clamp_(0, 1)
        torch.sub(value, part.mul_(chroma), out=turned[:, channel])
    return turned
