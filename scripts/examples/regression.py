"""A linear layer that finds the coefficients of a polynomial of degree 4.

After pytorch/examples regression: https://github.com/pytorch/examples/tree/main/regression
"""

from typing import Any

import torch
from torch.utils.data import TensorDataset


def polynomial(samples: int) -> TensorDataset:
    """Pairs of the powers of a random x and the polynomial of it; more than a run needs, so none is seen twice."""
    random = torch.Generator().manual_seed(0)
    powers = torch.randn(samples, 1, generator=random) ** torch.arange(1, 5)
    weight, bias = 5 * torch.randn(4, 1, generator=random), 5 * torch.randn(1, generator=random)
    return TensorDataset(powers, powers @ weight + bias)


class Stop:
    """End training at the first batch with a loss below 0.001."""

    def on_log(self, loop: Any, metrics: dict[str, float]) -> None:
        """Compare the loss, which is logged for each batch."""
        if metrics["loss"] < 1e-3:
            loop.request_stop(f"the loss is {metrics['loss']:.6f}")
