"""Tasks of a user's own with several optimizers, or with one whose update computes the loss again."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Networks:
    """A generator, which gets noise that depends on the sample, and a discriminator."""

    def modules(self, model, loss):
        torch.manual_seed(1)
        return {"discriminator": nn.Linear(64, 1)}

    def optimizers(self, modules):
        return {"generator": modules["model"], "discriminator": [modules["discriminator"]]}

    def optimizer_steps(self, modules, vectors):
        fakes = modules["model"](vectors.flip(1)[:, :8])
        real, fake = modules["discriminator"](vectors), modules["discriminator"](fakes.detach())
        yield "discriminator", {"loss": F.softplus(-real).mean() + F.softplus(fake).mean(), "real": real.mean()}
        yield "generator", F.softplus(-modules["discriminator"](fakes)).mean()

    def evaluation_step(self, modules, vectors):
        return {"loss": F.softplus(-modules["discriminator"](vectors)).mean()}


class WithoutMonitor(Networks):
    monitor = None


class Unevaluated:
    modules, optimizers, optimizer_steps = Networks.modules, Networks.optimizers, Networks.optimizer_steps


class Repeated(Networks):
    """Steps `small` times with a batch of fewer than 8 samples, else `times` times."""

    def __init__(self, times=1, small=1):
        self.times, self.small = times, small

    def optimizer_steps(self, modules, vectors):
        for _ in range(self.small if len(vectors) < 8 else self.times):
            yield from super().optimizer_steps(modules, vectors)


class Ramped(Networks):
    """Logs the progress with each loss."""

    def optimizer_steps(self, modules, vectors, progress):  # type: ignore[override]
        for name, loss in super().optimizer_steps(modules, vectors):
            loss = loss["loss"] if isinstance(loss, dict) else loss
            yield name, {"loss": loss * progress.step / progress.total_steps, f"at_{name}": progress.step}


class Listed(Networks):
    def optimizers(self, modules):
        return [modules["model"]]


class Shared(Networks):
    def optimizers(self, modules):
        return {
            "generator": [modules["model"], modules["discriminator"].bias],
            "discriminator": modules["discriminator"],
        }


class OtherName(Networks):
    def optimizers(self, modules):
        return {"generator": modules["model"], "critic": modules["discriminator"]}


class Yields(Networks):
    """Yields a loss, with a name or without."""

    def __init__(self, name=None):
        self.name = name

    def optimizer_steps(self, modules, vectors):
        loss = modules["model"](vectors[:, :8]).mean()
        yield loss if self.name is None else (self.name, loss)


class Reconstruction:
    def training_step(self, modules, vectors):
        return (modules["model"](vectors[:, :8]) - vectors).square().mean()

    def evaluation_step(self, modules, vectors):
        return {"loss": self.training_step(modules, vectors)}
