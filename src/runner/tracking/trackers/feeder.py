"""The process that feeds one kind of tracker, for all runs of the process that started it.

`python -m runner.tracking.trackers.feeder mlflow` reads lines of JSON from standard input (`begin` and `end` of a run) and
writes some to standard output: `trouble`, `recovered`, `ended`. Training shares neither Python's lock nor memory with it, and
a client that hangs or dies takes nothing along. It ends itself once its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from runner.config.secrets import mask_text
from runner.config.signals import STOPPING
from runner.tracking.formats import clean
from runner.tracking.trackers.delivery import Busy, Delivery

LINGER_S = 60
"""Longest life in seconds after the process that started it."""

_POLL_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LONGEST = 300  # characters of a trouble


class Feeder:
    """The runs of a process, and what became of the last attempt.

    Args:
        name: of the tracker.
    """

    def __init__(self, name: str) -> None:
        self.name, self.trouble = name, ""
        self.runs: dict[str, Delivery] = {}
        self._retry_at, self._pause = 0.0, 1.0

    def hear(self, message: dict[str, Any]) -> None:
        """Obey a message."""
        if directory := message.get("begin"):
            if directory not in self.runs:
                self.runs[directory] = Delivery(Path(directory), self.name, message["settings"])
            self.runs[directory].begin(message["resume_step"], message["again"])
            if self.trouble:
                tell(run=directory, trouble=self.trouble)
        elif (directory := message.get("end")) in self.runs:
            self.runs[directory].over = True
            self._retry_at = 0.0

    def turn(self) -> None:
        """Let every run advance, the newest first, unless it is too early after a failure."""
        if time.monotonic() < self._retry_at:
            return
        for delivery in reversed(self.runs.values()):
            try:
                asked = delivery.advance()
            except Busy:
                continue
            except (Exception, SystemExit) as error:
                self._fail(delivery, error)
                return
            if asked and self.trouble:
                self.trouble, self._pause = "", 1.0
                tell(recovered=True)
        for directory in [name for name, delivery in self.runs.items() if delivery.ended]:
            self.runs.pop(directory).close()
            tell(run=directory, ended=True)

    def orphaned(self) -> None:
        """The process that the runs belong to is gone: find out how they ended."""
        for delivery in self.runs.values():
            delivery.over = delivery.dead = True
        self._retry_at = 0.0

    def _fail(self, delivery: Delivery, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            (delivery.directory / "trackers" / self.name / "error.log").write_text(
                mask_text("".join(traceback.format_exception(error))), encoding="utf-8"
            )
        first = not self.trouble
        self.trouble = sentence_of(error, delivery.address)
        self._retry_at, self._pause = time.monotonic() + self._pause, min(2 * self._pause, _LONGEST_PAUSE_S)
        for directory in self.runs if first else ():
            tell(run=directory, trouble=self.trouble)


def sentence_of(error: BaseException, address: str) -> str:
    """What an error says in the end, on one line, without secrets; clients wrap that of the system several times."""
    first = deepest = error
    while (inner := deepest.__cause__ or deepest.__context__) is not None:
        deepest = inner
    if isinstance(deepest, OSError):
        text = (deepest.strerror or str(deepest) or type(deepest).__name__).lower()
    else:
        text = str(first) or type(first).__name__
    return " ".join(clean(mask_text(f"{address}: {text}")).split())[:_LONGEST]


def tell(**message: Any) -> None:
    """Write a message for the run; nobody may be there."""
    with contextlib.suppress(OSError):
        os.write(_OUT, json.dumps(message).encode() + b"\n")


_OUT = 1


def main(name: str) -> None:
    """Feed a tracker until standard input ends, and then until everything is sent, but not for long."""
    global _OUT
    _OUT = os.dup(1)
    os.dup2(2, 1)  # clients print
    for number in STOPPING:  # a run that is stopped tells its trackers so afterwards
        signal.signal(number, signal.SIG_IGN)
    feeder, parent, rest = Feeder(name), os.getppid(), b""
    while True:
        ready, _, _ = select.select([0], [], [], _POLL_S)
        data = os.read(0, 2**16) if ready else b""
        if (ready and not data) or os.getppid() != parent:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            feeder.hear(json.loads(line))
        feeder.turn()
    watchdog = threading.Timer(LINGER_S, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    feeder.orphaned()
    while feeder.runs:
        feeder.turn()
        if feeder.trouble:
            break
        time.sleep(_POLL_S / 4)
    os._exit(0)  # a client's threads may wait for a server


if __name__ == "__main__":
    main(sys.argv[1])
