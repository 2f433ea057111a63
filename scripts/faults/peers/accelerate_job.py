"""Accelerate: `save_state` every few steps, `load_state` and `skip_first_batches` to go on, as its examples do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from faults.peers.job import (
    EPOCHS,
    EVERY_STEPS,
    SEED,
    STEPS,
    Job,
    loader_of,
    model_of,
    optimizer_of,
    schedule_of,
    write_fingerprint,
)

NAME = "Accelerate"


def train(job: Job) -> None:
    """Train to the end and write the fingerprint."""
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    criterion = nn.CrossEntropyLoss()
    plain = model_of()
    optimizer = optimizer_of(plain)
    model, optimizer, loader, schedule = accelerator.prepare(plain, optimizer, loader_of(job), schedule_of(optimizer))
    step = 0
    if job.resumes:
        newest = _newest(job.folder)
        accelerator.load_state(str(newest))
        step = int(newest.name.removeprefix("step_"))
    for epoch in range(step // STEPS, EPOCHS):
        model.train()
        skipped = step - epoch * STEPS
        for images, targets in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            optimizer.zero_grad()
            accelerator.backward(criterion(model(images), targets))
            optimizer.step()
            schedule.step()
            step += 1
            if step % EVERY_STEPS == 0:
                accelerator.save_state(str(job.folder / f"step_{step}"))
    write_fingerprint(job, accelerator.unwrap_model(model))


def checkpoints(folder: Path) -> Sequence[Path]:
    """The files of the folder with the highest step."""
    if not any(folder.glob("step_*")):
        return []
    return sorted(_newest(folder).iterdir(), key=lambda path: -path.stat().st_size)


def _newest(folder: Path) -> Path:
    return max(folder.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
