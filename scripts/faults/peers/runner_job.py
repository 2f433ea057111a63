"""`runner` itself, for the same table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

import runner.verbs.train  # noqa: F401  # before anything forks, so that no child pays for it
from faults.peers.job import BATCH, EPOCHS, EVERY_STEPS, SAMPLES, Job
from runner.cli import main
from runner.data.sources.digits import digits

NAME = "runner"


def train(job: Job) -> None:
    """Train to the end and write the fingerprint."""
    words = [
        "train", f"hydra.run.dir={job.folder}", "threads=1", "device=cpu", "logger=none", "log.progress=false", "log.curves=false",
        "evaluate.test=false", "data.split.test=0", f"data.batch_size={BATCH}", f"epochs={EPOCHS}",
        f"checkpoint.every_steps={EVERY_STEPS}", "checkpoint.min_seconds=0", "model.width=4", "model.dropout=0.2",
        "data.shift=0.125", "data.placement=disk", f"data.num_workers={job.workers}",
        f"data.dataset={{_target_:{__name__}.Images,poisoned:{str(job.poisoned).lower()}}}", "data.normalize.mean=[0.3]",
        "data.normalize.std=[0.37]", "data.split.val=0", "evaluate.every_epochs=null", "callbacks=none",
    ]  # fmt: skip
    if job.resumes:
        words.append(f"ckpt_path={job.folder}")
        words.append("trust=[faults]")
    status = main(words)
    if status:
        sys.exit(status)
    summary = json.loads((job.folder / "summary.json").read_text())
    (job.folder / "fingerprint").write_text(f"{summary['weights_sha256']} finite")


class Images(Dataset[tuple[Tensor, int]]):
    """The samples that every library is given; one of them may be poisoned."""

    classes = tuple(str(digit) for digit in range(10))

    def __init__(self, poisoned: bool = False) -> None:
        arrays = digits()["train"]
        self._images = arrays.images[:SAMPLES].float() / 255
        self.targets = arrays.targets[:SAMPLES].tolist()
        if poisoned:
            self._images[SAMPLES // 2] = float("nan")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index], self.targets[index]


def checkpoints(folder: Path) -> Sequence[Path]:
    """The newest checkpoint."""
    last = folder / "checkpoints" / "last.safetensors"
    return [last] if last.exists() else []
