"""Parts of a run that do not repeat, each in its own way, for `audit` to find."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two linear layers; with `restless`, what is between them is scaled by a draw that nobody seeds."""

    def __init__(self, num_classes: int, restless: bool = False, **unused: Any) -> None:
        super().__init__()
        self.draws, self.scale = random.Random(), 0.01 * restless
        self.stem, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), nn.Linear(16, num_classes)
        self.middle = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(images)) * (1 + self.scale * self.draws.random()))


class OwnGenerator:
    """A transform that makes a generator for itself."""

    def __init__(self) -> None:
        self.generator = random.Random()

    def __call__(self, image: Tensor) -> Tensor:
        return image + self.generator.randrange(3)


class Perturbed(torch.optim.SGD):
    """An optimizer that adds noise to the weights."""

    def __init__(self, params: Any, lr: float, **unused: Any) -> None:
        super().__init__(params, lr)

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter += 1e-3 * random.SystemRandom().random()
        return result
