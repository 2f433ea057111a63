"""What asks a run to stop, a signal or the end of its time: noted here, acted on by the loop at the next step boundary."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from runner.config.signals import STOPPING, early, heard, interrupts

# These stay ignored if they were when the process started, as nohup and shells do it.
_LEFT_IGNORED = ("SIGHUP", "SIGQUIT", "SIGXCPU")
# One cause may send these several times: a closed terminal (the shell and the kernel), used up CPU time (every second).
_REPEATED = ("SIGHUP", "SIGXCPU")


class StopSignals:
    """While entered, the signals of `STOPPING` set `received`; a second one ends the process at once.

    A repeated SIGHUP or SIGXCPU does not. Outside the main thread, where Python allows no handlers, nothing is done.

    Args:
        patient: no signal ends the process at once, as a rank gets them from its launcher and from the scheduler.
    """

    def __init__(self, patient: bool = False) -> None:
        self.received = ""
        self._patient = patient
        self._insists = False  # whether the next signal ends the process
        self._before: dict[int, Any] = {}
        self._end, self._limit = float("inf"), ""

    def limit(self, seconds: float, name: str) -> None:
        """Ask the run to stop `seconds` from now too; `name` is what is reported."""
        self._end, self._limit = time.monotonic() + seconds, name

    def asked(self) -> str:
        """What asks the run to stop, such as `SIGTERM` or `max_time=2h`, or an empty string."""
        if self.received or time.monotonic() < self._end:
            return self.received
        return self._limit

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.received = early.pop() if early else ""
            for number in STOPPING:
                if number.name not in _LEFT_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
            if interrupts:
                self.__exit__(None, None, None)
                raise KeyboardInterrupt
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self.received = self.received or name
        heard.append(name)
        if name in _REPEATED or self._patient:
            return
        if self._insists:
            with contextlib.suppress(Exception):  # workers that outlive this process would print what they then miss
                for child in multiprocessing.active_children():
                    child.kill()
            os._exit(128 + number)
        self._insists = True
