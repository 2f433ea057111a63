"""Starts the ranks of a run on this machine, with torch's elastic agent, and finds out why they ended."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from runner.config.errors import FAILED, PREEMPTED, explain
from runner.config.signals import heard

_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
_PATIENCE_S = 120  # for ranks that are asked to end, before they are killed
_STARTED = "started"  # a file that rank 0 makes
_COLLECTED_S = 1.0
_NOTICED_S = 10.0  # for the agent to find the rank that was killed, before those that lost it end too
_WATCHED_S = 0.5  # between two looks at the launcher
_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG
_FILES, _FILES_OF_RANK = 32, 8  # open files without which torch's agent waits minutes for connections
_LOST_PEER = ("gloo/transport", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    rank: int
    status: int  # exit status
    value: float | None = None  # what it returned
    sentence: str = ""  # why it failed: an error's message, or with `clause` what follows the number of the rank
    clause: bool = False
    text: str = ""  # the same for people, maybe with a traceback
    lost: bool = False  # whether it failed because another rank was gone
    ended: float = 0.0  # Unix time
    unsaved: bool = False  # whether a signal asked it to save and end, and it was killed before it had


class RankFailed(Exception):
    """A rank ended early; the error is that of the first one."""

    prefix = ""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"rank {outcome.rank}{'' if outcome.clause else ':'} {outcome.sentence}")
        self.exit_code = outcome.status
        self.hint = "\n" + outcome.text if "\n" in outcome.text and outcome.text != outcome.sentence else ""


def run_ranks(
    entry: Callable[[Any], float | None],
    job: Any,
    size: int,
    logs: Path,
    max_restarts: int = 0,
    asked_early: Callable[[], str] = str,
) -> Outcome:
    """Run `entry(job)` in `size` processes, which see torch's environment variables, and wait for all of them.

    Args:
        entry: a function that can be imported by name.
        job: its argument, pickled.
        size: how many.
        logs: folder for what ranks other than the first write to standard output and error.
        max_restarts: how often all ranks are started again after one of them has died.
        asked_early: names the signal that asked to stop before this could listen, or nothing.

    Returns:
        The outcome of the first rank.

    Raises:
        RankFailed: with the reason of the rank that failed first.
        OSError: if the limit on open files is too small.
    """
    import resource

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _FILES + _FILES_OF_RANK * size:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    logs.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_PATIENCE_S)
    # DistributedDataParallel imports torch's compiler, which takes more than a second, on every rank.
    multiprocessing.set_forkserver_preload([entry.__module__, "torch._dynamo"])
    resource_tracker.ensure_running()  # which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()  # Ctrl-C while it imports would end it with a traceback
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    failures: dict[int, Any] = {}
    forwarded = [name for name in _FORWARDED if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    asked, started = "a signal", False
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, _quiet():  # ranks may still write there
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            start_method="forkserver",
            signals_to_handle=",".join(forwarded),
        )

        def stop(number: int, _: Any) -> None:  # until the agent listens, which is once the ranks have met
            raise SignalException("a signal", signal.Signals(number))

        try:
            if threading.current_thread() is threading.main_thread():
                for name in forwarded:
                    signal.signal(signal.Signals[name], stop)
            if early := asked_early():
                raise SignalException("a signal", signal.Signals[early])
            # Ranks that a fork server still has to start when the launcher ends would print what they then miss.
            ready = multiprocessing.get_context("forkserver").Process(target=os.getpid)
            ready.start()
            ready.join()
            elastic_launch(config, _rank)(entry, job, scratch, str(logs), dict(os.environ), os.getpid())
        except SignalException as error:
            asked = signal.Signals(error.sigval).name  # most often the ranks have saved, and say so
            heard.append(asked)
        except ChildFailedError as error:
            failures = error.failures
        outcomes = _outcomes(Path(scratch), failures, size)
        started = Path(scratch, _STARTED).exists()
    failed = [outcome for outcome in outcomes if outcome.status not in (0, PREEMPTED)]
    if failed:
        raise RankFailed(min(failed, key=lambda outcome: (outcome.lost, outcome.ended)))
    if outcomes and outcomes[0].rank == 0:
        return outcomes[0]
    if not started:
        return Outcome(0, PREEMPTED, sentence=f"{asked}, before the ranks had started")
    sentence = f"{asked}, and rank 0 did not save within {_PATIENCE_S} s and was killed"
    return Outcome(0, PREEMPTED, sentence=sentence, unsaved=True)


def _outcomes(scratch: Path, failures: dict[int, Any], size: int) -> list[Outcome]:
    """What the ranks wrote, what killed those that could not, and which one the others waited for in vain."""
    found = {}
    for path in scratch.glob("rank_*.json"):
        outcome = Outcome(**json.loads(path.read_text()))
        found[outcome.rank] = outcome
    for rank, failure in failures.items():
        if failure.exitcode < 0:
            killer = signal.Signals(-failure.exitcode).name
            sentence = f"was killed by {killer}"
        elif rank not in found:
            sentence = f"ended with status {failure.exitcode} before it could train"
        else:
            continue
        found[rank] = Outcome(rank, FAILED, sentence=sentence, clause=True, ended=float(failure.timestamp))
    if failures and all(outcome.lost for outcome in found.values()):
        late = "took no part for dist.timeout_s: it hangs, is suspended, or reads its data too slowly"
        found |= {rank: Outcome(rank, FAILED, sentence=late, clause=True) for rank in set(range(size)) - set(found)}
    return [found[rank] for rank in sorted(found)]


def _rank(
    entry: Callable[[Any], float | None],
    job: Any,
    scratch: str,
    logs: str,
    environment: dict[str, str],
    launcher: int,
) -> None:
    """What each process runs."""
    rank = int(os.environ["RANK"])
    for name, value in environment.items():  # the fork server may be older than what is set now
        os.environ.setdefault(name, value)
    # Workers start as in a run of one process: by the fork server, each would import torch and copy the data set.
    multiprocessing.set_start_method(None, force=True)
    with contextlib.suppress(OSError):
        os.setsid()  # a terminal's signals come through the launcher, once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    done = threading.Event()
    threading.Thread(target=_watch, args=(launcher, done), daemon=True).start()
    if not rank:
        Path(scratch, _STARTED).touch()
    else:
        log = os.open(Path(logs) / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
    try:
        outcome = Outcome(rank, 0, entry(job))
    except (Exception, SystemExit) as error:
        outcome = outcome_of(rank, error)
    with contextlib.suppress(OSError):  # a launcher that was killed reads nothing, and its folder may be gone
        path = Path(scratch) / f"rank_{rank}.json"
        path.with_suffix(".tmp").write_text(json.dumps(asdict(outcome)))
        path.with_suffix(".tmp").replace(path)
    done.set()
    if outcome.status == PREEMPTED:
        # The agent, which a signal has ended too, may not collect what this returns, and torch would wait for it.
        leave = threading.Timer(_COLLECTED_S, os._exit, (0,))
        leave.daemon = True
        leave.start()
    elif outcome.lost:
        # The agent asks for one exit code only, that of whichever rank it finds first, and ends the others by a signal.
        time.sleep(_NOTICED_S)
    if outcome.status not in (0, PREEMPTED):
        raise SystemExit(outcome.status)


def _watch(launcher: int, done: threading.Event) -> None:
    """Once the launcher is gone, ask this rank to save and stop, and end the process when it has."""
    while Path(f"/proc/{launcher}").exists() or not Path("/proc/self").exists():
        time.sleep(_WATCHED_S)
    if not done.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
    done.wait()
    os._exit(0)


def outcome_of(rank: int, error: BaseException) -> Outcome:
    """The outcome of a rank that an exception ended."""
    status, sentence, text = explain(error)
    lost = any(said in str(error) for said in _LOST_PEER)
    return Outcome(rank, status, sentence=sentence, text=text, lost=lost, ended=time.time())


def end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent dies, so that a killed launcher leaves no rank behind; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGTERM)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the agent's own messages, which say again what `RankFailed` says."""
    names = ("torch.distributed.elastic", "torch.multiprocessing.spawn")  # each of their modules has its own level
    loggers = [logging.getLogger(name) for name in [*logging.root.manager.loggerDict] if name.startswith(names)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
