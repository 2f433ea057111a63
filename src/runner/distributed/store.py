"""The store by which ranks find each other, and by which rank 0 gives jobs to those that torchrun or SLURM started."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import os
import pickle
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from runner.base.errors import FAILED, UserError
from runner.config.schema.sections import Dist

_LOOKED_S = 0.1
_SILENT_S = 10.0  # before rank 0 says whom it waits for
_LATER_S = 15.0  # for which other ranks wait longer than rank 0, whose error names those that are missing
_NEXT_JOB = datetime.timedelta(days=1)  # a launcher ends all ranks when one fails
_LEAVING_S = 5.0
_SHOWN = 8
_numbers = itertools.count(1)  # of jobs


class RanksMissing(UserError):
    """Other ranks, or the launcher that serves their store, were not there in time."""

    exit_code = FAILED


def rank() -> int:
    """The number of this rank."""
    return int(os.environ["RANK"])


def size() -> int:
    """The number of ranks."""
    return int(os.environ["WORLD_SIZE"])


def open_store(timeout_s: float) -> PrefixStore:
    """The store that the environment describes, without what ranks left there before a restart.

    Raises:
        RanksMissing: if nothing serves it: after `timeout_s`, or at once if that was the launcher's task.
    """
    # torchrun serves the store itself; otherwise rank 0 does
    address, of_launcher = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _served_by_launcher()
    serves = rank() == 0 and not of_launcher
    deadline = time.monotonic() + (0 if of_launcher else timeout_s)
    while not serves:  # TCPStore waits too, but prints frames of its own code before it gives up
        try:
            socket.create_connection(address, timeout_s).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                who = "the launcher of the ranks" if of_launcher else f"rank 0 of {size()}"
                raise RanksMissing(f"{who} does not answer at {address[0]}:{address[1]}: {error}") from None
        time.sleep(_LOOKED_S)
    timeout = datetime.timedelta(seconds=timeout_s)
    store = TCPStore(*address, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    return of_attempt(store, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def of_attempt(store: Store, attempt: int | str) -> PrefixStore:
    """The part of a store for the ranks of one start, which does not have the keys that ranks left before a restart."""
    return PrefixStore(f"start_{attempt}", store)


def gather_ranks(store: Store, name: str, timeout_s: float, value: str = "") -> None:
    """Return once every rank has called this with the same store and name; the key `name/RANK` has the value of each.

    Raises:
        RanksMissing: naming those that have not after `timeout_s`.
    """
    # Rank 0 waits for every rank, and the others only for rank 0: it is the one to know who is missing
    store.set(f"{name}/{rank()}", value)
    keys = [f"{name}/all"] if rank() else [f"{name}/{other}" for other in range(size())]
    patience_s = timeout_s + _LATER_S * (rank() != 0)
    silent_s = min(_SILENT_S, patience_s / 2)

    def missing() -> str:
        ranks = [str(number) for number, key in enumerate(keys) if not store.check([key])]
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:_SHOWN])}{', ...' * (len(ranks) > _SHOWN)} of {size()}"

    # Say after a while who is missing: the usual cause is a command that was not started everywhere
    if not _appear(store, keys, silent_s):
        if rank() == 0:
            print(f"waiting for {missing()}, up to dist.timeout_s={timeout_s:g}", file=sys.stderr, flush=True)
        if not _appear(store, keys, patience_s - silent_s):
            problem = f"{missing()} did not come within {timeout_s:g} s: not started, ended, or hanging"
            allowed = "the same command for every rank, whose own output says why it ends; a larger value if it is slow"
            raise RanksMissing("dist.timeout_s", problem, allowed)
    store.set(f"{name}/all", "")


def compare(words: Sequence[str]) -> None:
    """Wait for all ranks; on rank 0, check that they were started with the same words, secrets masked.

    Raises:
        UserError: on rank 0, naming the first rank that was not, and the first difference.
        RanksMissing: if some were not started in time.
    """
    gather_ranks(_store(), "words", _timeout_s(), json.dumps(list(words)))
    # Only rank 0 compares, so that one message and not N of them says what is different
    for other in range(1, 0 if rank() else size()):
        for pair in itertools.zip_longest(words, json.loads(_store().get(f"words/{other}"))):
            if pair[0] != pair[1]:
                own, its = ("fewer words" if word is None else f"'{word}'" for word in pair)
                problem = f"rank {other} of {size()} was started with {its}, and rank 0 with {own}"
                raise UserError("", problem, "the same command line for every rank")


def lead(job: Any) -> Store:
    """Give a job to the other ranks; returns the store by which all ranks of the job meet."""
    key = f"job/{next(_numbers)}"
    _store().set(key, pickle.dumps(job))  # type: ignore[arg-type]
    return PrefixStore(f"{key}/ranks", _store())


def jobs() -> Iterator[tuple[Any, Store]]:
    """On a rank other than 0: every job, and the store by which its ranks meet, until there are no more."""
    for number in _numbers:
        _store().wait([f"job/{number}"], _NEXT_JOB)
        job = pickle.loads(_store().get(f"job/{number}"))
        if job is None:
            break
        yield job, PrefixStore(f"job/{number}/ranks", _store())
    _store().set(f"left/{rank()}", "")


def dismiss() -> None:
    """Tell the other ranks that there are no more jobs."""
    with contextlib.suppress(RuntimeError):  # some ranks, or a launcher with the store, may be gone
        lead(None)
        if not _served_by_launcher():  # the store goes with this process
            _appear(_store(), [f"left/{other}" for other in range(1, size())], _LEAVING_S)


@functools.cache
def _timeout_s() -> float:
    """`dist.timeout_s` of the command line, or the default: other sources of it are known once rank 0 has composed."""
    given = [found for word in sys.argv if (found := re.fullmatch(r"\+*dist\.timeout_s=(\d+(\.\d+)?)", word))]
    return float(given[-1][1]) if given else Dist.timeout_s


@functools.cache
def _store() -> PrefixStore:
    return open_store(_timeout_s())


def _served_by_launcher() -> bool:
    """True if the launcher of the ranks has the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _appear(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait until a store has all keys; False if it has not after some seconds."""
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOKED_S)
    return True
