"""An autoencoder that removes noise from handwritten digits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Autoencoder(nn.Sequential):
    """Convolutions to half the size and back."""

    def __init__(self, width: int) -> None:
        super().__init__(
            *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.ConvTranspose2d(width, width, 2, stride=2), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1)),
        )


class Denoise:
    """The loss is the mean squared error of the pixels."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def evaluation_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The error with random noise."""
        noisy = batch[0] + self.noise * torch.randn_like(batch[0])
        return {"loss": F.mse_loss(modules["model"](noisy), batch[0])}

    def training_step(self, modules: Any, batch: Any) -> Tensor:
        """The error with random noise, another one in each epoch."""
        return self.evaluation_step(modules, batch)["loss"]

    def predict_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """Each image with noise, and without it as the model sees it."""
        noisy = batch[0] + self.noise * torch.randn_like(batch[0])
        images = {"noisy": noisy, "clean": modules["model"](noisy)}
        return {name: (255 * image).clamp(0, 255).byte() for name, image in images.items()}

    def draw(self, sample: Any, outputs: Any) -> Tensor:
        """The image, with noise, and without it again."""
        return torch.cat([sample[0][0], *(outputs[name].expand(3, -1, -1) for name in ("noisy", "clean"))], dim=2)
