"""timm: `CheckpointSaver` and `resume_checkpoint`, as its train.py uses them: recovery files inside an epoch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from timm.models import resume_checkpoint
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver, random_seed
from torch import nn

from faults.peers.job import (
    EPOCHS,
    EVERY_STEPS,
    SEED,
    STEPS,
    TOTAL,
    Job,
    loader_of,
    model_of,
    optimizer_of,
    write_fingerprint,
)

NAME = "timm"


def train(job: Job) -> None:
    """Train to the end and write the fingerprint."""
    random_seed(SEED)
    model = model_of()
    optimizer = optimizer_of(model)
    criterion = nn.CrossEntropyLoss()
    loader = loader_of(job)
    first = 0
    if job.resumes:
        first = resume_checkpoint(model, str(checkpoints(job.folder)[0]), optimizer, log_info=False) or 0
    schedule = CosineLRScheduler(optimizer, t_initial=TOTAL, t_in_epochs=False)
    schedule.step_update(first * STEPS)
    saver = CheckpointSaver(
        model, optimizer, args=argparse.Namespace(model="small_cnn"), checkpoint_dir=str(job.folder),
        recovery_dir=str(job.folder), decreasing=False, max_history=2,
    )  # fmt: skip
    for epoch in range(first, EPOCHS):
        model.train()
        for batch, (images, targets) in enumerate(loader):
            optimizer.zero_grad()
            criterion(model(images), targets).backward()
            optimizer.step()
            schedule.step_update(epoch * STEPS + batch + 1)
            if (batch + 1) % EVERY_STEPS == 0:
                saver.save_recovery(epoch, batch_idx=batch)
        saver.save_checkpoint(epoch, metric=float(epoch))
    write_fingerprint(job, model)


def checkpoints(folder: Path) -> Sequence[Path]:
    """What one would resume from: the newest file that is there."""
    found = [*folder.glob("last.pth.tar"), *folder.glob("recovery-*.pth.tar")]
    return sorted(found, key=lambda path: -path.stat().st_mtime_ns)
