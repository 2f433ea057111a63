"""Random resized crop of a batch on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.data.sample_rng import SampleRNG
from runner.data.transforms.augment import rounded
from runner.data.transforms.quantiles import log_uniform


class RandomResizedCrop:
    """Cut a part of random area and shape out of each image and enlarge it to the image's size (Szegedy et al. 2015).

    A batch transform, for images in memory; `crops.RandomResizedCrop` cuts from files as they are decoded. The
    part is never larger than what comes out, so it is only ever enlarged: bilinear interpolation is all that takes, as
    antialiasing matters where pixels are left out. Areas are uniform and shapes log-uniform; a part that would not fit
    into the image at its shape gets the nearest shape of the same area that does. Parts start at any place, also between
    two pixels.

    Args:
        scale: smallest and largest area of the part as a share of the image's.
        ratio: smallest and largest width divided by height.
    """

    per_sample = True

    def __init__(
        self,
        scale: list[float] | tuple[float, float] = (0.08, 1.0),
        ratio: list[float] | tuple[float, float] = (0.75, 4 / 3),
    ) -> None:
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"scale must be two shares, above 0, at most 1 and in order, got {list(scale)}")
        if len(ratio) != 2 or not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"ratio must be two numbers above 0 and in order, got {list(ratio)}")
        self.scale = (float(scale[0]), float(scale[1]))
        self.ratio = (float(ratio[0]), float(ratio[1]))
        self._ratios = log_uniform(*self.ratio)

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Cut and enlarge `images`; computed in float32."""
        height, width = images.shape[-2:]
        smallest, largest = self.scale
        area = smallest + (largest - smallest) * rng.uniform()
        # Width by height of the part where those of the image are 1 by 1; within [area, 1 / area] neither is above 1.
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
    """Where the pixels of one axis come from, (B, size), from -1 at one edge of the image to 1 at the other.

    Args:
        share: length of the part as a share of the axis, (B,).
        start: where it starts, from 0 for the lowest place to 1 for the highest, (B,).
        size: pixels of the axis.
    """
    share = share.clamp(max=1)
    middles = (torch.arange(size, device=share.device) + 0.5) * (2 / size)
    # Sums and products that round on their own: fused ones would depend on a pixel's place in a vector.
    offset = (1 - share) * start * 2 - 1
    return middles * share[:, None] + offset[:, None]
