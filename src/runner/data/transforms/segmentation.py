"""A transform of an image and its mask that torchvision.transforms.v2 does not have."""

from __future__ import annotations

from typing import Any

import torch


class ScaleCrop:
    """Scales image and mask by one factor, pads them below and on the right, and crops a square at random.

    With the factor 1, the longer side has the size of the square, so nothing is cut off and nothing is random. Images are
    resized bilinearly and padded with 0; masks keep their values.

    Args:
        size: edge of the square, in pixels.
        scale: least and largest factor, which is drawn uniformly.
        ignore_index: value of padded pixels of masks.

    Raises `ValueError` if a number is out of range.
    """

    def __init__(
        self, size: int | None = None, scale: tuple[float, float] = (1.0, 1.0), ignore_index: int = 255
    ) -> None:
        if size is None:
            raise ValueError("size is null: set data.image_size to the edge of the squares, in pixels")
        if size < 1 or not 0 < scale[0] <= scale[1]:
            raise ValueError(f"size and scale must be positive, and scale not fall, got {size} and {list(scale)}")
        if not 0 <= ignore_index <= 255:
            raise ValueError(f"ignore_index must be 0 to 255, as masks are bytes, got {ignore_index}")
        self.size, self.scale, self.ignore_index = size, scale, ignore_index
        fixed = {"resize": "longer side to image_size, bilinear", "padding": "below and on the right, with 0"}
        self.export_description = fixed if scale[0] == scale[1] == 1 else {}  # for `model.json`

    def __call__(self, sample: tuple[Any, Any]) -> tuple[Any, Any]:
        """Transform an image (C, H, W) and its mask (H, W) or (1, H, W); targets of other types stay as they are."""
        from torchvision.transforms.v2 import functional as F  # takes a second, and most runs do not use it

        size, (height, width) = self.size, sample[0].shape[-2:]
        factor = size / max(height, width) * float(torch.empty(()).uniform_(*self.scale))
        rows, columns = (max(1, round(side * factor)) for side in (height, width))
        padding = [0, 0, max(0, size - columns), max(0, size - rows)]
        top, left = (int(torch.randint(max(0, side - size) + 1, ())) for side in (rows, columns))

        def cut(part: Any, fill: int) -> Any:
            return F.crop(F.pad(F.resize(part, [rows, columns]), padding, fill=fill), top, left, size, size)

        image, mask = sample
        return cut(image, 0), cut(mask, self.ignore_index) if isinstance(mask, torch.Tensor) else mask
