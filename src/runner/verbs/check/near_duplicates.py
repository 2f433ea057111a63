"""Similar pictures: mirrored, rotated, shifted, cropped, rescaled, brighter, grey, or compressed again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_SAME = 0.9995  # correlation at which two thumbnails always count as the same picture
_CLOSE = 0.88  # least correlation of the detail of a picture that was also moved
_RATIO = 0.4  # most that the distance to the same picture may be of the distance to another one
_OTHERS = 3  # rank of that other picture, so that two copies of one picture do not hide each other
_MARGIN = 2  # thumbnail pixels cut off at each border, and by how many pictures may be shifted
_SCALES = (1.0, 0.8, 0.9, 1.125, 1.25)
_QUERIES = 256  # pictures that are compared in every position


def unit_vectors(images: Tensor) -> Tensor:
    """Images as vectors of length 1 without their mean, so that brightness and contrast do not count: (N, D)."""
    flat = images.flatten(1).double()
    flat = flat - flat.mean(1, keepdim=True)
    units: Tensor = flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-6)
    return units.float()


def nearest_matches(queries: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find thumbnails (Q, C, h, w) among others (N, C, h, w).

    Returns for each the correlation with the most similar picture, the place of that among the others, and whether both are
    the same picture, (Q,) each.

    Unrelated photographs can have a correlation of 0.9, and images of one pattern with noise 0.99, so a correlation alone
    does not decide. The same picture occurs once: other pictures are much less similar to it.
    """
    correlation, place = (unit_vectors(queries) @ unit_vectors(known).T).max(1)
    same = correlation > _SAME
    if min(known.shape[2:]) > 2 * _MARGIN + 4 and len(known) > _OTHERS:
        aligned = _aligned_correlations(queries[:_QUERIES], known)
        best, places = aligned.topk(_OTHERS, 1)
        found = (best[:, 0] > _CLOSE) & (1 - best[:, 0] < _RATIO * (1 - best[:, -1]))
        newly = (found & ~same[:_QUERIES]).nonzero().flatten()
        correlation[newly], place[newly] = best[newly, 0], places[newly, 0]
        same[newly] = True
    return correlation, place, same


def _aligned_correlations(queries: Tensor, known: Tensor) -> Tensor:
    """The best correlation of each query with each known picture in any position, (Q, N)."""
    height, width = known.shape[2] - 2 * _MARGIN, known.shape[3] - 2 * _MARGIN
    # Without color, which copies may have lost.
    queries, known = queries.mean(1, keepdim=True), known.mean(1, keepdim=True)
    middle = ..., slice(_MARGIN, _MARGIN + height), slice(_MARGIN, _MARGIN + width)
    windows = [queries.flip(2)[middle], queries.rot90(2, (2, 3))[middle]]
    if height == width:
        turned = (queries, queries.flip(2), queries.flip(3), queries.rot90(2, (2, 3)))
        windows += [image.rot90(1, (2, 3))[middle] for image in turned]
    for scale in _SCALES:
        size = [max(round(side * scale), 1) for side in known.shape[2:]]
        images = [F.interpolate(queries, size, mode="bilinear", antialias=True)]
        if scale == 1.0:  # also shifted by half a pixel
            right = (queries + queries.roll(1, 3)) / 2
            images = [queries, right, (queries + queries.roll(1, 2)) / 2, (right + right.roll(1, 2)) / 2]
        step = 1 if scale <= 1.0 else 2
        windows += [
            image[:, :, top : top + height, left : left + width]
            for image in (*images, *(each.flip(-1) for each in images))
            for top in _offsets(size[0], height)[::step]
            for left in _offsets(size[1], width)[::step]
        ]
    # Without smooth gradients, which any two photographs have in common: polynomials of degree 2 over the image.
    down, right = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    terms = [torch.ones_like(down), down, right, down * right, down.square(), right.square()]
    basis = torch.linalg.qr(torch.stack(terms).flatten(1).T).Q

    def detail(images: Tensor) -> Tensor:
        flat = images.flatten(1)
        return unit_vectors(flat - flat @ basis @ basis.T)

    ours, best = detail(known[middle]), torch.full((len(queries), len(known)), -1.0)
    for window in windows:
        best = torch.maximum(best, detail(window) @ ours.T)
    return best


def _offsets(size: int, window: int) -> range:
    """Where windows begin: at most `_MARGIN` from the middle."""
    middle = (size - window) // 2
    return range(max(0, middle - _MARGIN), min(size - window, middle + _MARGIN) + 1)
