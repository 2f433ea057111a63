"""Data sets, models and tasks of a user's own, which tests name in configs as `own_steps.Digits`."""

from __future__ import annotations

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from runner import gather


class Digits(torch.utils.data.Dataset):
    """Digits as vectors (64,), without targets; sample `bad` is not finite."""

    def __init__(self, samples=96, bad=-1):
        self.vectors = torch.from_numpy(load_digits().data[:samples] / 16).float()
        self.vectors[bad : bad + (bad >= 0)] = float("nan")

    def __len__(self):
        return len(self.vectors)

    def __getitem__(self, index):
        return self.vectors[index]


class Pairs(Digits):
    def __getitem__(self, index):
        return self.vectors[index], index % 3


class Pieces(Digits):
    """The last samples are shorter, as the last pieces of texts are."""

    def __getitem__(self, index):
        return self.vectors[index][: 64 if index < 64 else 32]


def pieces():
    return {"train": Pieces(), "val": torch.utils.data.Subset(Digits(112), range(96, 112))}


class Scenes(Digits):
    """Images of bytes (1, 8, 8) with some boxes each."""

    def __getitem__(self, index):
        image = (self.vectors[index] * 255).to(torch.uint8).view(1, 8, 8)
        return {"image": image, "boxes": torch.full((1 + index % 3, 4), float(index)), "name": f"scene {index}"}


def scenes(samples):
    images = torch.stack([each["image"] for each in samples])
    return {"image": images, **{key: [each[key] for each in samples] for key in ("boxes", "name")}}


class VAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 2 * latent), nn.Linear(latent, 64)

    def forward(self, vectors):
        mean, log_variance = self.encoder(vectors).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(drawn), mean, log_variance


class Block(nn.Module):
    has_skip = True

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.BatchNorm1d(64)

    def forward(self, x):
        return x + self.norm(self.second(F.relu(self.first(x))))


class Normed(VAE):
    """Blocks whose branches end in a norm, and that can be computed again."""

    def __init__(self, latent=4):
        super().__init__(latent)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, vectors):
        return super().forward(self.blocks(vectors))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))

    def forward(self, images):
        return self.features(images)


class Reconstruction:
    def training_step(self, modules, batch):
        logits, mean, log_variance = modules["model"](batch)
        error = F.binary_cross_entropy_with_logits(logits, batch, reduction="none").sum(1).mean()
        divergence = (-0.5 * (1 + log_variance - mean.square() - log_variance.exp())).sum(1).mean()
        return {"loss": error + divergence, "divergence": divergence}

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)["loss"]}


class Padded(Reconstruction):
    def training_step(self, modules, batch):
        return super().training_step(modules, F.pad(batch, (0, 64 - batch.shape[1])))


class Noisy:
    def training_step(self, modules, vectors):
        return modules["model"](vectors)[0].square().mean()

    def evaluation_step(self, modules, vectors):
        return {"loss": (vectors + torch.randn_like(vectors)).abs().mean()}


class Slip:
    def trainig_step(self, modules, batch):
        return batch.sum()


class Contrast:
    """Pulls two noisy views of an image together, with a projection that is trained and not used afterwards."""

    def outputs(self, classes):
        return 10

    def modules(self, model, loss):
        return {"projection": nn.Linear(10, 4)}

    def training_step(self, modules, batch):
        views = [batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(2)]
        one, other = (F.normalize(modules["projection"](modules["model"](view))) for view in views)
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}


class Wrong:
    def __init__(self):
        self.wrong = 0

    def update(self, outputs, targets):
        self.wrong += int((outputs.argmax(1) != targets).sum())

    def compute(self):
        return torch.tensor(float(self.wrong))


class CountBoxes:
    """How many boxes there are: a head of its own on the features of the model."""

    monitor, mode = "val/wrong", "min"
    collate = staticmethod(scenes)

    def modules(self, model, loss):
        return {"model": model, "head": nn.Linear(8, 3)}

    def logits(self, modules, batch):
        images = batch["image"]
        assert images.is_floating_point()
        assert all(0 <= float(value) <= 1 for value in images.aminmax())
        assert all(name.startswith("scene") for name in batch["name"])
        return modules["head"](modules["model"](images))

    def evaluation_step(self, modules, batch):
        logits, targets = self.logits(modules, batch), torch.tensor([len(boxes) - 1 for boxes in batch["boxes"]])
        return {"loss": modules["loss"](logits, targets), "outputs": logits, "targets": targets}

    def training_step(self, modules, batch):
        return self.evaluation_step(modules, batch)["loss"]

    def outputs(self, classes):
        return 3

    def metric_names(self):
        return ["wrong"]

    def metrics(self, device):
        return {"wrong": Wrong()}


class MomentumHead(CountBoxes):
    """A second head follows the first one, which also learns from it."""

    def modules(self, model, loss):
        head = nn.Linear(8, 3)
        return {"model": model, "head": head, "slow": copy.deepcopy(head).requires_grad_(False)}

    def training_step(self, modules, batch):
        features = modules["model"](batch["image"])
        apart = (modules["head"](features) - modules["slow"](features)).square().mean()
        return super().training_step(modules, batch) + apart

    def after_step(self, modules):
        for slow, fast in zip(modules["slow"].parameters(), modules["head"].parameters(), strict=True):
            slow.lerp_(fast, 0.1)


class MeanOverBoxes(CountBoxes):
    """The mean over all boxes, of which samples have different numbers."""

    def weight(self, batch):
        return sum(len(boxes) for boxes in batch["boxes"])

    def evaluation_step(self, modules, batch):
        counts = torch.tensor([len(boxes) for boxes in batch["boxes"]])
        losses = self.logits(modules, batch).square().sum(1)
        return {"loss": (losses * counts).sum() / counts.sum(), "targets": counts - 1, "outputs": losses[:, None]}


class Compared(CountBoxes):
    """Each sample differs from all others of the batch."""

    def training_step(self, modules, batch):
        codes = gather(self.logits(modules, batch))
        return {"loss": F.cross_entropy(codes @ codes.T, torch.arange(len(codes))), "rows": torch.tensor(len(codes))}


class Measured(MeanOverBoxes):
    """An evaluation gives further means over the boxes."""

    monitor, mode = "val/first", "max"

    def evaluation_step(self, modules, batch):
        first = torch.cat([boxes[:, 0] for boxes in batch["boxes"]]).mean()
        return {**super().evaluation_step(modules, batch), "first": first}


class MeasuredAsMetric(Measured):
    monitor, mode = "val/wrong", "min"

    def evaluation_step(self, modules, batch):
        found = super().evaluation_step(modules, batch)
        return {**found, "wrong": found["first"]}


class MeasuredAsWeight(Measured):
    def evaluation_step(self, modules, batch):
        found = super().evaluation_step(modules, batch)
        return {**found, "weight": found["first"]}


class Vectors(CountBoxes):
    def training_step(self, modules, batch):
        return self.logits(modules, batch).sum(1)


class Detached(CountBoxes):
    def training_step(self, modules, batch):
        return super().training_step(modules, batch).detach()


class TermOfShape(CountBoxes):
    def training_step(self, modules, batch):
        return {"loss": super().training_step(modules, batch), "term": torch.zeros(2)}


class NoLoss(CountBoxes):
    monitor = "val/loss"

    def evaluation_step(self, modules, batch):
        return {"outputs": self.logits(modules, batch), "targets": torch.zeros(len(batch["image"]))}

    def training_step(self, modules, batch):
        return super().evaluation_step(modules, batch)["loss"]


class OtherModel(CountBoxes):
    def modules(self, model, loss):
        return {"model": nn.Sequential(model)}
