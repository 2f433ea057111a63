"""Layers that are trained one after the other, each by a loss of its own, on images with a right or a wrong label in them.

After pytorch/examples mnist_forward_forward: https://github.com/pytorch/examples/tree/main/mnist_forward_forward
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.tasks.classification import Classification


def labelled(images: Tensor, labels: Tensor) -> Tensor:
    """Images (B, pixels) whose first ten pixels are the label."""
    return torch.cat([F.one_hot(labels, 10) * images.max(), images[:, 10:]], dim=1)


class Layer(nn.Linear):
    """A linear layer of normalized inputs, and ReLU."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs (B, out_features)."""
        return super().forward(inputs / (inputs.norm(dim=1, keepdim=True) + 1e-4)).relu()


class Net(nn.ModuleList):
    """Layers whose outputs have a large mean square if the label in the image is right."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(Layer(*pair) for pair in pairwise(sizes))

    def forward(self, images: Tensor) -> Tensor:
        """Goodness (B, 10) of each label: the mean squares of all layers, summed."""
        images, goodness = images.flatten(1), []
        for label in torch.arange(10, device=images.device):
            hidden = labelled(images, label.expand(len(images)))
            goodness.append(sum((hidden := layer(hidden)).square().mean(1) for layer in self))
        return torch.stack(goodness, dim=1)


class ForwardForward(Classification):
    """The goodness of right labels gets above the threshold, that of wrong ones below, in each layer."""

    def __init__(self, num_classes: int, threshold: float) -> None:
        super().__init__(num_classes)
        self.threshold = threshold

    def optimizers(self, modules: Any) -> dict[str, nn.Module]:
        """One for each of two layers."""
        return dict(zip(("first", "second"), modules["model"], strict=True))

    def optimizer_steps(self, modules: Any, batch: Any) -> Iterator[tuple[str, Tensor]]:
        """The loss of each layer, whose inputs are the outputs of the updated layer before it."""
        images, labels = batch[0].flatten(1), batch[1]
        wrong = (labels + torch.randint(1, 10, labels.shape, device=labels.device)) % 10
        inputs = torch.cat([labelled(images, labels), labelled(images, wrong)])
        for name, layer in self.optimizers(modules).items():
            right, false = layer(inputs).square().mean(1).chunk(2)
            yield name, F.softplus(torch.cat([self.threshold - right, false - self.threshold])).mean()
            inputs = layer(inputs).detach()

    def evaluation_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The label with the largest goodness is the prediction."""
        return {"outputs": modules["model"](batch[0]), "targets": batch[1]}
