"""Lightning's Trainer as it comes."""

from __future__ import annotations

from typing import Any

import lightning
from torch import Tensor, nn

from peers.clock import Clock
from peers.dataloader_loop import loader_of
from peers.work import Work


def train(work: Work, clock: Clock) -> nn.Module:
    """Train."""
    module = Module(work, clock)
    trainer = lightning.Trainer(
        accelerator="cpu" if work.job.device == "cpu" else "gpu",
        devices=1,
        max_epochs=work.job.epochs,
        default_root_dir=work.job.folder,
    )
    trainer.fit(module, loader_of(work))
    return module.model


class Module(lightning.LightningModule):
    """The work as Lightning wants it."""

    def __init__(self, work: Work, clock: Clock) -> None:
        super().__init__()
        self.model = work.model()
        self.criterion = nn.CrossEntropyLoss()
        self._work, self._clock = work, clock

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of a batch."""
        images, targets = batch
        loss: Tensor = self.criterion(self.model(images), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Optimizer, and the schedule for every step."""
        optimizer = self._work.sgd(self.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._work.cosine(optimizer), "interval": "step"}}

    def on_train_epoch_end(self) -> None:
        """Note the time."""
        self._clock.epoch_ended()
