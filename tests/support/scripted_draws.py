"""Random numbers of samples that a test gives."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.data.sample_rng import SampleRNG


class Scripted(SampleRNG):
    """Draws that are given, the same for each of `count` samples."""

    def __init__(self, count: int, *values: float) -> None:
        super().__init__(0, 0, torch.arange(count))
        self.values = list(values)

    def uniform(self) -> Tensor:
        return torch.full((len(self.indices),), self.values.pop(0))
