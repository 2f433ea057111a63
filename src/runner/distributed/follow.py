"""Ranks that torchrun or SLURM started: rank 0 composes, and the others do what it hands them, job after job."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from runner.base.errors import UserError
from runner.config.schema.sections import Dist
from runner.distributed.store import appear, gather_ranks, open_store, rank, served_by_launcher, size

_NEXT_JOB = datetime.timedelta(days=1)  # a launcher ends all ranks when one fails
_REPORTED_S, _LEAVING_S = 3.0, 5.0
_numbers = itertools.count(1)  # of jobs


@functools.cache
def _timeout_s() -> float:
    """`dist.timeout_s` of the command line, or the default: other sources of it are known once rank 0 has composed."""
    given = [found for word in sys.argv if (found := re.fullmatch(r"\+*dist\.timeout_s=(\d+(\.\d+)?)", word))]
    return float(given[-1][1]) if given else Dist.timeout_s


@functools.cache
def _store() -> PrefixStore:
    return open_store(_timeout_s())


def compare(words: Sequence[str]) -> None:
    """Wait for all ranks; on rank 0, check that they were started with the same words, secrets masked.

    Raises:
        UserError: on rank 0, naming the first rank that was not, and the first difference.
        RanksMissing: if some were not started in time.
    """
    gather_ranks(_store(), "words", _timeout_s(), json.dumps(list(words)))
    # Only rank 0 compares, so that one message and not N of them says what is different
    for other in range(1, 0 if rank() else size()):
        for own, its in itertools.zip_longest(words, json.loads(_store().get(f"words/{other}"))):
            if own != its:
                with_, without = f"with '{its}'", f"without '{own}'"
                problem = f"rank {other} of {size()} was started {without if its is None else with_}, and rank 0 "
                problem += "without it" if own is None else "with it" if its is None else f"with '{own}'"
                raise UserError("", problem, "the same command line for every rank")


def lead(job: dict[str, Any] | None) -> Store:
    """Hand a job, which JSON can contain, to the other ranks; returns the store by which all ranks of the job meet."""
    key = f"job/{next(_numbers)}"
    _store().set(key, json.dumps(job))
    return PrefixStore(f"{key}/ranks", _store())


def follow(entry: Callable[[dict[str, Any], Store], Any]) -> None:
    """On a rank other than 0: call `entry(job, store)` for every job until there are no more."""
    for number in _numbers:
        _store().wait([f"job/{number}"], _NEXT_JOB)
        job = json.loads(_store().get(f"job/{number}"))
        if job is None:
            break
        entry(job, PrefixStore(f"job/{number}/ranks", _store()))
    _store().set(f"left/{rank()}", "")


def dismiss() -> None:
    """Tell the other ranks that there are no more jobs."""
    with contextlib.suppress(RuntimeError):  # some ranks, or a launcher with the store, may be gone
        lead(None)
        if not served_by_launcher():  # the store goes with this process
            appear(_store(), [f"left/{other}" for other in range(1, size())], _LEAVING_S)


def report(outcome: Any) -> None:
    """Let rank 0 know why this rank failed, unless another one was first."""
    if not outcome.lost and not _store().check(["failed"]):
        _store().set("failed", json.dumps(asdict(outcome)))


def first_failure() -> str:
    """The report of the first rank that failed, as JSON; empty if none has within a few seconds."""
    with contextlib.suppress(RuntimeError):  # the store is gone
        if appear(_store(), ["failed"], _REPORTED_S):
            return str(_store().get("failed"), "utf-8")
    return ""
