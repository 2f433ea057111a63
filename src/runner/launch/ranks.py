"""Starts the ranks of a run on this machine, supervises them, and finds out why they ended."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]

from runner.base.errors import FAILED, PREEMPTED, explain
from runner.base.files import make_folder
from runner.distributed.store import RanksMissing, of_attempt, open_store, rank
from runner.launch.processes import send, start, start_fork_server, wait, why_ended

_PATIENCE_S = 120.0  # for ranks that a signal asked to save and end, before they are killed
_NOTICED_S = 5.0  # for ranks to end by themselves after another one has failed, before SIGTERM
_TERMINATED_S = 25.0  # from SIGTERM to SIGKILL
_ANSWERED_S = 10.0  # by a store that is served
_FILES, _FILES_OF_RANK = 32, 8  # open files without which the store does not answer the ranks
_LOST_PEER = ("gloo/transport", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    rank: int
    status: int  # exit status
    value: float | None = None  # what it returned
    sentence: str = ""  # why it failed: an error's message, or without `text` what follows the number of the rank
    text: str = ""  # an error's message for people, maybe with a traceback
    lost: bool = False  # it failed because another rank was gone
    ended: float = 0.0  # Unix time
    unsaved: bool = False  # a signal asked it to save and end, and it was killed before it had

    @property
    def failed(self) -> bool:
        """True unless it finished, or saved and stopped."""
        return self.status not in (0, PREEMPTED)


class RankFailed(Exception):
    """A rank ended early; the error is that of the first one."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"rank {outcome.rank}{':' if outcome.text else ''} {outcome.sentence}")
        self.exit_code = outcome.status
        self.hint = "\n" + outcome.text if "\n" in outcome.text and outcome.text != outcome.sentence else ""


