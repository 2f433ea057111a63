"""Randomness as a function of (seed, epoch, sample): no state, so nothing to restore and nothing to get out of step.

Random numbers are hashes of integers (the finaliser of splitmix64, Steele et al. 2014), computed for a whole batch with integer
arithmetic only, so that they have the same bits on every device, in every batch split and in every worker.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_CELLS = 4096  # a power of two, so that the place of a uniform number among them is exact
_POINTS = 2**16 + 1


def hash_ints(*parts: int) -> int:
    """Hash integers into one of 63 bits; the order of the parts matters."""
    state = 0
    for part in parts:
        state = (state + part * _GOLDEN + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state >> 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _hash(values: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 `values` of shape (B,); products wrap around as in C."""
    if values.device.type == "cpu":
        # NumPy's operations take a third of the time at these sizes, and it shifts unsigned numbers.
        return torch.from_numpy(splitmix64(values.numpy().view(np.uint64)).view(np.int64))
    return _hash_anywhere(values)


def splitmix64(bits: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser on uint64 `bits` of any shape; one to one."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SECOND)
    bits ^= bits >> np.uint64(31)
    return bits


def _hash_anywhere(values: Tensor) -> Tensor:
    """The same with torch alone, whose right shifts of negative numbers fill with ones."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _signed(_FIRST)
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _signed(_SECOND)
    return values ^ ((values >> 31) & ((1 << 33) - 1))


class SampleRNG:
    """Random numbers for the samples of one batch: each call gives new ones, one per sample.

    `indices` identify the samples in the data set, int64 of shape (B,), on the device of the numbers. `stream` separates
    consumers of the same samples, such as the place in a list of transforms.
    """

    def __init__(self, seed: int, epoch: int, indices: Tensor, stream: int = 0) -> None:
        self.seed, self.epoch, self.indices, self.stream = seed, epoch, indices, stream
        self._calls = 0

    @functools.cached_property
    def _keys(self) -> Tensor:
        base = _signed(hash_ints(self.seed, self.epoch, self.stream) << 1)
        return _hash(self.indices * _signed(_GOLDEN) + base)

    def uniform(self) -> Tensor:
        """Float32 numbers in [0, 1) of shape (B,), with 24 random bits each."""
        self._calls += 1
        return ((_hash(self._keys + self._calls) >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24

    def integers(self, count: int) -> Tensor:
        """Int64 numbers from 0 to `count` - 1 of shape (B,)."""
        self._calls += 1
        return ((_hash(self._keys + self._calls) >> 32) & 0x7FFFFFFF) % count

    def batch_integer(self, count: int) -> Tensor:
        """One int64 number from 0 to `count` - 1 for the whole batch, of shape (); independent of the order of the samples."""
        self._calls += 1
        return ((_hash(self._keys.sum(0, keepdim=True) + self._calls)[0] >> 32) & 0x7FFFFFFF) % count

    def partners(self) -> Tensor:
        """A partner in the batch for each sample, int64 of shape (B,): its neighbour in a ring of random order.

        Every sample is the partner of exactly one, and of itself only if it is alone. Partners depend on the set of samples
        alone, not on their order.
        """
        self._calls += 1
        order = torch.argsort(_hash(self._keys + self._calls), stable=True)
        return torch.empty_like(order).scatter_(0, order, order.roll(1))

    def without_epoch(self) -> SampleRNG:
        """Random numbers of the same samples that are the same in every epoch."""
        return SampleRNG(self.seed, -1, self.indices, self.stream)

    def fork(self, number: int) -> SampleRNG:
        """Independent random numbers of the same samples, for consumer `number` of several."""
        return SampleRNG(self.seed, self.epoch, self.indices, hash_ints(self.stream, number))


class Quantiles:
    """Random numbers of any distribution, by its quantiles at 0, 1/n, 2/n, ..., 1, float64 of shape (n + 1,); n a power of two.

    One uniform number gives one number, without rejections, generators or special functions, so that the number of a sample
    is the same in any batch and, on the CPU, at any place of a vector; `torch.distributions` promises neither. The
    distribution is exact at the knots of the table; between them its density is constant.
    """

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

    def logistic(y: np.ndarray) -> Any:
        return np.exp(-np.logaddexp(0, -y))

    def integral(values: np.ndarray) -> np.ndarray:  # twice the integral up to each point
        return np.concatenate([[0.0], np.cumsum(values[1:] + values[:-1])])

    # Beyond this the density is below exp(-36) of its peak: it falls as exp(-alpha |y|), near 0 as exp(-alpha y^2 / 4).
    reach = 36 / alpha + math.sqrt(4 * 36 / alpha)
    y = np.linspace(-reach, reach, _POINTS)
    density = np.exp(-2 * alpha * (np.logaddexp(y / 2, -y / 2) - math.log(2)))
    summed, moment = integral(density), integral(density * logistic(y))
    share = summed / summed[-1]
    # Both halves from the lower one, so that the distribution is symmetric to the last bit.
    x = logistic(np.interp(np.linspace(0, 0.5, _CELLS // 2 + 1), share, y))
    # The long tail of a large alpha gets its true mean, instead of reaching to 0.
    mean_of_tail = np.interp(1 / _CELLS, share, moment) / summed[-1] * _CELLS
    x[0], x[-1] = max(0.0, 2 * mean_of_tail - x[1]), 0.5
    return Quantiles(np.concatenate([x, 1 - x[-2::-1]]))


def log_uniform(low: float, high: float) -> Quantiles:
    """Numbers from `low` to `high` whose logarithm is uniform; both above 0."""
    return Quantiles(np.exp(np.linspace(math.log(low), math.log(high), _CELLS + 1)))


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the CPU generators of Python, NumPy and torch afterwards."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed the CPU generators of Python, NumPy and torch for one sample; call inside `preserved_rng`."""
    key = hash_ints(seed, epoch, index, 1)
    # torch.manual_seed would visit every backend, which takes longer than reading a sample.
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
