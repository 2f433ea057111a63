"""Ranks that torchrun or SLURM started: rank 0 composes, and the others do what it hands them, job after job."""

from __future__ import annotations

import datetime
import functools
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from runner.distributed.world import meeting

_PATIENCE = datetime.timedelta(days=1)  # for the next job; a launcher ends all ranks when one fails
_jobs = 0


@functools.cache
def _store() -> Any:
    return meeting(_PATIENCE)


def lead(job: Any) -> Any:
    """Hand a job to the other ranks; returns the store by which all ranks of the job find each other."""
    global _jobs
    _jobs += 1
    _store().set(f"job/{_jobs}", pickle.dumps(job))
    return PrefixStore(f"job/{_jobs}/ranks", _store())


def dismiss() -> None:
    """Tell the other ranks that there are no more jobs."""
    lead(None)


def rank() -> int:
    """The number of this rank."""
    return int(os.environ["RANK"])


def report(outcome: Any) -> None:
    """Let rank 0 know why this rank failed, unless another one was first."""
    if not outcome.lost and not _store().check(["failed"]):
        _store().set("failed", json.dumps(asdict(outcome)))


def first_failure() -> dict[str, Any] | None:
    """What the first rank that failed reported; None if none has within a few seconds."""
    try:
        _store().wait(["failed"], datetime.timedelta(seconds=3))
    except Exception:  # torch raises several kinds for a time that has passed or a store that is gone
        return None
    found: dict[str, Any] = json.loads(_store().get("failed"))
    return found


def follow(entry: Callable[[Any, Any], Any]) -> None:
    """On a rank other than 0: call `entry(job, store)` for every job until there are no more."""
    global _jobs
    while True:
        _jobs += 1
        _store().wait([f"job/{_jobs}"], _PATIENCE)
        job = pickle.loads(_store().get(f"job/{_jobs}"))  # from rank 0 of this run, through its launcher's store
        if job is None:
            return
        entry(job, PrefixStore(f"job/{_jobs}/ranks", _store()))
