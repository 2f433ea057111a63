"""Lightning: `ModelCheckpoint` every few steps, and `fit(ckpt_path="last")`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from faults.peers.job import (
    EPOCHS,
    EVERY_STEPS,
    SEED,
    Job,
    loader_of,
    model_of,
    optimizer_of,
    schedule_of,
    write_fingerprint,
)

NAME = "Lightning"


def train(job: Job) -> None:
    """Train to the end and write the fingerprint."""
    warnings.simplefilter("ignore")
    lightning.seed_everything(SEED, workers=True, verbose=False)
    module = Module()
    keeping = ModelCheckpoint(
        dirpath=job.folder / "checkpoints", save_last=True, save_top_k=2, monitor="step", mode="max",
        every_n_train_steps=EVERY_STEPS,
    )  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, default_root_dir=job.folder, callbacks=[keeping], logger=False,
        deterministic=True, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader_of(job), ckpt_path="last" if job.resumes else None)
    if trainer.interrupted:
        raise SystemExit(1)
    write_fingerprint(job, module.model)


def checkpoints(folder: Path) -> Sequence[Path]:
    """The file that `ckpt_path="last"` takes."""
    last = folder / "checkpoints" / "last.ckpt"
    return [last] if last.exists() else []


class Module(lightning.LightningModule):
    """The training as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of()
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of a batch."""
        images, targets = batch
        loss: Tensor = self.criterion(self.model(images), targets)
        self.log("step", float(self.global_step))
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Optimizer, and the schedule for every step."""
        optimizer = optimizer_of(self.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"}}
