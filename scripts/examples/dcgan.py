"""DCGAN (Radford et al., arXiv:1511.06434): a generator of images (3, 64, 64) against a discriminator.

After pytorch/examples dcgan: https://github.com/pytorch/examples/tree/main/dcgan
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def initial(module: nn.Module) -> None:
    """Small normal weights, as in the paper."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


class Generator(nn.Sequential):
    """Images (B, channels, 64, 64) from -1 to 1 of noise (B, latent)."""

    def __init__(self, latent: int = 100, width: int = 64, channels: int = 3) -> None:
        self.latent = latent
        layers: list[nn.Module] = [nn.Unflatten(1, (latent, 1, 1))]
        for place, (before, after) in enumerate(itertools.pairwise([latent, 8 * width, 4 * width, 2 * width, width])):
            step = (4, 2, 1) if place else (4, 1, 0)
            layers += [nn.ConvTranspose2d(before, after, *step, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.ConvTranspose2d(width, channels, 4, 2, 1, bias=False), nn.Tanh())
        self.apply(initial)


class Discriminator(nn.Sequential):
    """Logits (B,) of images (B, channels, 64, 64): whether they are real."""

    def __init__(self, width: int = 64, channels: int = 3) -> None:
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for before, after in itertools.pairwise([width, 2 * width, 4 * width, 8 * width]):
            layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
        super().__init__(*layers, nn.Conv2d(8 * width, 1, 4, bias=False), nn.Flatten(0))
        self.apply(initial)


class DCGAN:
    """The discriminator tells real from generated images, and the generator deceives it."""

    def __init__(self, discriminator: nn.Module) -> None:
        self.discriminator = discriminator

    def modules(self, model: nn.Module, loss: nn.Module) -> dict[str, nn.Module]:
        """What is trained besides the generator."""
        return {"discriminator": self.discriminator}

    def optimizers(self, modules: Any) -> dict[str, nn.Module]:
        """One for each network."""
        return {"generator": modules["model"], "discriminator": modules["discriminator"]}

    def optimizer_steps(self, modules: Any, batch: Any) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """One step of each; logged are the mean probabilities that images are real."""
        generator, discriminator = modules["model"], modules["discriminator"]
        fakes = generator(torch.randn(len(batch[0]), generator.latent, device=batch[0].device))
        real, fake = discriminator(batch[0]), discriminator(fakes.detach())
        loss = F.softplus(-real).mean() + F.softplus(fake).mean()  # cross-entropy of logits and certain labels
        yield "discriminator", {"loss": loss, "D_x": real.sigmoid().mean(), "D_G_z1": fake.sigmoid().mean()}
        fake = discriminator(fakes)
        yield "generator", {"loss": F.softplus(-fake).mean(), "D_G_z2": fake.sigmoid().mean()}

    def predict_step(self, modules: Any, batch: Any) -> dict[str, Tensor]:
        """An image for each sample."""
        images = modules["model"](torch.randn(len(batch[0]), modules["model"].latent, device=batch[0].device))
        return {"image": ((images + 1) * 127.5).to(torch.uint8)}
