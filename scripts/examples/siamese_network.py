"""A network that tells whether two images show the same digit.

After pytorch/examples siamese_network: https://github.com/pytorch/examples/tree/main/siamese_network
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet18


class Pairs(torch.utils.data.Dataset):
    """Random pairs of images, of the same class for even numbers and of different classes for odd ones."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.places = images, [(labels == label).nonzero().flatten() for label in labels.unique()]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        one, other = torch.randperm(len(self.places))[:2].tolist()
        first, second = self.places[one], self.places[other if index % 2 else one]
        place = int(torch.randint(len(first), ()))
        # A step of at least 1, so that an image is never paired with itself.
        partner = (place + int(torch.randint(1, len(second), ()))) % len(second)
        return self.images[first[place]], self.images[second[partner]], 1 - index % 2


def pairs(source: Any) -> dict[str, Pairs]:
    """Pairs of the images of each split of a data set in memory."""
    return {name: Pairs(split.images, split.targets) for name, split in source.items()}


class Siamese(nn.Module):
    """Features of both images by the same ResNet-18, and two linear layers that compare them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = resnet18()
        self.backbone.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
        self.backbone.fc = nn.Identity()
        layers = nn.Linear(2 * 512, 256), nn.Linear(256, 1)
        self.head = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.constant_(layer.bias, 0.01)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Logits (B,) of being the same."""
        return self.head(torch.cat([self.backbone(first), self.backbone(second)], dim=1)).squeeze(1)


class Compare:
    """Batches are two images and whether they are of the same class."""

    def evaluation_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The binary cross-entropy, and probabilities for metrics."""
        logits = modules["model"](*batch[:2])
        loss = F.binary_cross_entropy_with_logits(logits, batch[2].to(logits.dtype))
        return {"loss": loss, "outputs": logits.sigmoid(), "targets": batch[2]}

    def training_step(self, modules: Any, batch: Any) -> Tensor:
        """The binary cross-entropy."""
        return self.evaluation_step(modules, batch)["loss"]

    def predict_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The probability that both images show the same digit."""
        return {"same": modules["model"](*batch[:2]).sigmoid()}

    def draw(self, sample: Any, outputs: Any) -> Tensor:
        """Both images."""
        return torch.cat([sample[0][0], sample[1][0]], dim=2)
