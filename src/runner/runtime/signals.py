"""Signals that ask a run to stop: noted by a handler, acted on by the loop at the next step boundary."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_WATCHED = ("SIGTERM", "SIGINT", "SIGUSR1")


class StopSignals:
    """While entered, SIGTERM, SIGINT and SIGUSR1 set `received`; a second one ends the process at once.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for name in _WATCHED:
                number = getattr(signal, name, None)
                if number is not None:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
