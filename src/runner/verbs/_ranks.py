"""Verbs on several processes, which the launcher of this machine, torchrun or SLURM starts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError

from runner.base.errors import FAILED, INTERRUPTED, OK, PREEMPTED, first_line
from runner.config.composition import Composition
from runner.config.keys import key_of
from runner.config.schema import VERBS as SCHEMAS
from runner.config.schema.train import Train
from runner.distributed import store
from runner.distributed.world import joined, started_by_launcher
from runner.run.from_checkpoint import resolve_checkpoint
from runner.run.ranks import count_ranks, device_of_rank
from runner.runtime.signals import StopSignals
from runner.verbs._table import VERBS, Verb, print_error

_REPORTED_S, _STAYS_S = 3.0, 5.0  # for other ranks to report a failure, before one that has failed ends


def lead(job: Any, config: Train, work: Callable[[], float | None]) -> float | None:
    """Do `work` as rank 0 of those that torchrun or SLURM started, while the others do the job, which has this config.

    Raises:
        RankFailed: if another rank failed first.
    """
    from runner.launch.ranks import RankFailed, first_failure, outcome_of, reported

    meeting = store.lead(job)
    try:
        with joined(config.dist.timeout_s, device_of_rank(config), meeting):
            return work()
    except Exception as error:
        # This rank may only have lost its partner: the first failure in the store is the cause
        if outcome_of(0, error).lost:
            deadline = time.monotonic() + _REPORTED_S
            with contextlib.suppress(RuntimeError):  # the store is gone
                while time.monotonic() < deadline:
                    first = first_failure(reported(meeting, store.size()).values())
                    if first is not None and not first.lost:
                        raise RankFailed(first) from error
                    time.sleep(0.1)
        raise


def follow(entry: Callable[[Any, Any], Any]) -> int:
    """On another rank, call `entry(job, store)` for every job of rank 0; returns the exit status."""
    from runner.launch.ranks import RankFailed, take_part

    status = OK
    try:
        for job, meeting in store.jobs():
            outcome = take_part(functools.partial(entry, job, meeting), meeting)
            status = outcome.status or status
            if outcome.failed and not outcome.lost:
                failed = RankFailed(outcome)
                print_error(f"{failed}{failed.hint}")
                # The launcher ends all ranks when this one ends, and rank 0 needs the time to report the error
                time.sleep(_STAYS_S)
                return status
    except DistNetworkError as error:  # of the store
        print_error(f"rank {store.rank()}: rank 0 or the launcher is gone: {first_line(error)}")
        return FAILED
    return status


def on_ranks(verb: Verb, run: Callable[[Composition], float | None], composition: Composition) -> float | None:
    """Run a job of a verb other than `train` on as many processes as the command line, torchrun or SLURM asks for.

    A checkpoint's own `devices` is how it was trained, and does not count.

    Raises:
        RankFailed: if a rank failed.
    """
    # The devices of the training are in the stored config, and say nothing about this job
    given, led = any(key_of(word) == "devices" for word in composition.overrides), started_by_launcher()
    if given and not verb.on_ranks and (devices := composition.values["devices"]) not in (1, "auto"):
        text = f"devices={devices}".replace(" ", "")
        print(f"warning: {text} has no effect on {verb.name}, which runs in one process", file=sys.stderr)
    # A verb runs in one process unless the command or a launcher asks for several
    if not (verb.on_ranks and (given or led)):
        return run(composition)
    resolved = resolve_checkpoint(composition, SCHEMAS[verb.name])
    config, size = resolved.config, 1 if led else count_ranks(resolved.config)
    # `best` and `last` could name another file by the time that another rank looks.
    composition = dataclasses.replace(composition, values=composition.values | {"ckpt_path": str(resolved.found.path)})
    job = verb.name, composition, config
    if led:
        return lead(job, config, functools.partial(run, composition))
    if size == 1:
        return run(composition)
    from runner.launch.ranks import run_ranks

    with tempfile.TemporaryDirectory() as logs, StopSignals() as signals:
        outcome = run_ranks(as_rank, job, size, Path(logs), asked=lambda: signals.received)
    if outcome.status == PREEMPTED:
        raise SystemExit(INTERRUPTED)
    return outcome.value


def as_rank(job: tuple[str, Composition, Train], meeting: Any = None) -> float | None:
    """Run a job that `on_ranks` made as one of several ranks, of which only rank 0 prints."""
    verb, composition, config = job
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(joined(config.dist.timeout_s, device_of_rank(config), meeting))
        if not world.first:
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        value: float | None = importlib.import_module(VERBS[verb].module).run(composition)
    return value
