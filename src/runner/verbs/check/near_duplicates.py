"""SampleImages that are nearly the same: mirrored, turned, shifted, cut out, rescaled, brighter, grey, or compressed again."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.verbs.check.sample_images import unit_vectors

_SAME = 0.9995  # correlation from which two copies count as the same picture whatever the others are like
_CLOSE = 0.88  # least correlation of the detail of a picture that was also moved
_RATIO = 0.4  # share that the distance to the same picture may have of the distance to another picture
_OTHERS = 3  # the rank of that other picture, so that two copies of one picture do not hide each other
_MARGIN = 2  # pixels of a small copy that are left out at each border, which is how far pictures may be shifted
_SCALES = (1.0, 0.8, 0.9, 1.125, 1.25)
_QUERIES = 256  # pictures that are compared in every position


class NearestMatch(NamedTuple):
    """For each query the most similar picture.

    Attributes:
        correlation: float32 (Q,).
        place: which of the known pictures it is, int64 (Q,).
        same: whether they are the same picture, bool (Q,).
    """

    correlation: Tensor
    place: Tensor
    same: Tensor


def nearest_matches(queries: Tensor, known: Tensor) -> NearestMatch:
    """SplitStats for small copies (Q, C, h, w) among others (N, C, h, w).

    Unrelated photographs can have a correlation of 0.9, and images of one pattern with noise 0.99. So a correlation alone does
    not tell. Of the same picture there is one: other pictures are much less similar to it.
    """
    whole = unit_vectors(queries) @ unit_vectors(known).T
    closest, place = whole.max(1)
    same = closest > _SAME
    if min(known.shape[2:]) <= 2 * _MARGIN + 4 or len(known) <= _OTHERS:
        return NearestMatch(closest, place, same)
    part = slice(0, _QUERIES)
    best, pick = _moved(queries[part], known)
    order = best.topk(_OTHERS, 1).values
    found = (order[:, 0] > _CLOSE) & (1 - order[:, 0] < _RATIO * (1 - order[:, -1]))
    newly = found & ~same[part]
    closest[part] = torch.where(newly, order[:, 0], closest[part])
    place[part] = torch.where(newly, pick, place[part])
    same[part] |= found
    return NearestMatch(closest, place, same)


def _moved(queries: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The best correlation of each query with each known picture in any position, (Q, N), and the best one's place, (Q,)."""
    height, width = known.shape[2] - 2 * _MARGIN, known.shape[3] - 2 * _MARGIN
    # Without colour, which copies may have lost.
    queries, known = queries.mean(1, keepdim=True), known.mean(1, keepdim=True)
    middle = slice(_MARGIN, _MARGIN + height), slice(_MARGIN, _MARGIN + width)
    basis = _gradients(height, width)
    ours = _detail(known[:, :, middle[0], middle[1]], basis)
    best = torch.full((len(queries), len(known)), -1.0)
    for scale in _SCALES:
        size = [max(round(side * scale), 1) for side in known.shape[2:]]
        scaled = queries if scale == 1.0 else F.interpolate(queries, size, mode="bilinear", antialias=True)
        images = [scaled]
        if scale == 1.0:  # by half a pixel, too
            right = (scaled + scaled.roll(1, 3)) / 2
            images += [right, (scaled + scaled.roll(1, 2)) / 2, (right + right.roll(1, 2)) / 2]
        for image in (*images, *(each.flip(-1) for each in images)):
            step = 1 if scale <= 1.0 else 2
            for top in _places(size[0], height)[::step]:
                for left in _places(size[1], width)[::step]:
                    window = image[:, :, top : top + height, left : left + width]
                    best = torch.maximum(best, _detail(window, basis) @ ours.T)
    turned = [queries.flip(2), queries.rot90(2, (2, 3))]
    if height == width:
        turned += [
            image.rot90(1, (2, 3)) for image in (queries, queries.flip(2), queries.flip(3), queries.rot90(2, (2, 3)))
        ]
    for image in turned:
        best = torch.maximum(best, _detail(image[:, :, middle[0], middle[1]], basis) @ ours.T)
    return best, best.argmax(1)


def _gradients(height: int, width: int) -> Tensor:
    """Orthonormal smooth gradients, (6, height * width)."""
    down, right = (
        each.flatten() for each in torch.meshgrid(*(torch.linspace(-1, 1, n) for n in (height, width)), indexing="ij")
    )
    terms = torch.stack([torch.ones_like(down), down, right, down * right, down.square(), right.square()], 1)
    made: Tensor = torch.linalg.qr(terms).Q.T
    return made


def _detail(images: Tensor, basis: Tensor) -> Tensor:
    """Grey images as vectors of length 1 without smooth gradients, which the sky of any two photographs has in common."""
    flat = images.flatten(1)
    return unit_vectors((flat - flat @ basis.T @ basis)[:, None])


def _places(size: int, window: int) -> range:
    """Where windows begin: at most `_MARGIN` from the middle."""
    middle = (size - window) // 2
    return range(max(0, middle - _MARGIN), min(size - window, middle + _MARGIN) + 1)
