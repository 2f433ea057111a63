"""Parts of a run that do not repeat, each in its own way, for `audit` to find."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info


class Restless(nn.Module):
    """Scales its input by a draw of a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random()

    def forward(self, features: Tensor) -> Tensor:
        return features * (1 + 0.01 * self.draws.random())


class Seeded(nn.Module):
    """Scales its input by draws of the global generators."""

    def forward(self, features: Tensor) -> Tensor:
        return features * (1 + 0.01 * random.random() + 0.01 * np.random.rand() + 0.01 * torch.rand(()))


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, features: Tensor) -> Tensor:
        return features.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 0.01 * random.SystemRandom().random())


class RestlessBackward(nn.Module):
    """Does not repeat in backward alone."""

    def forward(self, features: Tensor) -> Tensor:
        return _Back.apply(features)


class Net(nn.Module):
    """Two linear layers with `middle` between them."""

    def __init__(self, num_classes: int, middle: str = "", fault: str = "", **unused: Any) -> None:
        super().__init__()
        kinds = {"": nn.Identity, "forward": Restless, "seeded": Seeded, "backward": RestlessBackward}
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        self.middle = nn.Sequential(nn.ReLU(), kinds[middle](), nn.Dropout(0.5))
        self.head = nn.Linear(16, num_classes)
        noise = np.random.default_rng()
        if fault == "hook":
            self.stem[1].weight.register_hook(lambda gradient: gradient * float(1 + 0.01 * noise.random()))
        if fault == "weights":
            nn.init.constant_(self.head.bias, float(noise.random()))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(images)))


class OwnGenerator:
    """A transform that makes a generator for itself."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __call__(self, image: Tensor) -> Tensor:
        return image + int(self.generator.integers(0, 3))


class OwnGeneratorOfBatches:
    """The same for a whole batch."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __call__(self, images: Tensor, rng: Any) -> Tensor:
        return images + int(self.generator.integers(0, 100))


class ByWorker:
    """A transform seeded with the worker that runs it."""

    def __call__(self, image: Tensor) -> Tensor:
        worker = get_worker_info()
        return image + int(np.random.default_rng(0 if worker is None else worker.id + 1).integers(0, 200))


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
