"""Requests to stop, by a signal or the end of a run's time: noted here, acted on by the loop at the next step boundary."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from types import FrameType

from runner.base.signals import early, heard, interrupts, listening

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
        self._listening = contextlib.ExitStack()
        self._end, self._limit = float("inf"), ""

    def limit(self, seconds: float, name: str) -> None:
        """Ask the run to stop `seconds` from now too; `name` is what is reported."""
        self._end, self._limit = time.monotonic() + seconds, name

    def asked(self) -> str:
        """The request to stop, such as `SIGTERM` or `max_time=2h`, or an empty string."""
        if self.received or time.monotonic() < self._end:
            return self.received
        return self._limit

    def __enter__(self) -> StopSignals:
        self.received = early.pop() if early else ""
        self._listening.enter_context(listening(self._note))
        if interrupts:
            self._listening.close()
            raise KeyboardInterrupt
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

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
