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
    def line(self) -> str:
        """The event in one line, for people."""
        text = f"job {self.number} of {self.count}: {self.varied or 'as all others'}: {self.kind}"
        text += f"{', ' if self.kind in ('finished', 'skipped') else ': '}{self.text}" if self.text else ""
        text += f"; log: {self.log}" if self.kind in ("failed", "retried") else ""
        return mask_text(text + (f"; repeat it alone: {self.repeat}" if self.repeat else ""))


def _print(event: Event) -> None:
    print(event.line, flush=True)


_listener: Callable[[Event], None] = _print


@contextlib.contextmanager
def listening(listener: Callable[[Event], None]) -> Iterator[None]:
    """Tell events to `listener`, and print no lines."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def tell(event: Event) -> None:
    """Tell what happened."""
    _listener(event)
