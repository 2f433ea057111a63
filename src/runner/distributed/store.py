"""The store by which the ranks of a run find each other before they can communicate."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from runner.base.errors import FAILED, UserError

_LOOKED_S = 0.1
_SILENT_S = 10.0  # before rank 0 says whom it waits for
_LATER_S = 15.0  # for which other ranks wait longer than rank 0, whose error names those that are missing
_SHOWN = 8


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
    address, of_launcher = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), served_by_launcher()
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
    # Ranks of an attempt before a restart left keys, so each attempt has its own prefix
    return of_attempt(store, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def served_by_launcher() -> bool:
    """True if the launcher of the ranks has the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def of_attempt(store: Store, attempt: int | str) -> PrefixStore:
    """The part of a store for the ranks of one start, which a restart of all ranks does not see."""
    return PrefixStore(f"start_{attempt}", store)


def appear(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait until a store has all keys; False if it has not after some seconds."""
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOKED_S)
    return True


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
    if not appear(store, keys, silent_s):
        if rank() == 0:
            print(f"waiting for {missing()}, up to dist.timeout_s={timeout_s:g}", file=sys.stderr, flush=True)
        if not appear(store, keys, patience_s - silent_s):
            problem = f"{missing()} did not come within {timeout_s:g} s: not started, ended, or hanging"
            allowed = "the same command for every rank, whose own output says why it ends; a larger value if it is slow"
            raise RanksMissing("dist.timeout_s", problem, allowed)
    # All ranks have come: the others may go on
    store.set(f"{name}/all", "")
