"""A tensor in a few numbers and a histogram."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 40


@dataclass(frozen=True)
class Summary:
    """The distribution of a tensor; elements that are not finite are counted, and ignored in everything else."""

    name: str
    shape: tuple[int, ...]
    mean: float  # NaN if no element is finite, and so below
    std: float
    minimum: float
    maximum: float
    norm: float  # 2-norm
    zeros: float  # share of elements that are exactly 0
    not_finite: int  # how many are NaN or infinite
    low: float  # of the histogram
    high: float
    counts: list[int]  # elements in each of its bins, which are equally wide


def summarize(name: str, tensor: Tensor) -> Summary:
    """The summary of a tensor of any device and dtype."""
    # On the CPU, where a histogram is made of whole numbers that are the same each time.
    values = tensor.detach().float().cpu().flatten()
    finite = values.isfinite()
    not_finite = int((~finite).sum())
    values = values[finite] if not_finite else values
    shape, count = tuple(tensor.shape), values.numel()
    if count == 0:
        unknown = dict.fromkeys(("mean", "std", "minimum", "maximum", "norm"), math.nan)
        return Summary(name, shape, zeros=0.0, not_finite=not_finite, low=0.0, high=0.0, counts=[], **unknown)
    low, high = float(values.min()), float(values.max())
    mean = float(values.sum(dtype=torch.float64)) / count
    squares = float(values.double().square().sum())
    left, right = (low, high) if high > low else (low - 0.5, high + 0.5)
    return Summary(
        name=name,
        shape=shape,
        mean=mean,
        std=math.sqrt(max(0.0, squares / count - mean * mean)),
        minimum=low,
        maximum=high,
        norm=math.sqrt(squares),
        zeros=float((values == 0).sum()) / count,
        not_finite=not_finite,
        low=left,
        high=right,
        counts=[int(number) for number in torch.histc(values, BINS, left, right).tolist()],
    )


def dead_units(outputs: Tensor) -> tuple[int, int] | None:
    """Units of rectified outputs that are 0 for every sample and at every place, and how many units there are.

    A unit is a channel of (B, C, H, W), and a feature of (B, F) and of tokens (B, N, F).

    Returns:
        None if the outputs are not rectified: of another number of axes, with a negative value, or without a zero.
    """
    if outputs.ndim not in (2, 3, 4) or not outputs.is_floating_point() or outputs.numel() == 0:
        return None
    if bool((outputs < 0).any()) or not bool((outputs == 0).any()):
        return None
    units = 1 if outputs.ndim == 4 else outputs.ndim - 1
    silent = (outputs == 0).movedim(units, 0).flatten(1).all(dim=1)
    return int(silent.sum()), silent.numel()
