"""Random numbers of a few samples, also such as a test gives."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.data.sample_rng import SampleRNG


def draws(count: int, epoch: int = 0, seed: int = 11) -> SampleRNG:
    """Draws of `count` samples."""
    return SampleRNG(seed, epoch, torch.arange(count) * 3)


class Scripted(SampleRNG):
    """Draws that are given, the same for each of `count` samples."""

    def __init__(self, count: int, *values: float) -> None:
        super().__init__(0, 0, torch.arange(count))
        self.values = list(values)

    def uniform(self) -> Tensor:
        return torch.full((len(self.indices),), self.values.pop(0))
