"""The same small training by each library, as its documentation writes it, for `scripts/torture_peers.py`.

Digits, a network with BatchNorm and dropout, and shifted images. A library is imported when it trains first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

import runner.verbs.train  # noqa: F401  # before anything forks, so that no child pays for it
from runner.cli import main
from runner.data.sources.digits import digits
from runner.models.small_cnn import SmallCNN

SAMPLES, BATCH, EPOCHS, EVERY_STEPS, SEED = 640, 32, 4, 7, 0
STEPS = SAMPLES // BATCH
TOTAL = STEPS * EPOCHS


@dataclass(frozen=True)
class Job:
    """One training."""

    folder: Path  # takes everything that it writes
    workers: int = 0  # processes that read samples
    poisoned: bool = False  # whether one image is not a number
    resumes: bool = False  # whether it goes on from what is in the folder


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


class Shifted(Images):
    """With a random shift, drawn as torchvision draws it: from torch's global generator."""

    _shift = v2.RandomAffine(0, translate=(0.125, 0.125))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._shift(self._images[index]), self.targets[index]


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


def by_runner(job: Job) -> None:
    """`runner` itself, for the same table."""
    words = [
        "train", f"hydra.run.dir={job.folder}", "threads=1", "device=cpu", "logger=none", "log.progress=false", "log.curves=false",
        "evaluate.test=false", "data.split.test=0", f"data.batch_size={BATCH}", f"epochs={EPOCHS}",
        f"checkpoint.every_steps={EVERY_STEPS}", "checkpoint.min_seconds=0", "model.width=4", "model.dropout=0.2",
        "data.shift=0.125", "data.placement=disk", f"data.num_workers={job.workers}",
        f"data.dataset={{_target_:{__name__}.Images,poisoned:{str(job.poisoned).lower()}}}", "data.normalize.mean=[0.3]",
        "data.normalize.std=[0.37]", "data.split.val=0", "evaluate.every_epochs=null", "callbacks=none",
    ]  # fmt: skip
    if job.resumes:
        words += [f"ckpt_path={job.folder}", "trust=[faults]"]
    if status := main(words):
        sys.exit(status)
    summary = json.loads((job.folder / "summary.json").read_text())
    (job.folder / "fingerprint").write_text(f"{summary['weights_sha256']} finite")


def by_lightning(job: Job) -> None:
    """`ModelCheckpoint` every few steps, and `fit(ckpt_path="last")`."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()
            self.criterion = nn.CrossEntropyLoss()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            images, targets = batch
            loss: Tensor = self.criterion(self.model(images), targets)
            self.log("step", float(self.global_step))
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = optimizer_of(self.model)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"}}

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


def by_accelerate(job: Job) -> None:
    """`save_state` every few steps, `load_state` and `skip_first_batches` to go on, as its examples do."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    criterion = nn.CrossEntropyLoss()
    plain = model_of()
    optimizer = optimizer_of(plain)
    model, optimizer, loader, schedule = accelerator.prepare(plain, optimizer, loader_of(job), schedule_of(optimizer))
    step = 0
    if job.resumes:
        newest = newest_step(job.folder)[0]
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


def by_timm(job: Job) -> None:
    """`CheckpointSaver` and `resume_checkpoint`, as its train.py uses them: recovery files inside an epoch."""
    from timm.models import resume_checkpoint
    from timm.scheduler import CosineLRScheduler
    from timm.utils import CheckpointSaver, random_seed

    random_seed(SEED)
    model = model_of()
    optimizer = optimizer_of(model)
    criterion = nn.CrossEntropyLoss()
    loader = loader_of(job)
    first = 0
    if job.resumes:
        first = resume_checkpoint(model, str(newest_of_timm(job.folder)[0]), optimizer, log_info=False) or 0
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


def last(name: str) -> Callable[[Path], Sequence[Path]]:
    """A function that finds the checkpoint of that name."""
    return lambda folder: [*folder.glob(f"checkpoints/{name}")]


def newest_step(folder: Path) -> Sequence[Path]:
    """The folder with the highest step."""
    return sorted(folder.glob("step_*"), key=lambda path: -int(path.name.removeprefix("step_")))[:1]


def files_of_accelerate(folder: Path) -> Sequence[Path]:
    """The files of this folder, the largest first."""
    return sorted((path for step in newest_step(folder) for path in step.iterdir()), key=lambda p: -p.stat().st_size)


def newest_of_timm(folder: Path) -> Sequence[Path]:
    """What one would resume from: the newest file that is there."""
    found = [*folder.glob("last.pth.tar"), *folder.glob("recovery-*.pth.tar")]
    return sorted(found, key=lambda path: -path.stat().st_mtime_ns)


class Program(NamedTuple):
    """A library that trains."""

    name: str
    train: Callable[[Job], None]  # to the end, and writes the fingerprint
    checkpoints: Callable[
        [Path], Sequence[Path]
    ]  # files of the newest one that a resume would read; none if there is none


PROGRAMS = {
    "runner": Program("runner", by_runner, last("last.safetensors")),
    "lightning": Program("Lightning", by_lightning, last("last.ckpt")),
    "accelerate": Program("Accelerate", by_accelerate, files_of_accelerate),
    "timm": Program("timm", by_timm, newest_of_timm),
}
