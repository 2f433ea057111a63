"""Tasks that compute their steps and are tormented: a variational autoencoder and a generative adversarial network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F


class Vectors(torch.utils.data.Dataset[Tensor]):
    """Digits as vectors (64,) from -1 to 1, without targets."""

    def __init__(self) -> None:
        self.vectors = torch.from_numpy(load_digits().data / 8 - 1).float()

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> Tensor:
        return self.vectors[index]


class Autoencoder(nn.Module):
    """Encodes vectors as the mean and the logarithm of the variance of 8 numbers, and decodes a draw of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 16), nn.Sequential(nn.Linear(8, 64), nn.Tanh())

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decoded vectors (B, 64), and mean and logarithm of the variance (B, 8)."""
        mean, log_variance = self.encoder(vectors).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(drawn), mean, log_variance


class Reconstruct:
    """The loss of the autoencoder."""

    def training_step(self, modules: dict[str, Any], vectors: Tensor) -> dict[str, Tensor]:
        """Error and divergence of a batch."""
        decoded, mean, log_variance = modules["model"](vectors)
        error = (decoded - vectors).square().sum(1).mean()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return {"loss": error + divergence, "divergence": divergence}

    def evaluation_step(self, modules: dict[str, Any], vectors: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        return {"loss": self.training_step(modules, vectors)["loss"]}


class Adversaries:
    """The model is the generator; the discriminator has BatchNorm and dropout, whose state a resume could get wrong."""

    def modules(self, model: nn.Module, loss: nn.Module) -> dict[str, nn.Module]:
        """The discriminator."""
        layers = (nn.Linear(64, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(32, 1))
        return {"discriminator": nn.Sequential(*layers)}

    def optimizers(self, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """One for each network."""
        return {"generator": modules["model"], "discriminator": modules["discriminator"]}

    def optimizer_steps(self, modules: dict[str, Any], vectors: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The discriminator first."""
        discriminator = modules["discriminator"]
        fakes = modules["model"](torch.randn(len(vectors), 8))
        yield (
            "discriminator",
            F.softplus(-discriminator(vectors)).mean() + F.softplus(discriminator(fakes.detach())).mean(),
        )
        yield "generator", F.softplus(-discriminator(fakes)).mean()

    def evaluation_step(self, modules: dict[str, Any], vectors: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        return {"loss": F.softplus(-modules["discriminator"](vectors)).mean()}
