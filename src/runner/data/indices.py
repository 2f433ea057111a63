"""Which samples of a data set belong to a split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, overload

import torch
from torch import Tensor


@dataclass(frozen=True)
class AllSamples:
    """All samples of a data set in order, without a list: reads like `torch.arange(samples)`."""

    samples: int

    def __len__(self) -> int:
        return self.samples

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice | Tensor) -> Tensor: ...
    def __getitem__(self, place: int | slice | Tensor) -> int | Tensor:
        """The index at a place; those of a slice, or at an int64 tensor of places from 0 on, as a tensor."""
        if isinstance(place, Tensor):
            return place
        found = range(self.samples)[place]
        return torch.arange(found.start, found.stop, found.step) if isinstance(found, range) else found


Indices: TypeAlias = Tensor | AllSamples
"""Samples of a split: int64 of shape (N,), or all there are."""
