"""The time budget: what takes too long is stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from runner.config.signals import raising_after


class OutOfTime(BaseException):
    """The budget ran out. No `Exception`, so that a data set or a model that catches those does not catch this one."""


@contextlib.contextmanager
def stop_after(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the code inside after that many seconds.

    One call into torch is not interrupted. In other threads than the main one, and where there are no timers, nothing is.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    with raising_after(seconds, OutOfTime):
        yield
