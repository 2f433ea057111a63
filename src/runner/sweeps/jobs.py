"""The jobs of a sweep: all of them validated before the first one starts, then run with a word on each."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from runner.config import overrides
from runner.config.errors import ConfigError, Problem
from runner.config.secrets import mask_words

Announce = Callable[[int, int, str], None]
"""Called before each job with its number from 1, the number of jobs, and what it varies."""


def completed(words: Sequence[str] = (), value: float | None = None) -> JobReturn:
    """What a launcher returns for a job that returned no more than a value; its folder tells what became of it."""
    result = JobReturn(overrides=words)
    result.status, result.return_value = JobStatus.COMPLETED, value
    return result


def jobs_of(words: Sequence[str], params: dict[str, Any]) -> list[list[str]]:
    """The overrides of every job, as Hydra's own sweeper makes them from a command line and the parameters of a preset."""
    sweeper: Any = importlib.import_module("hydra._internal.core_plugins.basic_sweeper").BasicSweeper
    given = [*(f"{key}={value}" for key, value in params.items()), *words]
    [jobs] = sweeper.split_arguments(overrides.parsed(given), None)
    return [list(job) for job in jobs]


def validate_jobs(jobs: Sequence[Sequence[str]], problems_of: Callable[[list[str], bool], list[Problem]]) -> None:
    """Validate all jobs, first without importing torch, and with it if no problem was found.

    Args:
        jobs: the overrides of each.
        problems_of: composes a job and finds its problems, with or without importing torch; may raise `ConfigError` too.

    Raises:
        ConfigError: with each problem once, and the first job that has it with the overrides that not all jobs have, unless
            all jobs have it.
    """
    for imports in (False, True):
        found: list[list[Problem]] = []
        for job in jobs:
            try:
                found.append(problems_of(list(job), imports))
            except ConfigError as error:
                found.append(list(error.problems))
        if wrong := [number for number, problems in enumerate(found) if problems]:
            break
    else:
        return
    kinds = [{(problem.key, problem.message) for problem in problems} for problems in found]
    everywhere = set.intersection(*kinds)
    told = [problem for problem in found[wrong[0]] if (problem.key, problem.message) in everywhere]
    varied, seen = varied_words(jobs), everywhere
    for number in wrong:
        for problem in found[number]:
            if (problem.key, problem.message) not in seen:
                seen.add((problem.key, problem.message))
                others = sum((problem.key, problem.message) in kind for kind in kinds) - 1
                name = f"job {number + 1} of {len(jobs)}: {varied[number]}" + (f", and {others} more" if others else "")
                told.append(dataclasses.replace(problem, origin=name))
    raise ConfigError(told)


def varied_words(jobs: Sequence[Sequence[str]]) -> list[str]:
    """For each job, the overrides that not all jobs have, as one text, with secrets masked."""
    jobs = [mask_words(job) for job in jobs]
    common = set.intersection(*(set(job) for job in jobs)) if len(jobs) > 1 else set()
    return [" ".join(word.lstrip("+") for word in job if word not in common and "hydra." not in word) for job in jobs]


@contextlib.contextmanager
def announced(announce: Announce, jobs: Sequence[Sequence[str]], fixed: bool = False) -> Iterator[None]:
    """Call `announce` before each job that Hydra's own launcher runs, and keep no results.

    If `fixed`, the jobs are these, whatever combinations Hydra would make of the command line.

    The launcher keeps the results of all jobs until a sweep ends, with two configs of 0.5 MiB in each.
    """
    launcher: Any = importlib.import_module("hydra._internal.core_plugins.basic_launcher")
    run_job, varied, count = launcher.run_job, varied_words(jobs), len(jobs)

    def run_job_and_drop_configs(**given: Any) -> Any:
        number = int(given["config"].hydra.job.num)
        if number < count > 1:
            announce(number + 1, count, varied[number])
        result = run_job(**given)
        result.cfg = result.hydra_cfg = None
        return result

    sweeper: Any = importlib.import_module("hydra._internal.core_plugins.basic_sweeper").BasicSweeper
    split = sweeper.split_arguments
    plain = [[word for word in job if not word.startswith(("hydra.", "hydra/"))] for job in jobs]
    launcher.run_job = run_job_and_drop_configs
    if fixed:
        sweeper.split_arguments = staticmethod(lambda _, size: list(sweeper.split_overrides_to_chunks(plain, size)))
    if jobs:
        sweeper.validate_batch_is_legal = lambda self, batch: None  # they are validated, and composing takes long
    try:
        yield
    finally:
        launcher.run_job = run_job
        sweeper.split_arguments = staticmethod(split)
        if jobs:
            del sweeper.validate_batch_is_legal  # that of its base class is back
