"""What happens to the jobs of a sweep that run side by side: told when it happens, to whoever listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runner.config.secrets import mask_text


@dataclass(frozen=True)
class Event:
    """Something that happened to a job.

    Attributes:
        kind: `pending` if it does not start, `retried` if it failed and runs again.
        number: of the job, from 1.
        count: of jobs in the sweep; of those known so far, if a sweeper chooses them.
        varied: the overrides that not all jobs have.
        text: where it runs, its result, or why it failed.
        folder: its run directory, if that is known.
        log: what its process printed.
        repeat: the command that runs a failed job alone.
    """

    kind: Literal["started", "finished", "failed", "retried", "preempted", "skipped", "pending"]
    number: int
    count: int
    varied: str
    text: str = ""
    folder: Path | None = None
    log: Path | None = None
    repeat: str = ""

    @property
    def lines(self) -> list[str]:
        """The event for people: what happened, and of a failure its log and the command that repeats it alone."""
        text = f"job {self.number} of {self.count}: {mask_text(self.varied) or 'as all others'}: {self.kind}"
        text += f"{', ' if self.kind in ('finished', 'skipped') else ': '}{mask_text(self.text)}" if self.text else ""
        log = [f"log: {self.log}"] if self.kind in ("failed", "retried") else []
        return [text, *log, *([f"repeat it alone: {self.repeat}"] if self.repeat else [])]

    @property
    def line(self) -> str:
        """The same in one line."""
        return "; ".join(self.lines)


def _print(event: Event | None) -> None:
    if event is not None:
        print(event.line, flush=True)


_listener: Callable[[Event | None], None] = _print
_period_s: float | None = None


@contextlib.contextmanager
def listening(listener: Callable[[Event | None], None], period_s: float | None = None) -> Iterator[None]:
    """Tell events to `listener`, and print no lines; every `period_s` seconds, if given, it gets None."""
    global _listener, _period_s
    before = _listener, _period_s
    _listener, _period_s = listener, period_s
    try:
        yield
    finally:
        _listener, _period_s = before


def tell(event: Event | None) -> None:
    """Tell what happened, or that time has passed."""
    _listener(event)


def period_s() -> float | None:
    """How often the listener wants to know that time has passed."""
    return _period_s
