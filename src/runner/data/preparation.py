"""Files that are made before training: the progress, and one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.base.signals import heard

_POLL_S = 0.2
_SHOWN_AFTER_S = 2.0
_SHOWN_EVERY_S = 10.0


@contextlib.contextmanager
def progress(say: Callable[[int, float], str]) -> Iterator[Callable[[int], None]]:
    """Progress on standard error, once the work has taken a while; on a terminal in one line.

    Gives a function that is called with the amount that is done. `say` makes a text of it and the amount a second.
    """
    live, began, shown = sys.stderr.isatty(), time.perf_counter(), False
    due = began + _SHOWN_AFTER_S

    def advance(done: int) -> None:
        nonlocal due, shown
        # Short work shows nothing, and long work does not flood the screen
        if (now := time.perf_counter()) < due:
            return
        due, shown = now + (_POLL_S if live else _SHOWN_EVERY_S), True
        text = say(done, done / (now - began))
        print(f"\r{text:<78}" if live else text, end="" if live else "\n", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if live and shown:
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Let one process at a time make a file, whose folder is made; the lock of a killed process ends with it.

    Gives whether the lock is held: not after a signal, nor on file systems that have no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.parent / f".{path.name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    locked, reported, before = False, False, len(heard)
    try:
        # The lock is polled, so that a signal ends the wait
        while not locked and len(heard) == before:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                if not reported:
                    print(f"waiting for another process that makes {path}", file=sys.stderr, flush=True)
                reported = True
                time.sleep(_POLL_S)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                    raise
                break
        yield locked
        if locked:  # closing alone is not enough: a process forked in the meantime would still hold it
            fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        os.close(lock)
