"""Healthy tasks whose data or steps look like mistakes, and what they are trained on."""

from __future__ import annotations

import copy

import torch
from own_steps import Digits
from torch import nn
from torch.nn import functional as F


def network(inputs=64, outputs=16):
    return nn.Sequential(nn.Linear(inputs, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, outputs))


SAMPLES = {  # of each digit and its index
    "noise": lambda vector, index: torch.randn(64),
    "seed": lambda vector, index: index % 40,
    "placeholder": lambda vector, index: torch.zeros(()),
    "views": lambda vector, index: [vector + 0.1 * torch.randn(64) for _ in range(2)],  # other ones in each epoch
    "fields": lambda vector, index: {"image": vector, "digit": index % 3, "ink": vector.mean()},
    "picture": lambda vector, index: vector.view(1, 8, 8),
    "clip": lambda vector, index: {
        "frames": vector.mul(255).byte().view(1, 1, 8, 8).repeat(6, 1, 1, 1),
        "digit": index % 3,
    },
    "comparison": lambda vector, index: (_rolled(vector), _rolled(vector), torch.rand(()).round()),
    "caption": lambda vector, index: (vector, torch.tensor([index % 3, 3 + index % 4, 7 + index % 5])),
    "crops": lambda vector, index: [_rolled(vector).view(1, 8, 8)[:, :size, :size] for size in (6, 6, 4, 4)],
}


def _rolled(vector):
    return vector.roll(int(torch.randint(9, ()))) + 0.1 * torch.randn(64)


class Samples(Digits):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __getitem__(self, index):
        return SAMPLES[self.kind](self.vectors[index], index)


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


class MoCo(MeanTeacher):
    """A momentum encoder, and a queue of keys that begins random."""

    def modules(self, model, loss):
        return {**super().modules(model, loss), "queue": Queue()}

    def training_step(self, modules, views):
        queries, keys = (
            F.normalize(modules[name](view)) for name, view in zip(("model", "teacher"), views, strict=True)
        )
        queue = modules["queue"]
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.keys.T], 1) / 0.1
        if queue.training:
            queue.keys = torch.cat([keys, queue.keys])[:64]
        return F.cross_entropy(logits, torch.zeros(len(keys), dtype=torch.long))


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


def pixels(outputs=1):
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, outputs, 3, padding=1))


class DCGAN(WGAN):
    """A critic with BatchNorm, for real and generated samples in turn."""

    def modules(self, model, loss):
        return {"critic": network(outputs=1)}

    def optimizer_steps(self, modules, real):
        critic, fake = modules["critic"], modules["model"](torch.randn_like(real))
        yield "critic", F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        yield "generator", F.softplus(-critic(fake)).mean()


class CycleGAN(WGAN):
    """Digits to their negatives and back."""

    def modules(self, model, loss):
        return {"back": network(outputs=64), "critic": nn.ModuleList(network(outputs=1) for _ in range(2))}

    def optimizers(self, modules):
        return {"generator": [modules["model"], modules["back"]], "critic": modules["critic"]}

    def optimizer_steps(self, modules, real):
        there, back, truth = modules["model"], modules["back"], (1 - real, real)
        fakes, critics = (there(real), back(1 - real)), modules["critic"]
        cycle = (back(fakes[0]) - real).abs().mean() + (there(fakes[1]) - (1 - real)).abs().mean()
        yield "generator", 10 * cycle + sum((critics[way](fakes[way]) - 1).square().mean() for way in range(2))
        false = sum(critics[way](fakes[way].detach()).square().mean() for way in range(2))
        yield "critic", false + sum((critics[way](truth[way]) - 1).square().mean() for way in range(2))

    def evaluation_step(self, modules, real):
        return {"loss": (modules["back"](modules["model"](real)) - real).abs().mean()}


