"""Similar pictures: mirrored, rotated, shifted, cropped, rescaled, noisy, brighter, grey, or compressed again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_SAME = 0.9995  # correlation at which two thumbnails always count as the same picture
_CLOSE = 0.88  # least correlation of the detail of a picture that was also moved
_RATIO = 0.4  # most that the distance to the same picture may be of the distance to another one
_OTHERS = 3  # rank of that other picture, so that two copies of one picture do not hide each other
_MARGIN = 2  # thumbnail pixels cut off at each border, and by how many pictures may be shifted
_SCALES = (0.8, 0.9, 1.125, 1.25)
_CANDIDATES = 16  # pictures that are compared in every position, those that are most similar at half the resolution


def unit_vectors(images: Tensor) -> Tensor:
    """Images as vectors of length 1 without their mean, so that brightness and contrast do not count: (N, D)."""
    flat = images.flatten(1).double()
    flat = flat - flat.mean(1, keepdim=True)
    return F.normalize(flat, dim=1, eps=1e-6).float()


def nearest_matches(queries: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find grey thumbnails (Q, 1, h, w) among others (N, 1, h, w).

    Returns for each the correlation with the most similar picture, the place of that among the others, and whether both are
    the same picture, (Q,) each.

    Unrelated photographs can have a correlation of 0.9, and images of one pattern with noise 0.99, so a correlation alone
    does not decide. The same picture occurs once: other pictures are much less similar to it.
    """
    units = unit_vectors(known).T
    correlation, place = torch.maximum(unit_vectors(queries) @ units, unit_vectors(queries.flip(-1)) @ units).max(1)
    same = correlation > _SAME
    if min(known.shape[2:]) > 2 * _MARGIN + 4 and len(known) > _OTHERS:
        aligned, candidates = _aligned_correlations(queries, known)
        best, order = aligned.topk(_OTHERS, 1)
        found = (best[:, 0] > _CLOSE) & (1 - best[:, 0] < _RATIO * (1 - best[:, -1])) & ~same
        correlation = torch.where(found, best[:, 0], correlation)
        place = torch.where(found, candidates.gather(1, order[:, :1])[:, 0], place)
        same |= found
    return correlation, place, same


def _aligned_correlations(queries: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The best correlation of each query in any position with its candidates, and their places: (Q, M) each."""
    height, width = (side - 2 * _MARGIN for side in known.shape[2:])
    middle = known[:, :, _MARGIN:-_MARGIN, _MARGIN:-_MARGIN]
    windows: list[Tensor] = []
    for copies in _copies(queries):
        down, right = (whole - side for whole, side in zip(known.shape[2:], copies.shape[2:], strict=True))
        # Larger copies are cropped, because a negative padding crops.
        fitted = F.pad(copies, (right // 2, right - right // 2, down // 2, down - down // 2))
        windows += F.unfold(fitted, (height, width)).movedim(2, 0).reshape(-1, len(queries), 1, height, width)
    # At half the resolution every second position is enough to find candidates.
    pooled = _detail(F.avg_pool2d(middle, 2)).T
    rough = torch.full((len(queries), len(known)), -1.0)
    for window in windows[::2]:
        rough = torch.maximum(rough, _detail(F.avg_pool2d(window, 2)) @ pooled)
    candidates = rough.topk(min(_CANDIDATES, len(known)), 1).indices
    theirs, best = _detail(middle)[candidates], torch.full(candidates.shape, -1.0)
    for window in windows:
        best = torch.maximum(best, (theirs @ _detail(window)[:, :, None])[:, :, 0])
    return best, candidates


def _copies(images: Tensor) -> list[Tensor]:
    """Images as copies of them may be: shifted by half a pixel, rescaled, turned, and mirrored."""
    right = (images + images.roll(1, 3)) / 2
    found = [images, right, (images + images.roll(1, 2)) / 2, (right + right.roll(1, 2)) / 2]
    for scale in _SCALES:
        size = [round(side * scale) for side in images.shape[2:]]
        found.append(F.interpolate(images, size, mode="bilinear", antialias=True))
    found += [images.rot90(turns, (2, 3)) for turns in ((1, 2, 3) if images.shape[2] == images.shape[3] else (2,))]
    return [*found, *(each.flip(-1) for each in found)]


def _detail(images: Tensor) -> Tensor:
    """Unit vectors without smooth gradients, which any two photographs have in common: polynomials of degree 2."""
    down, right = torch.meshgrid(*(torch.linspace(-1, 1, side) for side in images.shape[2:]), indexing="ij")
    terms = [torch.ones_like(down), down, right, down * right, down.square(), right.square()]
    basis, flat = torch.linalg.qr(torch.stack(terms).flatten(1).T).Q, images.flatten(1)
    return unit_vectors(flat - flat @ basis @ basis.T)
