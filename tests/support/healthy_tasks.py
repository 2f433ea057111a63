"""Healthy tasks whose data or steps look like mistakes: `task=healthy_tasks.py:NAME` with `data` and `model` of the same name."""

from __future__ import annotations

import copy

import torch
from own_steps import Digits
from torch import nn
from torch.nn import functional as F


def network(inputs=64, outputs=16):
    return nn.Sequential(nn.Linear(inputs, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, outputs))


class Views(Digits):
    """Two views of a digit, other ones in each epoch."""

    def __getitem__(self, index):
        return [self.vectors[index] + 0.1 * torch.randn(64) for _ in range(2)]


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.randn(64)


def noise():
    return {"train": Noise(), "val": Noise()}


def seeds():
    return {"train": range(96), "val": range(32)}


def placeholders():
    return {"train": torch.zeros(96), "val": torch.zeros(32)}


class Fields(Digits):
    def __getitem__(self, index):
        return {"image": self.vectors[index], "digit": index % 3, "ink": self.vectors[index].mean()}


def tokens():
    return torch.randint(12, (96, 16), generator=torch.Generator().manual_seed(0))


def graph():
    nodes, links = Digits().vectors, torch.eye(96).roll(1, 0) + torch.eye(96)
    parts = [torch.arange(96) % 3 == part for part in range(2)]
    return {
        name: [{"x": nodes, "links": links, "mask": mask}] for name, mask in zip(("train", "val"), parts, strict=True)
    }


class Evaluated:
    """An evaluation gives the loss of training."""

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}


class WGAN:
    """A critic with a gradient penalty takes two steps for each of the generator."""

    monitor = None

    def modules(self, model, loss):
        return {"critic": nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))}

    def optimizers(self, modules):
        return {"generator": modules["model"], "critic": modules["critic"]}

    def optimizer_steps(self, modules, real):
        generator, critic = modules["model"], modules["critic"]
        for _ in range(2):
            fake = generator(torch.randn_like(real)).detach()
            between = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
            [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            yield "critic", critic(fake).mean() - critic(real).mean() + 10 * penalty
        yield "generator", -critic(generator(torch.randn_like(real))).mean()

    def evaluation_step(self, modules, real):
        return {"loss": modules["critic"](real).mean().abs()}


class Energy:
    """Denoising by the slope of an energy, so an evaluation needs gradients; the batch itself is what is differentiated by."""

    def training_step(self, modules, vectors):
        noise = torch.randn_like(vectors)
        vectors.requires_grad_()
        [slope] = torch.autograd.grad(modules["model"](vectors + noise).square().sum(), vectors, create_graph=True)
        return (slope - noise).square().mean()

    def evaluation_step(self, modules, vectors):
        with torch.inference_mode(False), torch.enable_grad():
            return {"loss": self.training_step(modules, vectors.clone()).detach()}


class Physics(Evaluated):
    """u' = -u at random times; a sample says only that there is one."""

    def training_step(self, modules, batch):
        with torch.inference_mode(False), torch.enable_grad():
            times = torch.rand(len(batch), 64, requires_grad=True)
            values = modules["model"](times)
            [slopes] = torch.autograd.grad(values.sum(), times, create_graph=True)
            return (slopes.sum(1, keepdim=True) + values).square().mean()


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(64, 16)))


class MoCo(Evaluated):
    """A momentum encoder, and a queue of keys that begins random."""

    def modules(self, model, loss):
        return {"model": model, "slow": copy.deepcopy(model).requires_grad_(False), "queue": Queue()}

    def training_step(self, modules, views):
        queries, keys = (F.normalize(modules[name](view)) for name, view in zip(("model", "slow"), views, strict=True))
        queue = modules["queue"]
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.keys.T], 1) / 0.1
        if queue.training:
            queue.keys = torch.cat([keys, queue.keys])[:64]
        return F.cross_entropy(logits, torch.zeros(len(keys), dtype=torch.long))

    def after_step(self, modules):
        for slow, fast in zip(modules["slow"].parameters(), modules["model"].parameters(), strict=True):
            slow.lerp_(fast, 0.01)


class SimCLR(Evaluated):
    def training_step(self, modules, views):
        codes = torch.cat([F.normalize(modules["model"](view)) for view in views])
        logits = (codes @ codes.T / 0.2).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(len(codes)).roll(len(codes) // 2))


class Diffusion(Evaluated):
    def training_step(self, modules, vectors):
        noise, kept = torch.randn_like(vectors), torch.rand(len(vectors), 1)
        return F.mse_loss(modules["model"](kept.sqrt() * vectors + (1 - kept).sqrt() * noise), noise)


class Reinforce:
    """A bandit: a sample is the seed of an episode."""

    monitor, mode = "val/reward", "max"

    def play(self, modules, seeds):
        states = torch.stack([torch.randn(64, generator=torch.Generator().manual_seed(int(each))) for each in seeds])
        policy = torch.distributions.Categorical(logits=modules["model"](states))
        actions = policy.sample()
        return (actions == states[:, :16].argmax(1)).float(), policy.log_prob(actions)

    def training_step(self, modules, seeds):
        rewards, logs = self.play(modules, seeds)
        return {"loss": -((rewards - 1 / 16) * logs).mean(), "reward": rewards.mean()}

    def evaluation_step(self, modules, seeds):
        return {"reward": self.play(modules, seeds)[0].mean()}


class MeanTeacher(Evaluated):
    def modules(self, model, loss):
        return {"model": model, "teacher": copy.deepcopy(model).requires_grad_(False)}

    def training_step(self, modules, vectors):
        with torch.no_grad():
            wanted = modules["teacher"](vectors).softmax(1)
        return F.cross_entropy(modules["model"](vectors + 0.1 * torch.randn_like(vectors)), wanted)

    def after_step(self, modules):
        for slow, fast in zip(modules["teacher"].parameters(), modules["model"].parameters(), strict=True):
            slow.lerp_(fast, 0.01)


class Masked(Evaluated):
    def training_step(self, modules, vectors):
        hidden = torch.rand_like(vectors) < 0.75
        return (modules["model"](vectors.masked_fill(hidden, -1)) - vectors)[hidden].square().mean()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(12, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 12)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.lstm(self.embed(words))[0])


class NextWord(Evaluated):
    def training_step(self, modules, words):
        return F.cross_entropy(modules["model"](words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Nodes(Evaluated):
    def training_step(self, modules, batch):
        [x], [links], [mask] = batch["x"], batch["links"], batch["mask"]
        return F.cross_entropy(links @ modules["model"](links @ x), torch.arange(96) % 3, reduction="none")[mask].mean()


class Both(Evaluated):
    """Two tasks, whose weights are trained too."""

    def modules(self, model, loss):
        return {"weights": nn.ParameterDict({"digit": torch.zeros(()), "ink": torch.zeros(())})}

    def training_step(self, modules, batch):
        outputs, weights = modules["model"](batch["image"]), modules["weights"]
        losses = {
            "digit": F.cross_entropy(outputs[:, 1:], batch["digit"]),
            "ink": F.mse_loss(outputs[:, 0], batch["ink"]),
        }
        return sum(weights[name] + loss * (-weights[name]).exp() for name, loss in losses.items())
