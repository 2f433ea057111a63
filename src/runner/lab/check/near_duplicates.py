"""Similar pictures: mirrored, turned, rescaled, noisy, brighter, grey, or compressed again."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.lab.check.limits import LIMITS

_OTHERS = 3  # rank of that other picture, so that two copies of one picture do not hide each other
_SIDE = 9  # pixels of the smallest thumbnails that have detail


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
    correlation, place = _correlations(unit_vectors, queries, known).max(1)
    same = correlation > LIMITS.same_thumbnail
    if min(known.shape[2:]) >= _SIDE and len(known) >= _OTHERS:
        best, order = _correlations(_detail, queries, known).topk(_OTHERS, 1)
        found = (best[:, 0] > LIMITS.same_detail) & (1 - best[:, 0] < LIMITS.nearer * (1 - best[:, -1])) & ~same
        correlation, place = torch.where(found, best[:, 0], correlation), torch.where(found, order[:, 0], place)
        same |= found
    return correlation, place, same


def _correlations(vectors: Callable[[Tensor], Tensor], queries: Tensor, known: Tensor) -> Tensor:
    """The correlation of each query, turned and mirrored as it fits best, with each of the others: (Q, N)."""
    turns = range(4) if queries.shape[2] == queries.shape[3] else (0, 2)
    copies = [copy for turn in turns for copy in (queries.rot90(turn, (2, 3)), queries.rot90(turn, (2, 3)).flip(-1))]
    others = vectors(known).T
    return torch.stack([vectors(copy) @ others for copy in copies]).amax(0)


def _detail(images: Tensor) -> Tensor:
    """Unit vectors without smooth gradients, which any two photographs have in common: polynomials of degree 2."""
    down, right = torch.meshgrid(*(torch.linspace(-1, 1, side) for side in images.shape[2:]), indexing="ij")
    terms = [torch.ones_like(down), down, right, down * right, down.square(), right.square()]
    basis, flat = torch.linalg.qr(torch.stack(terms).flatten(1).T).Q, images.flatten(1)
    return unit_vectors(flat - flat @ basis @ basis.T)
