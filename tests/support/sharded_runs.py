"""Runs on several ranks that are started once for all of them, and what a run leaves behind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from runner.build.ranks import Job, device_of_rank
from runner.build.run_record import RunRecord
from runner.build.setup import resolve
from runner.distributed.launch import run_ranks
from runner.distributed.world import joined
from runner.runtime.signals import StopSignals
from runner.train import train


class Poison:
    """A batch transform that makes one sample of one epoch not a number."""

    per_sample = True

    def __init__(self, sample: int, epoch: int = 0) -> None:
        self.sample, self.epoch = sample, epoch

    def __call__(self, images: torch.Tensor, rng: Any) -> torch.Tensor:
        hit = (rng.indices == self.sample) & torch.tensor(rng.epoch == self.epoch)
        return torch.where(hit.view(-1, 1, 1, 1), torch.nan, images.float() / 255)


def make_job(compose: Callable[..., Any], *words: str) -> Job:
    """The job of a command, whose run directory is open."""
    composition = compose(*words)
    setup, record = resolve(composition), RunRecord(composition)
    record.open(setup)
    record.begin()
    record.close()
    (record.directory.path / "logs").mkdir(exist_ok=True)
    return Job.of(composition, setup, record.directory.path)


def train_jobs(jobs: list[Job], rank: int = 0) -> None:
    """Train one after the other, in this process."""
    for job in jobs:
        setup, signals = job.setup(), StopSignals(patient=True)
        with signals, tempfile.TemporaryDirectory() as scratch:
            record = RunRecord.of_rank(job.composition, setup, job.directory, rank, Path(scratch))
            train(setup, record, signals)
            record.console.stop()
            record.directory.write_summary(record.summary)


def _as_rank(jobs: list[Job]) -> None:
    with joined(60.0, device_of_rank(jobs[0].config)) as ranks:
        train_jobs(jobs, ranks.rank)


def train_on_ranks(jobs: list[Job], size: int, logs: Path) -> None:
    """Train one after the other on `size` ranks."""
    run_ranks(_as_rank, jobs, size, logs)


class Left:
    """What a run left in its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.summary = json.loads((directory / "summary.json").read_text())
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        self.losses = [row["loss"] for row in rows if row["split"] == "train"]
        self.val = [{name: row[name] for name in row if "loss" in name} for row in rows if row["split"] == "val"]

    def tensors(self, name: str = "last") -> dict[str, torch.Tensor]:
        """Every tensor of a checkpoint."""
        return load_file(self.directory / "checkpoints" / f"{name}.safetensors")