class ForwardForward(Evaluated):
    """Each layer has a loss of its own."""

    def training_step(self, modules, vectors):
        loss, good, bad = 0.0, vectors, vectors[:, torch.randperm(64)]
        for layer in (modules["model"][:3], modules["model"][3:]):
            good, bad = (layer(F.normalize(each)).relu() for each in (good, bad))
            loss = loss + F.softplus(2 - good.square().mean(1)).mean() + F.softplus(bad.square().mean(1) - 2).mean()
            good, bad = good.detach(), bad.detach()
        return loss


class Siamese(Evaluated):
    def training_step(self, modules, batch):
        one, other, same = batch
        apart = F.pairwise_distance(modules["model"](one), modules["model"](other))
        return (same * apart.square() + (1 - same) * (1 - apart).clamp_min(0).square()).mean()


class SuperResolution(Evaluated):
    def training_step(self, modules, pictures):
        small = F.avg_pool2d(pictures, 2)
        return (F.pixel_shuffle(modules["model"](small), 2) - pictures).abs().mean()


class StyleTransfer(Evaluated):
    """Gram matrices of a frozen network."""

    def modules(self, model, loss):
        return {"features": pixels(16).requires_grad_(False)}

    def training_step(self, modules, pictures):
        seen = (modules["features"](each).flatten(2) for each in (modules["model"](pictures), pictures.flip(0)))
        one, other = (each @ each.mT / 64 for each in seen)
        return F.mse_loss(one, other)


class Video(Evaluated):
    def training_step(self, modules, batch):
        frames = batch["frames"].flatten(2)
        each = modules["model"](frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
        return F.cross_entropy(each.mean(1), batch["digit"])


class CLIP(Evaluated):
    def modules(self, model, loss):
        return {"texts": nn.EmbeddingBag(12, 16), "scale": nn.ParameterList([torch.tensor(2.0)])}

    def training_step(self, modules, batch):
        images, texts = F.normalize(modules["model"](batch[0])), F.normalize(modules["texts"](batch[1]))
        logits, places = images @ texts.T * modules["scale"][0].exp(), torch.arange(len(images))
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


class Triplets(Evaluated):
    def training_step(self, modules, batch):
        codes, numbers = F.normalize(modules["model"](batch["image"])), batch["digit"]
        apart, same = torch.cdist(codes, codes), numbers[:, None] == numbers
        hardest = apart.masked_fill(~same, 0).amax(1) - apart.masked_fill(same, 9).amin(1)
        return F.softplus(hardest).mean()


class Table(Evaluated):
    def modules(self, model, loss):
        return {"kinds": nn.Embedding(3, 8)}

    def training_step(self, modules, batch):
        columns = torch.cat([modules["kinds"](batch["digit"]), batch["image"]], 1)
        return F.mse_loss(modules["model"](columns)[:, 0], batch["ink"])


class DINO(MeanTeacher):
    """A teacher sees large crops, with outputs that are centred."""

    def modules(self, model, loss):
        return {**super().modules(model, loss), "centre": nn.BatchNorm1d(16, affine=False)}

    def training_step(self, modules, crops):
        with torch.no_grad():
            wanted = [modules["centre"](modules["teacher"](crop).mean((2, 3))).softmax(1) for crop in crops[:2]]
        given = [modules["model"](crop).mean((2, 3)).log_softmax(1) for crop in crops]
        pairs = [(a, b) for i, a in enumerate(wanted) for j, b in enumerate(given) if i != j]
        return -sum((a * b).sum(1).mean() for a, b in pairs) / len(pairs)


class Distillation(MeanTeacher):
    def modules(self, model, loss):
        return {"teacher": network().requires_grad_(False)}

    def after_step(self, modules):
        """The teacher stays."""


class GPT(Words):
    def __init__(self):
        super().__init__()
        self.places, self.lstm = nn.Embedding(16, 16), None
        self.blocks = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)

    def forward(self, words):
        length = words.shape[1]
        seen = self.embed(words) + self.places(torch.arange(length))
        return self.head(self.blocks(seen, nn.Transformer.generate_square_subsequent_mask(length), is_causal=True))
