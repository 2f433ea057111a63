"""What processes of jobs and ranks share: the server that forks them, and their end once their parent is gone."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from runner.base.errors import FAILED
from runner.base.signals import STOPPING

FORKED = multiprocessing.get_context("forkserver")
_LOOKED_S = 0.5
_LEFT_S = 5.0  # from SIGTERM to the end of a rank that waits for others


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


def be_child(call: Callable[[], Any], environment: Mapping[str, str], log: Path | None) -> None:
    """Call a function in a process of the fork server, which ends with the process that started it.

    What it prints is appended to the log; without one, it goes where the parent prints.
    """
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
