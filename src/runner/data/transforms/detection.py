"""Transforms of images with boxes that torchvision.transforms.v2 does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PER_OBJECT = ("labels", "iscrowd", "area")


def per_object(sample: Any) -> tuple[Tensor, ...]:
    """The tensors (N,) of a sample (image, target) with a value for each of its N boxes, for `SanitizeBoundingBoxes`."""
    target = sample[1]
    return tuple(target[name] for name in _PER_OBJECT if name in target)


class Mosaic:
    """Four images around a point, with their objects (Bochkovskiy et al. 2020, arXiv:2004.10934).

    Each is scaled by a factor of its own and has a corner at the point, which is drawn from the middle half of each side. What
    is outside of the canvas is cut off; what no image covers is black. The objects of all four are joined: boxes, masks and the
    values that `per_object` lists. The rest of the target is that of the sample.

    Args:
        size: edge of the square canvas in pixels; None for the size of the image of the sample.
        p: probability; without a mosaic, a sample stays as it is.
        scale: least and largest factor, drawn uniformly; with 1 an image just fits into the canvas.
        keep: share of the area of a box below which its object is removed.

    Raises `ValueError` if a number is out of range, or a sample is not an image with a dict of boxes.
    """

    takes_others = True

    def __init__(
        self, size: int | None = None, p: float = 0.5, scale: tuple[float, float] = (0.5, 1.0), keep: float = 0.1
    ) -> None:
        if (size or 1) < 1 or not 0 < scale[0] <= scale[1]:
            raise ValueError(f"size and scale must be positive, and scale not fall, got {size} and {list(scale)}")
        if not (0 <= p <= 1 and 0 <= keep < 1):
            raise ValueError(f"p must be 0 to 1, and keep 0 to below 1, got {p} and {keep}")
        self.size, self.p, self.scale, self.keep = size, p, scale, keep

    def __call__(self, sample: tuple[Any, Any], other: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Join an image (C, H, W) and its target with those of three calls of `other`."""
        from torchvision import tv_tensors  # takes a second, and most runs do not use it
        from torchvision.transforms.v2 import functional as F

        if not isinstance(sample[1], dict) or not isinstance(sample[1].get("boxes"), tv_tensors.BoundingBoxes):
            raise ValueError("a mosaic takes (image, dict) with boxes that are tv_tensors.BoundingBoxes")
        if float(torch.rand(())) >= self.p:
            return sample
        height, width = sample[0].shape[-2:] if self.size is None else (self.size, self.size)
        y, x = (round(side * float(torch.empty(()).uniform_(0.25, 0.75))) for side in (height, width))
        names = [name for name in ("boxes", "masks", *_PER_OBJECT) if name in sample[1]]
        images, parts = [], []
        for corner, (image, target) in enumerate([sample, other(), other(), other()]):
            factor = min(height / image.shape[-2], width / image.shape[-1])
            factor *= float(torch.empty(()).uniform_(*self.scale))
            size = [max(1, round(side * factor)) for side in image.shape[-2:]]
            offset = [-y if corner > 1 else size[0] - y, -x if corner % 2 else size[1] - x]
            whole = {name: F.resize(target[name], size) for name in names if name not in _PER_OBJECT}
            cut = {name: F.crop(part, *offset, height, width) for name, part in whole.items()}
            boxes = (part["boxes"] for part in (target, whole, cut))
            given, before, after = ((each[:, 2:] - each[:, :2]).prod(1) for each in boxes)
            if "area" in names:  # of the objects, in pixels of the image, as COCO has it
                target = target | {"area": target["area"] * after / given}
            parts.append({name: (target | cut)[name][after > self.keep * before] for name in names})
            images.append(F.crop(F.resize(image, size), *offset, height, width))
        joined = {name: torch.cat([part[name] for part in parts]) for name in names}
        joined |= {name: tv_tensors.wrap(joined[name], like=part) for name, part in cut.items()}
        # Each image is black where the others are
        return tv_tensors.wrap(sum(images), like=images[0]), sample[1] | joined
