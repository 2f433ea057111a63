"""An image with its objects while annotations are read, and the checks of boxes and outlines that all formats share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.base.errors import UserError

_OUTSIDE = 0.01  # of a side, by which a box may lie outside of the image, as annotation tools round; it is cut off


@dataclass
class Annotated:
    """An image file and its objects, while the annotations are read; lists have an item for each object."""

    path: Path
    image_id: int
    size: tuple[int, int] | None  # width and height in pixels that boxes refer to; None for fractions of them
    problem: str = ""  # why it cannot be used
    boxes: list[list[float]] = field(default_factory=list)  # left, top, right, bottom
    labels: list[int] = field(default_factory=list)  # 1 to the number of classes
    crowd: list[bool] = field(default_factory=list)  # whether a box is around many objects, which are not told apart
    outlines: list[Any] = field(default_factory=list)  # polygons or a run-length encoding, if masks are read

    def __post_init__(self) -> None:
        if not -(2**63) <= self.image_id < 2**63:
            raise ValueError(f"the id {self.image_id} has more than 64 bits")

    def add(self, place: str, box: Sequence[float], label: int, crowd: bool = False, outline: Any = None) -> None:
        """Add an object; `place` says where it stands."""
        inside, wrong = clipped(box, self.size)
        self.problem = self.problem or (wrong and f"the box in {place} {wrong}")
        if reason := _wrong_outline(outline, (self.size or (1, 1)) * 2, max(box)):
            self.problem = self.problem or f"the polygon of {place} {reason}"
        self.boxes.append(inside)
        self.labels.append(label)
        self.crowd.append(crowd)
        self.outlines.append(outline)


def clipped(box: Sequence[float], size: tuple[int, int] | None) -> tuple[list[float], str]:
    """The part of a box within its image, and what is wrong with it, or nothing; for `size` see `Annotated`."""
    sides = (size or (1, 1)) * 2
    inside = [min(max(number, 0), side) for number, side in zip(box, sides, strict=True)]
    near = all(abs(a - b) <= _OUTSIDE * side for a, b, side in zip(box, inside, sides, strict=True))
    if near and inside[0] < inside[2] and inside[1] < inside[3]:
        return inside, ""
    unit = f"in an image of {sides[0]}x{sides[1]} pixels" if size else "as fractions of width and height"
    shown = f"left, top, right, bottom = {', '.join(f'{number:g}' for number in box)} {unit}"
    if not size and max(box) > 2:
        shown += "; these look like pixels: divide x and width by the width of the image, y and height by its height"
    return inside, f"is empty, or outside of the image: {shown}"


def _wrong_outline(outline: Any, sides: Sequence[float], far: float) -> str:
    """What is wrong with the polygons of an object, such as that its mask would lack a part; or nothing.

    `far` is the largest number of its box.
    """
    if outline is None or isinstance(outline, dict):  # no masks, or run lengths
        return ""
    if not isinstance(outline, list) or not outline or not all(isinstance(part, list) for part in outline):
        return f"is not a list of polygons: {str(outline)[:60]}"
    if wrong := [part for part in outline if len(part) < 6 or len(part) % 2]:
        return f"has a part that is not three points or more: {str(wrong[0])[:60]}"
    if not any(map(_has_area, outline)):
        return f"is a line: {str(outline)[:60]}"
    if max(sides) > 1 and max(map(max, outline)) <= 1 < far - 1:
        return f"has fractions of width and height, and its box is in pixels: {str(outline)[:60]}"
    limits = [(part[axis::2], sides[axis]) for part in outline for axis in (0, 1)]
    if not all(-side <= number <= 2 * side for numbers, side in limits for number in numbers):  # they take memory
        return "is more than a side outside of the image"
    return ""


def _has_area(part: Sequence[float]) -> bool:
    """Tell whether the points of a polygon are not all on one line."""
    points = [(x - part[0], y - part[1]) for x, y in zip(part[::2], part[1::2], strict=True)]
    return not all(math.isclose(x * b, a * y) for (x, y), (a, b) in itertools.pairwise(points))


def refuse_shares(images: Sequence[Annotated], key: str, allowed: str) -> None:
    """Raise `UserError` if all boxes of images that have a size are within the first pixel: they are fractions of its sides."""
    sized = [image for image in images if image.size and image.boxes]
    if sized and max(number for image in sized for box in image.boxes for number in box) <= 1:
        problem = f"no number of a box is above 1, as in fractions of width and height, such as in {sized[0].path}"
        raise UserError(key, problem, allowed)
