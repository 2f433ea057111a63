"""The work that every contender does: data, model, optimizer and learning rate; and how its result is scored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers.cases import CASES, MOMENTUM, NOISE, WEIGHT_DECAY, Case, Job
from runner.config.schema.sections import Split
from runner.data.sampler import Indices
from runner.data.sources.arrays import ImageArrays
from runner.data.sources.digits import digits
from runner.data.sources.synthetic import synthetic
from runner.data.sources.torchvision_sets import fashion_mnist
from runner.data.splits import make_splits
from runner.models.mlp import MLP
from runner.models.resnet_cifar import ResNet18
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT

_TEST_SHARE = 0.2  # of digits: the default of `runner`


class Samples(NamedTuple):
    """Images, uint8 (N, C, H, W), and their classes, int64 (N,)."""

    images: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Work:
    """What is to be done, whoever does it.

    Attributes:
        case: settings of the work.
        job: settings of the measurement.
        train, test: samples to train on and to score with.
    """

    case: Case
    job: Job
    train: Samples
    test: Samples

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(len(self.train.images) / self.case.batch_size)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.steps * self.job.epochs

    @property
    def shift(self) -> int:
        """Largest shift of the augmentation in pixels."""
        return round(self.case.shift * self.train.images.shape[-1])

    def model(self) -> nn.Module:
        """The model, its weights drawn from the seed, in training mode."""
        torch.manual_seed(self.job.seed)
        return _MODELS[self.case.model]().train().to(self.job.device)

    def sgd(self, model: nn.Module, **further: Any) -> torch.optim.SGD:
        """The optimizer, as torch makes it unless told otherwise."""
        return torch.optim.SGD(
            model.parameters(),
            lr=self.case.lr,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            nesterov=True,
            **further,
        )

    def cosine(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning rate as torch schedules it; to be stepped after every optimizer step."""
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.total_steps)

    def rates(self) -> list[float]:
        """The learning rate of every step."""
        total = self.total_steps
        return [self.case.lr * 0.5 * (1 + math.cos(math.pi * step / total)) for step in range(total)]

    def normalised(self, images: Tensor) -> Tensor:
        """Pixels as float32 of about zero mean and unit variance."""
        return (images.float() / 255 - self.case.mean) / self.case.std

    @torch.inference_mode()
    def score(self, model: nn.Module) -> dict[str, float]:
        """Mean loss over the training samples as they are, without augmentation, and accuracy on the test samples."""
        model.to(self.job.device).eval()
        logits = {
            name: torch.cat([model(self.normalised(part)).float() for part in samples.images.split(512)])
            for name, samples in (("train", self.train), ("test", self.test))
        }
        hits = (logits["test"].argmax(1) == self.test.targets).float().mean()
        return {"loss": float(F.cross_entropy(logits["train"], self.train.targets)), "accuracy": float(hits)}


_MODELS = {
    "mlp": lambda: MLP(1, (8, 8), 10, [128]),
    "small_cnn": lambda: SmallCNN(1, 10),
    "resnet18_cifar": lambda: ResNet18(3, 10),
    "vit_tiny": lambda: ViT(3, (32, 32), 10),
}


def work_of(job: Job) -> Work:
    """Read the data of a job: the samples that `runner` trains on, from the same functions."""
    if job.case == "digits":
        parts = make_splits(digits(), Split(val=0.0, test=_TEST_SHARE))
        train, test = (_taken(*parts[name]) for name in ("train", "test"))
    elif job.case == "fashion":
        assert job.fashion_root is not None
        train, test = _both(fashion(job.fashion_root, job.samples))
    else:
        assert job.samples is not None
        train, test = _both(synthetic(samples=job.samples, image_size=32, noise=NOISE))
    train, test = (Samples(*(tensor.to(job.device) for tensor in samples)) for samples in (train, test))
    return Work(CASES[job.case], job, train, test)


def fashion(root: str, samples: int | None = None) -> dict[str, ImageArrays]:
    """Fashion-MNIST with its first `samples` training images alone; `runner` is given this function as its data set."""
    sets = fashion_mnist(root=root, download=False)
    train = sets["train"]
    return {"train": ImageArrays(train.images[:samples], train.targets[:samples], train.classes), "test": sets["test"]}


def _taken(dataset: Any, indices: Indices) -> Samples:
    return Samples(dataset.images[indices[:]], dataset.targets[indices[:]])


def _both(sets: dict[str, ImageArrays]) -> tuple[Samples, Samples]:
    return Samples(sets["train"].images, sets["train"].targets), Samples(sets["test"].images, sets["test"].targets)