def run_ranks(
    entry: Callable[[Any], float | None],
    job: Any,
    size: int,
    logs: Path,
    *,
    max_restarts: int = 0,
    asked: Callable[[], str] = str,
) -> Outcome:
    """Run `entry(job)` in `size` processes, which see torchrun's environment variables, and wait for all of them.

    Args:
        entry: a function that can be imported by name.
        job: its argument, pickled.
        size: number of processes.
        logs: folder for what ranks other than the first write to standard output and error.
        max_restarts: how often all ranks are started again after one of them has failed.
        asked: gives the name of the signal that asks to stop, which the ranks then get too, or nothing.

    Returns:
        The outcome of the first rank.

    Raises:
        RankFailed: with the reason of the rank that failed first.
        OSError: if the limit on open files is too small.
    """
    # Too few file descriptors would show up as an obscure error of one of the ranks
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _FILES + _FILES_OF_RANK * size:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    make_folder(logs)
    # DistributedDataParallel imports torch._dynamo, which takes a second
    start_fork_server([entry.__module__, "torch._dynamo"])
    # Ranks meet in the store, and say there how they ended
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    # The variables of torchrun, so that a rank cannot tell who started it
    environment = os.environ | {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
    environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # A restart begins again from the last checkpoint, with another attempt number in the store
    for attempt in range(max_restarts + 1):
        environment["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        ranks = list[BaseProcess]()
        try:
            for number in range(0 if asked() else size):
                own = environment | {"RANK": str(number), "LOCAL_RANK": str(number)}
                log = logs / f"rank_{number}.log" if number else None  # rank 0 has the terminal
                ranks.append(start(functools.partial(_rank, entry, job), own, log))
            signalled, ended = _supervise(ranks, asked)
        # No rank outlives this, whatever happens above
        finally:
            send(ranks, signal.SIGKILL)
            wait(ranks, math.inf)
        outcomes = _outcomes(of_attempt(store, attempt), ranks, ended)
        if signalled or first_failure(outcomes.values()) is None:
            break
    # A signal that came before the ranks listened killed them: nothing was trained, so it counts as preempted
    if signalled and (not ranks or any(rank.exitcode == -signal.Signals[signalled] for rank in ranks)):
        return Outcome(0, PREEMPTED, sentence=f"{signalled}, before the ranks had started")
    if failed := first_failure(outcomes.values()):
        raise RankFailed(failed)
    sentence = f"{signalled}, and rank 0 did not save within {_PATIENCE_S:g} s and was killed"
    return outcomes.get(0) or Outcome(0, PREEMPTED, sentence=sentence, unsaved=True)


def _supervise(ranks: Sequence[BaseProcess], asked: Callable[[], str]) -> tuple[str, set[int]]:
    """Wait until all ranks have ended, for a limited time once a signal has come or one has failed.

    Returns:
        The name of the signal that was passed on to them; without one, the numbers of those that ended by themselves.
    """
    wait(ranks, math.inf, lambda: bool(asked()) or any(rank.exitcode for rank in ranks))
    signalled = asked()
    # The others notice by themselves that one is gone, and their reports are better than a kill
    if not signalled:
        wait(ranks, _NOTICED_S)
    ended = {number for number, rank in enumerate(ranks) if rank.exitcode is not None and not signalled}
    # Those that still run are asked: a signal lets them save, SIGTERM ends those that hang
    number = signal.Signals[signalled or "SIGTERM"]
    send(ranks, number)
    # One that a signal ended before it listened is one that the others would wait for in vain
    if signalled:
        wait(ranks, _PATIENCE_S - _NOTICED_S, lambda: any(rank.exitcode == -number for rank in ranks))
    wait(ranks, _NOTICED_S if signalled else _TERMINATED_S)
    return signalled, ended


def _outcomes(store: Store, ranks: Sequence[BaseProcess], ended: set[int]) -> dict[int, Outcome]:
    """What the ranks reported, what ended those that could not, and which one the others waited for in vain."""
    found = reported(store, len(ranks))
    # A rank that was killed could not report, so its exit code speaks for it
    for number in ended - {*found}:
        found[number] = Outcome(number, FAILED, sentence=why_ended(ranks[number].exitcode or 0))
    # If every report is about a lost partner, the one without a report is the cause
    if ended and all(outcome.lost for outcome in found.values()):
        late = "took no part for dist.timeout_s: it hangs, is suspended, or reads its data too slowly"
        found |= {number: Outcome(number, FAILED, sentence=late) for number in {*range(len(ranks))} - {*found}}
    return found


def _rank(entry: Callable[[Any], float | None], job: Any) -> None:
    """What each process runs."""
    try:
        store = open_store(_ANSWERED_S)
    except (RanksMissing, DistNetworkError) as error:  # the launcher, if it has not been killed, notices the status
        sys.exit(f"error: {error}")
    outcome = take_part(functools.partial(entry, job), store)
    if outcome.failed:
        sys.exit(outcome.status)


def take_part(call: Callable[[], float | None], store: Store) -> Outcome:
    """Do the job of this rank, and say in the store of the ranks how it ended, also where it ends by an exception."""
    try:
        outcome = Outcome(rank(), 0, call())
    except (Exception, SystemExit) as error:
        outcome = outcome_of(rank(), error)
    with contextlib.suppress(DistNetworkError):  # a launcher that was killed reads nothing
        store.set(f"ended/{rank()}", pickle.dumps(outcome))  # type: ignore[arg-type]
        store.check([f"ended/{rank()}"])  # an answer: what was set before has arrived
    return outcome


def outcome_of(rank: int, error: BaseException) -> Outcome:
    """The outcome of a rank that an exception ended."""
    status, sentence, text = explain(error)
    lost = isinstance(error, RanksMissing | DistNetworkError) or any(said in str(error) for said in _LOST_PEER)
    return Outcome(rank, status, sentence=sentence, text=text, lost=lost, ended=time.time())


def reported(store: Store, size: int) -> dict[int, Outcome]:
    """What the ranks of a job have said in their store."""
    return {n: pickle.loads(store.get(f"ended/{n}")) for n in range(size) if store.check([f"ended/{n}"])}


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The rank that failed first by itself, as the others then lost their partner; None if none failed."""
    failed = [outcome for outcome in outcomes if outcome.failed]
    return min(failed, key=lambda outcome: (outcome.lost, outcome.ended), default=None)
