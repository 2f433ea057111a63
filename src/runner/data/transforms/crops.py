"""Random crops of photographs, with the generators that are seeded for each sample.

Own code instead of torchvision's `RandomResizedCrop`: it chooses the part before the file is decoded, and its random numbers
must not change.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from runner.data.samples import as_tensor
from runner.data.sources.image_io import Region, resized
from runner.data.transforms.resized_crop import checked_ranges

_TRIES = 10


class RandomResizedCrop:
    """Crop a part of random area and shape from an image and resize it to a square (Szegedy et al. 2015).

    A sample transform. If it comes first and the images are files, it chooses the part before the file is decoded, so that a
    large photograph is decoded only as large as needed.

    Args:
        size: edge of the square in pixels; None for the shorter side of the image.
        scale: smallest and largest area of the part as a share of the image's.
        ratio: smallest and largest width divided by height, uniform on a logarithmic scale.
    """

    def __init__(
        self, size: int | None, scale: Sequence[float] = (0.08, 1.0), ratio: Sequence[float] = (3 / 4, 4 / 3)
    ) -> None:
        if size is not None and size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size
        self.scale, self.ratio = checked_ranges(scale, ratio)

    def region(self, height: int, width: int) -> Region:
        """A random part of an image of this size; the largest central part of an allowed shape if none is found."""
        shortest, longest = (math.log(value) for value in self.ratio)
        for _ in range(_TRIES):
            area = random.uniform(*self.scale) * height * width
            ratio = math.exp(random.uniform(shortest, longest))
            rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < rows <= height and 0 < columns <= width:
                return random.randint(0, height - rows), random.randint(0, width - columns), rows, columns
        columns = max(1, min(width, round(height * self.ratio[1])))
        rows = max(1, min(height, round(columns / self.ratio[0])))
        return (height - rows) // 2, (width - columns) // 2, rows, columns

    def __call__(self, image: Any) -> Tensor:
        """Crop a tensor (C, H, W), an array or a PIL image; uint8 stays uint8."""
        tensor = as_tensor(image)
        size = self.size or min(tensor.shape[1:])
        return resized(tensor, self.region(*tensor.shape[1:]), size)
