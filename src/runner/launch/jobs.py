"""Jobs, the interface of what starts them, and the loop that keeps its slots full until a signal asks it to stop."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from runner.base.errors import PREEMPTED
from runner.base.signals import early, heard, listening
from runner.launch.processes import why_ended

_PERIOD_S = 0.25  # between two calls of `on_time`
_SAME_S = 1.0  # `timeout` and schedulers send a signal to a process and to its group


@dataclass(frozen=True)
class Job:
    """A job of a sweep, as a function for processes of this machine and as a command for others."""

    number: int  # among the jobs of this command, from 0
    call: Callable[[], Any]  # runs the job in a process that ends after it; pickled
    command: Sequence[str]  # what a user would type to run the same job
    log: Path  # gets what the job prints; the same whenever the job is started again in the same folder
    environment: Mapping[str, str] = field(default_factory=dict)  # variables for it alone


@dataclass(frozen=True)
class Ended:
    """A job whose process is gone."""

    number: int  # of the job
    sentence: str = ""  # why the process could not report how the run ended; empty if it could

    @classmethod
    def with_status(cls, number: int, status: int) -> Ended:
        """A job whose process had this exit status, negative for a signal."""
        return cls(number, "" if status in (0, PREEMPTED) else f"its process {why_ended(status)}")


class Launcher(Protocol):
    """Starts jobs somewhere, each in a separate process. A YAML under `hydra/launcher` names the class as `_target_`."""

    slots: int | None  # how many jobs run at a time; None if something else decides that
    survives: bool = False  # whether jobs continue after the process of the sweep has ended

    def start(self, jobs: Sequence[Job]) -> list[str]:
        """Start jobs, unless an earlier process started one that still runs, and return for each where it runs."""
        ...

    def wait(self, timeout_s: float) -> list[Ended]:
        """The jobs that have ended; waits at most so long for the first one."""
        ...

    def stop(self, kill: bool) -> None:
        """Ask all jobs to save and to end, or kill them. Called from a signal handler."""
        ...

    def close(self) -> None:
        """Release what the launcher holds once its jobs have ended, or continue without it."""
        return


def run(
    launcher: Launcher,
    next_job: Callable[[], Job | None],
    on_start: Callable[[Job, str], None],
    on_end: Callable[[Ended, str], None],
    on_time: Callable[[], bool],
) -> str:
    """Run jobs until there are no more, or a signal asks to stop; returns the name of the signal, or an empty string.

    Args:
        launcher: what starts them.
        next_job: the next job; None if there is none now.
        on_start: called with a job and where it runs, before it can end.
        on_end: called with a job that has ended, and the name of the signal that asked to stop.
        on_time: called every `_PERIOD_S`; whether `next_job` may give a job later, although no job runs.
    """
    running, asked, insists_from = 0, early.pop() if early else "", 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        """The first signal asks the jobs to stop; another one after more than a second kills them."""
        nonlocal asked, insists_from
        heard.append(signal.Signals(number).name)
        again = bool(asked) and time.monotonic() > insists_from
        if not asked:
            asked, insists_from = heard[-1], time.monotonic() + _SAME_S
        if not launcher.survives or again:
            launcher.stop(kill=again)

    # The launcher is closed however this ends, so that no job outlives the sweep
    with contextlib.closing(launcher), listening(stop):
        while True:
            # Jobs start in groups, as SLURM takes them as one array
            started: list[Job] = []
            while not asked and (launcher.slots is None or running + len(started) < launcher.slots):
                if (job := next_job()) is None:
                    break
                started.append(job)
            if started:
                for job, place in zip(started, launcher.start(started), strict=True):
                    on_start(job, place)
                running += len(started)
                # The signal came before there was anything to stop
                if asked and not launcher.survives:
                    launcher.stop(kill=False)
            more = on_time()
            # Jobs of SLURM run on without this process: the same command finds them again
            if asked and launcher.survives:
                return asked
            # After a signal, jobs that run may save first; without one, there is nothing left to start
            if not running and (asked or not more):
                return asked
            for ended in launcher.wait(_PERIOD_S):
                running -= 1
                on_end(ended, asked)
