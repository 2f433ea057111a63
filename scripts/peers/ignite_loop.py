"""Ignite's supervised trainer."""

from __future__ import annotations

from ignite.engine import Events, create_supervised_trainer
from torch import nn

from peers.clock import Clock
from peers.dataloader_loop import loader_of
from peers.work import Work


def train(work: Work, clock: Clock) -> nn.Module:
    """Train with handlers for the schedule and the clock alone: no metric, no progress bar, no checkpoints."""
    model = work.model()
    optimizer = work.sgd(model)
    scheduler = work.cosine(optimizer)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device=work.job.device)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
    trainer.add_event_handler(Events.EPOCH_COMPLETED, clock.epoch_ended)
    trainer.run(loader_of(work), max_epochs=work.job.epochs)
    return model
