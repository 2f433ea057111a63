"""What transforms of boxes need to know of a sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def per_object(sample: Any) -> tuple[Tensor, ...]:
    """The tensors (N,) of a sample (image, target) with a value for each of its N boxes, for `SanitizeBoundingBoxes`."""
    target = sample[1]
    return tuple(target[name] for name in ("labels", "iscrowd", "area") if name in target)
