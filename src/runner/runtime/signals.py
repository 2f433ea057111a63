"""What asks a run to stop, a signal or the end of its time: noted here, acted on by the loop at the next step boundary."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_WATCHED = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


class StopSignals:
    """While entered, SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 set `received`; a second one ends the process at once.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[int, Any] = {}
        self._end, self._limit = float("inf"), ""

    def limit(self, seconds: float, name: str) -> None:
        """Ask the run to stop `seconds` from now too; `name` is what people are told."""
        self._end, self._limit = time.monotonic() + seconds, name

    def asked(self) -> str:
        """What asks the run to stop, such as `SIGTERM` or `max_time=2h`, or an empty string."""
        if self.received or time.monotonic() < self._end:
            return self.received
        return self._limit

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
