"""Train a model: one process, or several that the launcher of this machine, torchrun or SLURM starts."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from runner.base.durations import seconds
from runner.base.errors import PREEMPTED
from runner.base.reading import read_summary
from runner.checkpoint import find
from runner.config.composition import Composition
from runner.distributed.world import joined, started_by_launcher, world
from runner.engine.errors import Preempted
from runner.run.describe import dry_run
from runner.run.ranks import check_one_process, checkpoint_of_rank, count_ranks, device_of_rank
from runner.run.run_directory import Job, RunDirectory
from runner.run.setup import decide, why_occupied
from runner.runtime.determinism import operations_named
from runner.runtime.signals import StopSignals
from runner.tracking.verb_report import ending_in_json
from runner.train import build_run, train
from runner.verbs._ranks import lead


def run(composition: Composition) -> tuple[RunDirectory, float | None]:
    """Run one job; returns its directory, which tells how it ended, and the best value of the monitored metric."""
    # A rank gets signals from its launcher and from the scheduler, so a second one must not end it
    led = started_by_launcher()
    directory, signals, value = RunDirectory(composition), StopSignals(led or composition.supervised), None
    try:
        with signals, operations_named(lambda text: directory.console.warn(text)):
            if mistake := why_occupied(composition):
                raise mistake
            # A job of a sweep has its directory first, so that whatever fails is recorded there
            directory.reserve()
            decide(directory)
            config = directory.config
            check_one_process(config)
            if config.max_time is not None:
                signals.limit(seconds(config.max_time), f"max_time={config.max_time}")
            # A dry run leaves nothing behind: it opens no directory and makes no cache
            if config.dry_run:
                build = functools.partial(build_run, make_cache=False, fresh=directory.found is None)
                dry_run(config, build, directory.console)
            # A run that has finished is not trained again
            elif directory.finished is not None:
                return directory, directory.leave()
            else:
                directory.open()
                size = count_ranks(config)  # refuses more than there can be
                alone = size == 1 and not led
                value = train(directory, signals, _pruning()) if alone else _lead(directory, signals, size)
        directory.summary["status"] = "pruned" if "pruned" in directory.summary else "finished"
    except (Exception, SystemExit) as error:
        directory.fail(error)
    finally:
        directory.close()
    return directory, value


def _lead(directory: RunDirectory, signals: StopSignals, size: int) -> float | None:
    """Train with other ranks: those that torchrun or SLURM started wait for the job, otherwise this process starts them."""
    config, job = directory.config, directory.job()
    if started_by_launcher():
        return lead(job, config, lambda: train(directory, signals, _pruning()))
    from runner.launch.ranks import run_ranks

    # The directory and its files are there before the ranks, which only continue them
    directory.begin()
    try:
        restarts, logs = config.max_restarts, directory.path / "logs"
        outcome = run_ranks(as_rank, job, size, logs, max_restarts=restarts, asked=lambda: signals.received)
    # Rank 0 wrote the summary in its own process
    finally:
        directory.summary |= read_summary(directory.path) or {}
    if outcome.status == PREEMPTED:
        newest = [path.name for path in find.step_files(directory.checkpoints)][:1] if outcome.unsaved else []
        saved = f"; the newest checkpoint is {newest[0]}" if newest else ""
        raise Preempted(outcome.sentence.removeprefix(Preempted.prefix) + saved)
    return outcome.value


def _pruning() -> list[Any]:
    """The callbacks of a run that is a trial of a search; none for any other run."""
    if "RUNNER_TRIAL" not in os.environ:
        return []
    from runner.sweeps.study import Pruning

    return [Pruning(world().decide)]


def as_rank(job: Job, store: Any = None) -> float | None:
    """Train as one of several ranks, from what rank 0 or the launcher decided."""
    signals, config, found = StopSignals(patient=True), job.config, checkpoint_of_rank(job)
    with contextlib.ExitStack() as ending:
        ending.enter_context(ending_in_json(config.json))  # of which rank 0 knows the record
        world = ending.enter_context(joined(config.dist.timeout_s, device_of_rank(config), store))
        ending.enter_context(signals)  # before, there is nothing to save, and a signal ends the process
        scratch = ending.enter_context(tempfile.TemporaryDirectory())
        directory = RunDirectory.of_rank(job, found, world.rank, Path(scratch))
        ending.callback(directory.write_summary, directory.summary)
        ending.callback(directory.console.stop)
        ending.enter_context(operations_named(lambda text: directory.console.warn(text)))
        if config.max_time is not None:
            signals.limit(seconds(config.max_time), f"max_time={config.max_time}")
        return train(directory, signals, _pruning())
