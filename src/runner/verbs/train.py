"""Train a model: one process, or several that the launcher of this machine, torchrun or SLURM starts."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.build.dry_run import dry_run
from runner.build.ranks import Job, count_ranks, device_of_rank
from runner.build.run_record import RunRecord
from runner.build.setup import Setup, resolve, why_occupied
from runner.config.app import Composition, current
from runner.config.durations import seconds
from runner.config.errors import OK, PREEMPTED, USAGE
from runner.config.reading import read_summary
from runner.distributed import follow
from runner.distributed.launch import Outcome, RankFailed, end_with_parent, outcome_of, run_ranks
from runner.distributed.world import joined, started_by_launcher
from runner.engine.errors import Preempted
from runner.runtime.determinism import operations_named
from runner.runtime.signals import StopSignals
from runner.train import build_run, train


def run(cfg: DictConfig) -> float | None:
    """Run one job: the entry point that Hydra calls.

    Returns:
        The best value of the monitored metric, for sweepers; None if there is none.

    Raises:
        SystemExit: with the exit code, unless the job finished or is one of a sweep.
    """
    composition = current(cfg)
    if mistake := why_occupied(composition):
        RunRecord(composition).complain(str(mistake))
        raise SystemExit(USAGE)
    record, value = run_composition(composition)
    record.finish()
    return value


def run_composition(composition: Composition) -> tuple[RunRecord, float | None]:
    """Run one job; returns its record, which tells how it ended, and the best value of the monitored metric."""
    record, signals, value = RunRecord(composition), StopSignals(patient=started_by_launcher()), None
    try:
        with signals, operations_named(lambda text: record.console.warn(text)):
            record.reserve()
            setup = resolve(composition)
            if setup.config.max_time is not None:
                signals.limit(seconds(setup.config.max_time), f"max_time={setup.config.max_time}")
            if setup.config.dry_run:
                build = functools.partial(build_run, make_cache=False, fresh=setup.found is None)
                value = dry_run(setup.config, build, record.console)
            elif setup.finished is not None:
                return record, record.leave(setup.finished)
            else:
                record.open(setup)
                value = _train(setup, record, signals)
        record.summary["status"] = "finished"
    except (Exception, SystemExit) as error:
        record.fail(error)
    finally:
        record.close()
    return record, value


def _train(setup: Setup, record: RunRecord, signals: StopSignals) -> float | None:
    """Train here, or with other ranks."""
    size = count_ranks(setup.config)
    if started_by_launcher():
        return _lead(setup, record, signals)
    if size == 1:
        return train(setup, record, signals)
    directory = record.directory.path
    record.begin()
    job = Job.of(record.composition, setup, directory)
    try:
        outcome = run_ranks(train_as_rank, job, size, directory / "logs", setup.config.max_restarts)
    finally:
        record.summary |= read_summary(directory) or {}
    if outcome.status == PREEMPTED:
        raise Preempted(outcome.sentence.removeprefix(Preempted.prefix))
    return outcome.value


def _lead(setup: Setup, record: RunRecord, signals: StopSignals) -> float | None:
    """Train as rank 0 of those that torchrun or SLURM started."""
    end_with_parent()
    store = follow.lead(Job.of(record.composition, setup, record.directory.path))
    try:
        with joined(setup.config.dist.timeout_s, device_of_rank(setup.config), store):
            return train(setup, record, signals)
    except Exception as error:
        if outcome_of(0, error).lost and (failed := follow.first_failure()):
            raise RankFailed(Outcome(**failed)) from error
        raise


def main_of_follower() -> int:
    """A rank other than 0 that torchrun or SLURM started: train what rank 0 says, and return the exit status."""
    end_with_parent()
    status = OK

    def job_of_rank_0(job: Job, store: Any) -> None:
        nonlocal status
        try:
            train_as_rank(job, store)
        except (Exception, SystemExit) as error:
            outcome = outcome_of(follow.rank(), error)
            follow.report(outcome)
            status = outcome.status
            if not outcome.lost and status != PREEMPTED:
                raise RankFailed(outcome) from error

    try:
        follow.follow(job_of_rank_0)
    except RankFailed as failed:
        from runner.verbs._launch import print_error

        print_error(f"{failed}{failed.hint}")
        time.sleep(_HEARD_S)  # rank 0 reports it, if it can; the launcher ends all ranks when this one does
    return status


_HEARD_S = 5.0


def train_as_rank(job: Job, store: Any = None) -> float | None:
    """Train as one of several ranks, from what rank 0 or the launcher decided."""
    signals = StopSignals(patient=True)
    with contextlib.ExitStack() as ending:
        ending.enter_context(signals)
        scratch = ending.enter_context(tempfile.TemporaryDirectory())
        world = ending.enter_context(joined(job.config.dist.timeout_s, device_of_rank(job.config), store))
        setup = job.setup()
        record = RunRecord.of_rank(job.composition, setup, job.directory, world.rank, Path(scratch))
        ending.callback(record.directory.write_summary, record.summary)
        ending.callback(record.console.stop)
        ending.enter_context(operations_named(lambda text: record.console.warn(text)))
        if job.config.max_time is not None:
            signals.limit(seconds(job.config.max_time), f"max_time={job.config.max_time}")
        return train(setup, record, signals)
