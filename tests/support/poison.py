"""A batch transform that spoils a sample."""

from __future__ import annotations

from typing import Any

import torch


class Poison:
    """Makes every pixel of one sample not a number, and scales the others to 1."""

    per_sample = True

    def __init__(self, sample: int) -> None:
        self.sample = sample

    def __call__(self, images: torch.Tensor, rng: Any) -> torch.Tensor:
        return torch.where((rng.indices == self.sample).view(-1, 1, 1, 1), torch.nan, images.float() / 255)
