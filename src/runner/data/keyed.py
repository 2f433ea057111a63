"""Randomness as a function of (seed, epoch, sample): no state, so nothing to restore and nothing to get out of step.

Draws are made by hashing integers (the finaliser of splitmix64, Steele et al. 2014), a whole batch at a time and with
integer arithmetic only, so that they are the same bits on every device, in every batch split and in every worker.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(*parts: int) -> int:
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
    """splitmix64's finaliser on int64 `values` of any shape; products wrap around as in C."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _signed(_FIRST)
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _signed(_SECOND)
    return values ^ ((values >> 31) & ((1 << 33) - 1))


class Draws:
    """Random numbers for the samples of one batch: each call gives one number a sample.

    Args:
        seed: seed of the run.
        epoch: number of the epoch.
        indices: identity of each sample in the data set, int64 of shape (B,), on the device the draws are wanted on.
        stream: number that sets apart consumers with the same samples, such as the place in a list of transforms.
    """

    def __init__(self, seed: int, epoch: int, indices: Tensor, stream: int = 0) -> None:
        self._keys = _hash(indices * _signed(_GOLDEN) + _signed(mix(seed, epoch, stream) << 1))
        self._calls = 0

    def uniform(self) -> Tensor:
        """Float32 numbers in [0, 1) of shape (B,), with 24 random bits each."""
        self._calls += 1
        return ((_hash(self._keys + self._calls) >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24

    def integers(self, count: int) -> Tensor:
        """Int64 numbers from 0 to `count` - 1 of shape (B,)."""
        self._calls += 1
        return ((_hash(self._keys + self._calls) >> 32) & 0x7FFFFFFF) % count


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave the CPU generators of Python, NumPy and torch as they were found."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed the CPU generators of Python, NumPy and torch for one sample; call inside `preserved_rng`."""
    key = mix(seed, epoch, index, 1)
    # torch.manual_seed would visit every backend, which takes longer than reading a sample.
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
