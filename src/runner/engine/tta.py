"""Test-time augmentation: a model that averages its outputs over several views of each image.

Views are made from normalised images on the device and draw nothing at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

View = Callable[[Tensor], Tensor]

_CROP = 7 / 8  # edge of a crop as a share of the image's, as 224 of 256
_SHIFT = 1 / 32
_SCALES = (1.1, 0.9)


def _rotated(images: Tensor, quarters: int) -> Tensor:
    height, width = images.shape[-2:]
    if height != width:  # the shape would change
        raise ValueError(f"rotations require square images, and these have {height}x{width} pixels")
    return torch.rot90(images, quarters, (-2, -1))


def _shifted(images: Tensor, down: int, right: int) -> Tensor:
    """Moved by a thirty-second of the size, at least a pixel, in each direction that is not 0; the edge is repeated."""
    height, width = images.shape[-2:]
    rows, columns = down * max(1, round(_SHIFT * height)), right * max(1, round(_SHIFT * width))
    padded = F.pad(images, (abs(columns),) * 2 + (abs(rows),) * 2, mode="replicate")
    top, left = abs(rows) - rows, abs(columns) - columns
    return padded[..., top : top + height, left : left + width]


def _cropped(images: Tensor, down: float, right: float, mirror: bool = False) -> Tensor:
    """A crop of seven eighths of each edge, resized to full size (bilinear); 0, 0 is the top left, 1, 1 the bottom right."""
    height, width = images.shape[-2:]
    rows, columns = (max(1, round(_CROP * size)) for size in (height, width))
    top, left = round(down * (height - rows)), round(right * (width - columns))
    crop = _resized(images[..., top : top + rows, left : left + columns], height, width)
    return crop.flip(-1) if mirror else crop


def _scaled(images: Tensor, scale: float) -> Tensor:
    """Scaled by a factor about the centre (bilinear); the edge of a smaller image is repeated around it."""
    height, width = images.shape[-2:]
    rows, columns = (max(1, round(scale * size)) for size in (height, width))
    resized = _resized(images, rows, columns)
    if scale >= 1:
        top, left = (rows - height) // 2, (columns - width) // 2
        return resized[..., top : top + height, left : left + width]
    above, before = (height - rows) // 2, (width - columns) // 2
    return F.pad(resized, (before, width - columns - before, above, height - rows - above), mode="replicate")


def _resized(images: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)


_SAME: View = nn.Identity()
_FLIP = partial(torch.flip, dims=(-1,))
_CORNERS = ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.5))
_FIVE = tuple(partial(_cropped, down=down, right=right) for down, right in _CORNERS)
VIEWS: dict[str, tuple[View, ...]] = {
    "flip": (_FLIP,),
    "hflip": (_FLIP,),
    "vflip": (partial(torch.flip, dims=(-2,)),),
    "rotations": tuple(partial(_rotated, quarters=quarters) for quarters in (1, 2, 3)),
    "shifts": tuple(partial(_shifted, down=down, right=right) for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1))),
    "scales": tuple(partial(_scaled, scale=scale) for scale in _SCALES),
    "five_crop": _FIVE,
    "ten_crop": (*_FIVE, *(partial(view, mirror=True) for view in _FIVE)),
}
"""The views that each name selects, in addition to the original image."""


def views_named(names: Sequence[str]) -> list[View]:
    """The original image and the views of each name, seen in each view of the other names too."""
    sets = dict.fromkeys((_SAME, *VIEWS[name]) for name in names)
    return [partial(reduce, lambda images, view: view(images), views) for views in product(*sets)]


class TTAModel(nn.Module):
    """A model whose outputs are the mean over views of the images.

    With an `activation`, `softmax` or `sigmoid`, its probabilities are averaged, and logits returned that give their mean.
    """

    def __init__(self, model: nn.Module, views: Sequence[View], activation: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.views = list(views)
        self.activation = activation

    def forward(self, images: Tensor) -> Tensor:
        """Float32 outputs (B, C) of images (B, C, H, W)."""
        mean = reduce(torch.add, (self._outputs(images, view) for view in self.views)) / len(self.views)
        if self.activation is None:
            return mean
        if self.activation == "sigmoid":
            return mean.logit(eps=torch.finfo(mean.dtype).eps)
        # The smallest normal number replaces a probability of 0, whose logarithm is not finite.
        return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()

    def _outputs(self, images: Tensor, view: View) -> Tensor:
        seen = view(images)
        if images.is_contiguous(memory_format=torch.channels_last):
            seen = seen.contiguous(memory_format=torch.channels_last)
        outputs: Tensor = self.model(seen).float()
        if self.activation is None:
            return outputs
        return outputs.softmax(1) if self.activation == "softmax" else outputs.sigmoid()
