"""Random resized crop of a batch on the device, and the checks that it shares with `crops`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.data.sample_rng import SampleRNG, log_uniform
from runner.data.transforms.augment import rounded


class RandomResizedCrop:
    """Crop a part of random area and shape from each image and enlarge it to the image's size (Szegedy et al. 2015).

    A batch transform, for images in memory; `crops.RandomResizedCrop` crops files while they are decoded. The part is only
    ever enlarged, so bilinear interpolation needs no antialiasing. Areas are uniform and shapes log-uniform; a part that does
    not fit into the image gets the nearest shape of the same area that does. Parts start at any place, also between pixels.

    Args:
        scale: smallest and largest area of the part as a share of the image's.
        ratio: smallest and largest width divided by height.
    """

    per_sample = True

    def __init__(self, scale: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (0.75, 4 / 3)) -> None:
        self.scale, self.ratio = checked_ranges(scale, ratio)
        self._ratios = log_uniform(*self.ratio)

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Crop and enlarge `images`; computed in float32."""
        height, width = images.shape[-2:]
        smallest, largest = self.scale
        area = smallest + (largest - smallest) * rng.uniform()
        # Width by height of the part in units of the image; within [area, 1 / area] neither side is above 1.
        shape = self._ratios(rng.uniform()) * (height / width)
        shape = shape.clamp(area, 1 / area)
        down = _places((area / shape).sqrt(), rng.uniform(), height)
        across = _places((area * shape).sqrt(), rng.uniform(), width)
        size = (len(images), height, width)
        grid = torch.stack((across[:, None, :].expand(size), down[:, :, None].expand(size)), dim=1).permute(0, 2, 3, 1)
        sampled = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
        if images.dtype == torch.uint8:
            return rounded(sampled)
        return sampled.clamp_(0, 1).to(images.dtype)


def _places(share: Tensor, start: Tensor, size: int) -> Tensor:
    """Source positions of the pixels of one axis, (B, size), from -1 at one edge of the image to 1 at the other.

    `share` (B,) is the length of the part as a share of the axis; `start` (B,) from 0 for the lowest place to 1 for the
    highest.
    """
    share = share.clamp(max=1)
    middles = (torch.arange(size, device=share.device) + 0.5) * (2 / size)
    # Sums and products that round separately: fused ones would depend on a pixel's place in a vector.
    offset = (1 - share) * start * 2 - 1
    return middles * share[:, None] + offset[:, None]


def checked_ranges(scale: Sequence[float], ratio: Sequence[float]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Both ranges as pairs of floats; raises `ValueError` for others."""
    if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"scale must be two shares, above 0, at most 1 and in order, got {list(scale)}")
    if len(ratio) != 2 or not 0 < ratio[0] <= ratio[1]:
        raise ValueError(f"ratio must be two numbers above 0 and in order, got {list(ratio)}")
    return (float(scale[0]), float(scale[1])), (float(ratio[0]), float(ratio[1]))
