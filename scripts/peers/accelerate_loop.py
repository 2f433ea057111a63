"""The usual loop with everything prepared by Accelerate."""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn

from peers.clock import Clock
from peers.dataloader_loop import loader_of
from peers.work import Work


def train(work: Work, clock: Clock) -> nn.Module:
    """Train as Accelerate's documentation does."""
    accelerator = Accelerator(cpu=work.job.device == "cpu")
    criterion = nn.CrossEntropyLoss()
    plain = work.model()
    sgd = work.sgd(plain)
    model, optimizer, loader, scheduler = accelerator.prepare(plain, sgd, loader_of(work), work.cosine(sgd))
    for _ in range(work.job.epochs):
        model.train()
        running_loss = 0.0
        for images, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            running_loss += loss.item() * len(images)
        clock.epoch_ended()
    return accelerator.unwrap_model(model)
