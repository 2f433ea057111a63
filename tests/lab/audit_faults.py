"""A model that does not repeat, for `audit` to find."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor, nn


class Restless(nn.Module):
    """Two linear layers; what is between them is scaled by a draw that nobody seeds."""

    def __init__(self, num_classes: int, **unused: Any) -> None:
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), nn.Linear(16, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stem(images).relu() * (1 + 0.01 * random.SystemRandom().random()))
