"""The process that forks ranks, which has imported what they need; `multiprocessing` has one in a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker

from runner.config.signals import STOPPING


def start(*modules: str) -> None:
    """Start it, unless it runs already, with modules that it imports; no signal for all processes of a terminal ends it."""
    # What is in a module's body is the only code of ours that it runs itself.
    multiprocessing.set_forkserver_preload([__name__, *modules])
    resource_tracker.ensure_running()  # which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if "multiprocessing.forkserver" in sys.orig_argv[-1]:  # this is it
    os.setsid()
    for number in STOPPING:
        signal.signal(number, signal.signal(number, signal.SIG_IGN))  # drops those that came before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
