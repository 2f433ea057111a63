"""Stochastic depth: training skips whole residual branches at random."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Zeroes the branch of some samples of a batch, and scales up the others to keep the expectation.

    After Huang et al., "Deep Networks with Stochastic Depth" (arXiv:1603.09382), with a draw per sample.

    Args:
        rate: probability of skipping a sample's branch, from 0 to below 1.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """A branch (B, ...) with rows of zeros; unchanged, without a draw, in evaluation mode or at rate 0."""
        if not self.training or self.rate == 0.0:
            return branch
        kept = 1.0 - self.rate
        mask = torch.empty(branch.shape[:1] + (1,) * (branch.ndim - 1), dtype=branch.dtype, device=branch.device)
        return branch * mask.bernoulli_(kept).div_(kept)

    def extra_repr(self) -> str:
        """The rate."""
        return f"rate={self.rate:g}"


def linear_rates(largest: float, depth: int) -> list[float]:
    """The rates of `depth` blocks, which rise linearly: block l of L has `largest` * l / L."""
    return [largest * block / depth for block in range(1, depth + 1)]
