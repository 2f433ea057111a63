"""What runs the jobs of a search: this process, one after the other, or a pool of processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from runner.config.composition import Composition
from runner.sweeps.pool import Pool
from runner.sweeps.pruning import VARIABLE


@dataclass
class TrialJob:
    """A job that is to run."""

    number: int
    words: list[str]
    composition: Composition
    environment: dict[str, str] = field(default_factory=dict)


class Executor(Protocol):
    """What runs jobs: this process, or a pool of others."""

    @property
    def free(self) -> int:
        """How many jobs may start now."""

    @property
    def stopped(self) -> bool:
        """Whether a signal asked it to start no other job."""

    def begin(self, job: TrialJob) -> None:
        """Start a job."""

    def ended(self) -> list[tuple[int, str]]:
        """Wait until jobs have ended; their numbers, and why a process could not say itself how its job did."""


class InProcess:
    """Runs one job at a time in this process, when it is waited for."""

    stopped = False  # a signal ends `ended` with SystemExit

    def __init__(self, run: Callable[[Composition], Any]) -> None:
        self._run = run
        self._job: TrialJob | None = None

    @property
    def free(self) -> int:
        """1 if no job waits."""
        return int(self._job is None)

    def begin(self, job: TrialJob) -> None:
        """Take a job."""
        self._job = job

    def ended(self) -> list[tuple[int, str]]:
        """Run the job that was taken."""
        assert self._job is not None
        job, self._job = self._job, None
        before = dict(os.environ)
        os.environ.update(job.environment)
        try:
            self._run(job.composition)
        finally:
            os.environ.pop(VARIABLE, None)
            os.environ.update({name: value for name, value in before.items() if name in job.environment})
        return [(job.number, "")]


class InPool:
    """Runs jobs in the slots of a pool, at most `most` at a time."""

    def __init__(self, pool: Pool, most: int | None) -> None:
        self.pool, self._most = pool, most

    @property
    def free(self) -> int:
        """How many slots are free."""
        return self.pool.free if self._most is None else min(self.pool.free, self._most - len(self.pool.running))

    @property
    def stopped(self) -> bool:
        """Whether the pool was asked to stop."""
        return bool(self.pool.asked)

    def begin(self, job: TrialJob) -> None:
        """Start a job in a process of its own."""
        self.pool.start(job.number, job.words, job.environment)

    def ended(self) -> list[tuple[int, str]]:
        """Wait until a job has ended, or a slot has become free."""
        return [(each.number, each.sentence) for each in self.pool.wait()]
