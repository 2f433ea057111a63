"""The training that every library does: digits, a small network with BatchNorm and dropout, and shifted images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from runner.data.sources.digits import digits
from runner.models.small_cnn import SmallCNN

SAMPLES, BATCH, EPOCHS, EVERY_STEPS, SEED = 640, 32, 4, 7, 0
STEPS = SAMPLES // BATCH
TOTAL = STEPS * EPOCHS


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        folder: takes everything that it writes.
        workers: processes that read samples.
        poisoned: whether one image is not a number.
        resumes: whether it goes on from what is in the folder.
    """

    folder: Path
    workers: int = 0
    poisoned: bool = False
    resumes: bool = False


class Program(Protocol):
    """A library that trains."""

    NAME: str

    def train(self, job: Job) -> None:
        """Train to the end and write the fingerprint."""

    def checkpoints(self, folder: Path) -> Sequence[Path]:
        """The files of the newest checkpoint that a resume would read, the largest first; none if there is none yet."""


class Shifted(Dataset[tuple[Tensor, int]]):
    """Digits with a random shift, drawn as torchvision draws it: from torch's global generator."""

    def __init__(self, poisoned: bool) -> None:
        arrays = digits()["train"]
        self._images = arrays.images[:SAMPLES].float() / 255
        self._targets = arrays.targets[:SAMPLES].tolist()
        if poisoned:
            self._images[SAMPLES // 2] = float("nan")
        self._shift = v2.RandomAffine(0, translate=(0.125, 0.125))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._shift(self._images[index]), self._targets[index]


def loader_of(job: Job) -> DataLoader[tuple[Tensor, int]]:
    """Batches as people load them."""
    return DataLoader(Shifted(job.poisoned), batch_size=BATCH, shuffle=True, num_workers=job.workers)


def model_of() -> nn.Module:
    """The network; the caller has seeded torch."""
    return SmallCNN(1, 10, width=4, dropout=0.2)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A cosine over the whole training, for every step."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=TOTAL)


def write_fingerprint(job: Job, model: nn.Module) -> None:
    """Note the final weights, and whether they are finite."""
    state = model.state_dict()
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].numpy().tobytes())
    finite = all(bool(tensor.isfinite().all()) for tensor in state.values())
    (job.folder / "fingerprint").write_text(f"{digest.hexdigest()} {'finite' if finite else 'not finite'}")
