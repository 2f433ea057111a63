"""A variational autoencoder of handwritten digits.

After pytorch/examples vae: https://github.com/pytorch/examples/tree/main/vae
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class VAE(nn.Module):
    """Two linear layers each encode and decode images (B, 1, 28, 28)."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.latent = latent
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 2 * latent))
        self.decoder = nn.Sequential(
            *(nn.Linear(latent, 400), nn.ReLU(), nn.Linear(400, 784), nn.Unflatten(1, (1, 28, 28)))
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the pixels, of a random code, and its mean and log variance."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


class Reconstruct:
    """The loss is the error of all pixels of an image and the divergence of its code from a normal distribution."""

    def training_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The loss, and the divergence alone."""
        logits, mean, log_variance = modules["model"](batch[0])
        error = F.binary_cross_entropy_with_logits(logits, batch[0], reduction="sum") / len(logits)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return {"loss": error + divergence, "divergence": divergence}

    def evaluation_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The same loss: codes are random here too."""
        return {"loss": self.training_step(modules, batch)["loss"]}

    def predict_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """The reconstruction of each image, and a new image of a random code."""
        model = modules["model"]
        new = model.decoder(torch.randn(len(batch[0]), model.latent, device=batch[0].device))
        logits = {"reconstruction": model(batch[0])[0], "new": new}
        return {name: (255 * value.sigmoid()).byte() for name, value in logits.items()}

    def draw(self, sample: Any, outputs: Any) -> Tensor:
        """An image beside its reconstruction."""
        return torch.cat([sample[0][0], outputs["reconstruction"].expand(3, -1, -1)], dim=2)
