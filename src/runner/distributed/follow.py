"""Ranks that torchrun or SLURM started: rank 0 composes, and the others do what it hands them, job after job."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from runner.config.errors import UserError
from runner.distributed.world import meeting

_PATIENCE = datetime.timedelta(days=1)  # for the next job; a launcher ends all ranks when one fails
_LEAVING = datetime.timedelta(seconds=5)
_jobs = 0


@functools.cache
def _store() -> Any:
    return meeting(_PATIENCE)


def compare(words: Sequence[str]) -> None:
    """Let rank 0 check that all ranks were started with the same words, secrets masked; the others follow rank 0's.

    Raises:
        UserError: on rank 0, naming the first rank that was not, and the first difference.
    """
    if rank():
        _store().set(f"words/{rank()}", json.dumps(list(words)))
        return
    for other in range(1, size()):
        _store().wait([f"words/{other}"], _PATIENCE)
        for own, its in itertools.zip_longest(words, json.loads(_store().get(f"words/{other}"))):
            if own != its:
                with_, without = f"with '{its}'", f"without '{own}'"
                problem = f"rank {other} of {size()} was started {without if its is None else with_}, and rank 0 "
                problem += "without it" if own is None else "with it" if its is None else f"with '{own}'"
                raise UserError("", problem, "the same command line for every rank")


def kept(name: str, make: Callable[[], str]) -> str:
    """A text that rank 0 makes once, however often the launcher starts the ranks again."""
    store = _store().underlying_store
    if not store.check([name]):
        store.set(name, make())
    text: str = store.get(name).decode()
    return text


def lead(job: dict[str, Any] | None) -> Any:
    """Hand a job, which JSON can contain, to the other ranks; returns the store by which all ranks of the job meet."""
    global _jobs
    _jobs += 1
    _store().set(f"job/{_jobs}", json.dumps(job))
    return PrefixStore(f"job/{_jobs}/ranks", _store())


def dismiss() -> None:
    """Tell the other ranks that there are no more jobs."""
    lead(None)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        with contextlib.suppress(Exception):  # this process has the store, and some ranks may be gone
            _store().wait([f"left/{other}" for other in range(1, size())], _LEAVING)


def rank() -> int:
    """The number of this rank."""
    return int(os.environ["RANK"])


def size() -> int:
    """How many ranks there are."""
    return int(os.environ["WORLD_SIZE"])


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


def follow(entry: Callable[[dict[str, Any], Any], Any]) -> None:
    """On a rank other than 0: call `entry(job, store)` for every job until there are no more."""
    global _jobs
    while True:
        _jobs += 1
        _store().wait([f"job/{_jobs}"], _PATIENCE)
        job = json.loads(_store().get(f"job/{_jobs}"))
        if job is None:
            _store().set(f"left/{rank()}", "")
            return
        entry(job, PrefixStore(f"job/{_jobs}/ranks", _store()))
