"""The command line with which `runner` does the work."""

from __future__ import annotations

from pathlib import Path

from peers.cases import CASES, MOMENTUM, WEIGHT_DECAY, Job


def words(job: Job, job_file: Path) -> list[str]:
    """Words after `python -m runner`: no evaluation while training, the score is taken by the clock's callback."""
    case = CASES[job.case]
    data = [word.format(root=job.fashion_root, samples=job.samples or "null") for word in case.data]
    return [
        "train",
        *data,
        f"model={case.model}",
        "transform=standard" if case.shift else "transform=none",
        f"data.shift={case.shift}",
        f"data.hflip={case.flip}",
        f"data.batch_size={case.batch_size}",
        f"data.normalize.mean=[{case.mean}]",
        f"data.normalize.std=[{case.std}]",
        "data.split.val=0",
        "evaluate.test=false",
        "optimizer=sgd",
        f"optimizer.lr={case.lr}",
        f"optimizer.momentum={MOMENTUM}",
        f"optimizer.weight_decay={WEIGHT_DECAY}",
        "scheduler=cosine",
        f"epochs={job.epochs}",
        f"seed={job.seed}",
        f"threads={job.threads}",
        f"device={job.device}",
        f"output_root={job.folder}",
        "callbacks.clock._target_=peers.clock.Callback",
        f"callbacks.clock.job={job_file}",
        *job.further,
    ]
