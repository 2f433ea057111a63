"""Stochastic depth: whole residual branches are left out at random while training."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Zeroes the branch of some samples of a batch, and scales up the others so that the expectation stays.

    After Huang et al., "Deep Networks with Stochastic Depth" (arXiv:1603.09382), a draw for each sample.

    Args:
        rate: probability of leaving a sample's branch out, from 0 to below 1.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """A branch (B, ...) with rows of zeros; as it is while evaluating or at rate 0, which draws nothing."""
        if not self.training or self.rate == 0.0:
            return branch
        kept = 1.0 - self.rate
        mask = torch.empty(branch.shape[:1] + (1,) * (branch.ndim - 1), dtype=branch.dtype, device=branch.device)
        return branch * mask.bernoulli_(kept).div_(kept)

    def extra_repr(self) -> str:
        """The rate."""
        return f"rate={self.rate:g}"


def linear_rates(largest: float, depth: int) -> list[float]:
    """The rate of each of `depth` blocks, rising linearly to that of the last one: block l of L has `largest` * l / L."""
    return [largest * block / depth for block in range(1, depth + 1)]
