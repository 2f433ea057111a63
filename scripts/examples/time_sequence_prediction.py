"""Two LSTM cells that continue sine waves, in double precision and trained by L-BFGS.

After pytorch/examples time_sequence_prediction: https://github.com/pytorch/examples/tree/main/time_sequence_prediction
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def waves(length: int = 1000, count: int = 100, period: float = 20.0) -> dict[str, list[Tensor]]:
    """Sine waves of random phases; the first three are evaluated after each step."""
    shift = numpy.random.RandomState(2).randint(-80, 80, (count, 1))
    signals = list(torch.from_numpy(numpy.sin((numpy.arange(length) + shift) / period)))
    return {"train": signals[3:], "val": signals[:3]}


class Continuation(nn.Module):
    """The next value after each one of signals (B, T), and then `future` values more."""

    def __init__(self, hidden: int = 51) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(1, hidden), nn.LSTMCell(hidden, hidden)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, signals: Tensor, future: int = 0) -> Tensor:
        """Values (B, T + future)."""
        first = second = None
        found: list[Tensor] = []
        for step in range(signals.shape[1] + future):
            value = signals[:, step, None] if step < signals.shape[1] else found[-1]
            first = self.first(value, first)
            second = self.second(first[0], second)
            found.append(self.linear(second[0]))
        return torch.cat(found, 1)


class Sequences:
    """Predict the next value; `predict` continues signals by `future` values."""

    def __init__(self, future: int = 1000) -> None:
        self.future = future

    def training_step(self, modules: Any, signals: Tensor) -> Tensor:
        """The mean squared error over all values."""
        return F.mse_loss(modules["model"](signals[:, :-1]), signals[:, 1:])

    def evaluation_step(self, modules: Any, signals: Tensor) -> dict[str, Tensor]:
        """The same."""
        return {"loss": self.training_step(modules, signals)}

    def predict_step(self, modules: Any, signals: Tensor) -> dict[str, Tensor]:
        """Predicted values of the signal and of its future."""
        return {"values": modules["model"](signals[:, :-1], self.future)}

    def draw(self, sample: Tensor, outputs: dict[str, Tensor]) -> Tensor:
        """The predicted values: the future is red."""
        values = outputs["values"]
        picture = torch.full((3, 200, len(values)), 255, dtype=torch.uint8)
        picture[:, (100 - 60 * values).long().clamp(0, 199), torch.arange(len(values))] = 0
        picture[0, :, sample.shape[1] :] = 255
        return picture
