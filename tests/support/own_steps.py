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


class Unclassified(Digits):
    """Its method for balanced sampling knows no sample."""

    def classes_of(self, index):
        return {}[index]


class Pairs(Digits):
    def __getitem__(self, index):
        return self.vectors[index], index % 3


class Pieces(Digits):
    """The last samples are shorter, as the last pieces of texts are."""

    def __getitem__(self, index):
        return self.vectors[index][: 64 if index < 64 else 32]


def pieces():
    return {"train": Pieces(), "val": torch.utils.data.Subset(Digits(112), range(96, 112))}


class Graphs(Digits):
    def __getitem__(self, index):
        return torch.eye(4).to_sparse(), torch.rand(4, 3), torch.tensor(1)


class Scenes(Digits):
    """Images of bytes (1, 8, 8) with some boxes each."""

    def __getitem__(self, index):
        image = (self.vectors[index] * 255).to(torch.uint8).view(1, 8, 8)
        return {"image": image, "boxes": torch.full((1 + index % 3, 4), float(index)), "name": f"scene {index}"}


class Videos(Digits):
    """5 frames of bytes (2, 8, 8) with a number, the second channel brighter."""

    def __getitem__(self, index):
        image = (self.vectors[index] * 127).to(torch.uint8).view(1, 8, 8)
        return {"frames": torch.stack([torch.cat([image, image + 128])] * 5), "number": index % 3}


class Watching:
    def training_step(self, modules, batch):
        frames = batch["frames"]
        assert frames.shape[1:] == (5, 2, 8, 8)
        # After normalisation, both channels agree.
        assert torch.allclose(frames[:, :, 0], frames[:, :, 1], atol=1e-5)
        return F.cross_entropy(modules["model"](frames.mean(1)[:, :1]), batch["number"])

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}

    def predict_step(self, modules, batch):
        return {"number": modules["model"](batch["frames"].mean(1)[:, :1]).argmax(1)}

    def draw(self, sample, outputs):
        assert sample["frames"].shape == (1, 5, 3, 8, 8)
        return sample["frames"][0, 0]


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


class Sampled(Reconstruction):
    """Generates pictures, a text and a number; `gives` names what else it returns, which is refused."""

    def __init__(self, gives=None):
        self.gives = gives

    def sample(self, modules, count=6):
        if self.gives:
            return WRONG_SAMPLES[self.gives]()
        like = next(modules["model"].parameters())
        rows, mean, _ = modules["model"](torch.rand(count, 64, dtype=like.dtype, device=like.device))
        digits = rows.float().sigmoid().mul(255).to(torch.uint8).view(count, 1, 8, 8)
        found = f"training {modules['model'].training}, gradients {rows.requires_grad}, {mean.dtype}"
        modules["model"].train()(torch.rand_like(rows))  # changes modes and statistics, which are put back
        return {
            "digits": digits,
            "first": digits[0].expand(3, 8, 8),
            "../found": f"{found}\n<{count}> ä",
            "spread": rows.std(),
        }


WRONG_SAMPLES = {
    "a list": lambda: [torch.zeros(3, 8, 8, dtype=torch.uint8)],
    "floats": lambda: {"faces": torch.zeros(3, 8, 8)},
    "two channels": lambda: {"faces": torch.zeros(4, 2, 8, 8, dtype=torch.uint8)},
    "no picture": lambda: {"faces": torch.zeros(0, 3, 8, 8, dtype=torch.uint8)},
    "None": lambda: {"faces": None},
    "a metric": lambda: {"loss": 1.0},
    "a column": lambda: {"epoch": 1.0},
    "an error": lambda: {}["faces"],
}


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


class Scheduled(MomentumHead):
    """The second head follows less and less, and what the first one learns from it counts more and more."""

    def training_step(self, modules, batch, progress=None):
        loss = CountBoxes.training_step(self, modules, batch)
        features = modules["model"](batch["image"])
        apart = (modules["head"](features) - modules["slow"](features)).square().mean()
        told = {"at": progress.step, "of": progress.total_steps, "epochs": progress.epoch}
        return {"loss": loss + progress.step / progress.total_steps * apart, **told}

    def after_step(self, modules, *, progress):  # type: ignore[override]
        for slow, fast in zip(modules["slow"].parameters(), modules["head"].parameters(), strict=True):
            slow.lerp_(fast, 0.5 * (1 - progress.step / progress.total_steps))


class Said:
    """Says nothing of outputs, and needs the names of the classes."""

    def __init__(self, classes):
        assert classes == [str(number) for number in range(10)], classes
        self.weight = 1.0  # and not the method `weight(batch)`, which it lacks

    def training_step(self, modules, batch):
        return F.cross_entropy(modules["model"](batch[0]), batch[1])

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}


class Seven(Said):
    def __init__(self, classes=7):
        assert classes == 7, classes


class Backbone(nn.Sequential):
    """Gives its features without a number of classes."""

    def __init__(self, num_classes=None):
        layers = [nn.Flatten(), nn.Linear(64, 12)]
        super().__init__(*layers, *([] if num_classes is None else [nn.Linear(12, num_classes)]))


class Numbered(Backbone):
    def __init__(self, num_classes=11):
        super().__init__(num_classes)


class Failing(Said):
    def training_step(self, modules, batch):
        return modules["model"](batch[0]) @ batch[1]


class IsModule(nn.Module):
    def training_step(self, modules, batch):
        return batch.sum()


class ProgressFirst(CountBoxes):
    def training_step(self, progress, modules, batch):  # type: ignore[override]
        return super().training_step(modules, batch)


class StepNumber(CountBoxes):
    def after_step(self, modules, step):
        pass


class MeanOverBoxes(CountBoxes):
    """The mean over all boxes, of which samples have different numbers."""

    def weight(self, batch):
        return sum(len(boxes) for boxes in batch["boxes"])

    def evaluation_step(self, modules, batch):
        counts = torch.tensor([len(boxes) for boxes in batch["boxes"]])
        losses = self.logits(modules, batch).square().sum(1)
        return {"loss": (losses * counts).sum() / counts.sum(), "targets": counts - 1, "outputs": losses[:, None]}


class WeightIsNumber(MeanOverBoxes):
    def __init__(self):
        self.weight = 3


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
