"""Random numbers of any distribution from uniform ones, by a table of its quantiles.

One uniform number gives one number, without rejections, generators or special functions, so that the number of a sample is
the same in any batch and, on the CPU, at any place of a vector. `torch.distributions` promises neither. The distribution is
exact at the knots of the table; between them its density is constant.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_CELLS = 4096  # a power of two, so that the place of a uniform number among them is exact
_POINTS = 2**16 + 1


class Quantiles:
    """A distribution by its quantiles at 0, 1/n, 2/n, ..., 1, float64 of shape (n + 1,); n a power of two."""

    def __init__(self, values: np.ndarray) -> None:
        self._table = torch.from_numpy(values).to(torch.float32)

    def __call__(self, uniform: Tensor) -> Tensor:
        """Float32 numbers of this distribution from uniform numbers in [0, 1), of the same shape and device."""
        if self._table.device != uniform.device:
            self._table = self._table.to(uniform.device)  # once; a transform stays on its device
        place = uniform * (len(self._table) - 1)
        cell = place.long()
        low = self._table[cell]
        # Not lerp: fused and unfused products round differently, and the choice may depend on a sample's place.
        return low + (place - cell) * (self._table[cell + 1] - low)


def beta(alpha: float) -> Quantiles:
    """The symmetric Beta distribution, Beta(alpha, alpha), on [0, 1].

    With x = 1 / (1 + exp(-y)), the density of y is proportional to (2 cosh(y / 2))^(-2 alpha), which is smooth for every
    alpha, while that of x has poles at 0 and 1 for alpha below 1. It is integrated by the trapezoidal rule.

    Args:
        alpha: small values give numbers close to 0 or 1, 1 a uniform distribution, large values numbers close to 0.5.

    Raises:
        ValueError: if alpha is not from 0.001 to 1000000.
    """
    if not 1e-3 <= alpha <= 1e6:
        raise ValueError(f"alpha must be from 0.001 to 1000000, got {alpha}")
    # Beyond this the density is below exp(-36) of its peak: it falls as exp(-alpha |y|), near 0 as exp(-alpha y^2 / 4).
    reach = 36 / alpha + math.sqrt(4 * 36 / alpha)
    y = np.linspace(-reach, reach, _POINTS)
    density = np.exp(-2 * alpha * (np.logaddexp(y / 2, -y / 2) - math.log(2)))
    summed, moment = _integral(density), _integral(density * _logistic(y))
    share = summed / summed[-1]
    # Both halves from the lower one, so that the distribution is symmetric to the last bit.
    x = _logistic(np.interp(np.linspace(0, 0.5, _CELLS // 2 + 1), share, y))
    # The long tail of a large alpha gets its true mean, instead of reaching to 0.
    mean_of_tail = np.interp(1 / _CELLS, share, moment) / summed[-1] * _CELLS
    x[0], x[-1] = max(0.0, 2 * mean_of_tail - x[1]), 0.5
    return Quantiles(np.concatenate([x, 1 - x[-2::-1]]))


def _logistic(y: np.ndarray) -> np.ndarray:
    x: np.ndarray = np.exp(-np.logaddexp(0, -y))
    return x


def _integral(values: np.ndarray) -> np.ndarray:
    """Twice the integral up to each point, by the trapezoidal rule."""
    return np.concatenate([[0.0], np.cumsum(values[1:] + values[:-1])])


def log_uniform(low: float, high: float) -> Quantiles:
    """Numbers from `low` to `high` whose logarithm is uniform; both above 0."""
    return Quantiles(np.exp(np.linspace(math.log(low), math.log(high), _CELLS + 1)))
