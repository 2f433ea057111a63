"""Children: jobs of a sweep and ranks of a run. They are forked by a server, watched here, and end once their parent is gone."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from runner.base.errors import FAILED
from runner.base.signals import STOPPING

FORKED = multiprocessing.get_context("forkserver")
_POLLED_S, _LOOKED_S = 0.1, 0.5
_LEFT_S = 5.0  # from SIGTERM to the end of a rank that waits for others
_SIGNALS = {"SIGKILL": ": perhaps out of memory", "SIGSEGV": ": a fault in compiled code"}
_STATUSES = {120: ": what it printed cannot be written: perhaps the disk is full"}


def start_fork_server(modules: Sequence[str]) -> None:
    """Start the fork server of this process, unless it runs.

    The server blocks the signals of `STOPPING`, and so do the processes that it forks until they call
    `accept_signals`: what is sent to one of them as soon as it has a number is not lost.

    Args:
        modules: what it imports, while this process does other things.
    """
    multiprocessing.set_forkserver_preload([__name__, *modules])  # this one, as it runs what is at the end of this file
    resource_tracker.ensure_running()  # which unblocks SIGINT
    # The server inherits the blocked signals; this process gets its own mask back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(call: Callable[[], Any], environment: Mapping[str, str], log: Path | None = None) -> BaseProcess:
    """Call a function in a process of the fork server, which leads a session and ends with this process.

    What it prints is appended to the log; without one, it goes where this process prints.
    """
    child: BaseProcess = FORKED.Process(target=_be_child, args=(call, environment, log))
    child.start()
    return child


def wait(children: Iterable[BaseProcess], seconds: float, enough: Callable[[], bool] = bool) -> None:
    """Wait for the end of children, for some seconds in all, or until it is enough."""
    deadline = time.monotonic() + seconds
    while not enough() and (left := deadline - time.monotonic()) > 0:
        if not (running := [child.sentinel for child in children if child.exitcode is None]):
            break
        connection.wait(running, min(left, _POLLED_S))


def send(children: Iterable[BaseProcess], number: int) -> None:
    """Send a signal to the children that run."""
    for child in children:
        if child.exitcode is None and child.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(child.pid, number)


def why_ended(status: int) -> str:
    """What is known of a process that could not report how its work ended, by its exit status."""
    if status >= 0:
        return f"ended with status {status}{_STATUSES.get(status, '')}"
    name = signal.Signals(-status).name
    return f"was killed by {name}{_SIGNALS.get(name, '')}"


def _be_child(call: Callable[[], Any], environment: Mapping[str, str], log: Path | None) -> None:
    os.environ.clear()  # the server may be older than what is set now
    os.environ.update(environment)
    # Output is redirected at the level of the system, as C libraries print too
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    # Workers start as in a run of one process: by the fork server, each would import torch and copy the data set
    multiprocessing.set_start_method(None, force=True)
    accept_signals()
    end_with_parent()
    faulthandler.enable()
    with contextlib.suppress(OSError):
        # A system that is short of memory ends a child and not what supervises it
        Path("/proc/self/oom_score_adj").write_text("500")
    call()


def accept_signals() -> None:
    """Let signals end this process, those too that have come since it was forked, until a run listens to them.

    Those of a terminal do not reach it, but the launcher, which passes them on.
    """
    # A process that is forked by a server without this module leads a session already
    if os.getsid(0) != os.getpid():
        os.setsid()
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@functools.cache
def end_with_parent() -> None:
    """Ask this process to save and stop once the one that started it is gone, and end it if it waits for other ranks."""
    threading.Thread(target=_outlast, args=(os.getppid(),), daemon=True).start()


def _outlast(parent: int) -> None:
    if (process := multiprocessing.parent_process()) is not None:
        process.join()
    else:
        while os.getppid() == parent:
            time.sleep(_LOOKED_S)
    os.kill(os.getpid(), signal.SIGTERM)
    while int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from runner.distributed.world import world

        time.sleep(_LEFT_S)
        # It has not met the others, or has left them: there is nothing that it could save
        if world().size == 1:
            os._exit(FAILED)


if "multiprocessing.forkserver" in sys.orig_argv[-1]:
    os.setsid()
