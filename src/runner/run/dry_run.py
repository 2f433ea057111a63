"""A dry run: everything is built, one step is tried on this device, and nothing is written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from runner.config.frozen import with_changes
from runner.config.schema.train import Train
from runner.distributed.world import rows
from runner.run.batch_size import explaining_memory
from runner.run.describe import describe
from runner.run.finetune import explaining
from runner.run.ranks import count_ranks
from runner.run.run import Run, validate_limits
from runner.runtime.memory import peak_memory, readable, reset_peak_memory
from runner.tracking.console import Console

_ALONE = {"devices": 1, "strategy": "auto", "sync_batchnorm": False}  # how one process tries the step of a rank


def dry_run(config: Train, build: Callable[[Train], Run], console: Console) -> None:
    """Print what is built from `config`, and the peak memory of an optimizer step with the samples of one rank.

    Raises:
        UserError: if the config cannot be run.
    """
    ranks = count_ranks(config)
    run = build(with_changes(config, _ALONE) if ranks > 1 else config)
    with contextlib.closing(run.data):
        console.header(f"{config.name}  seed {config.seed}  a dry run", describe(run.config, run))
        for warning in (*run.warnings, *validate_limits(run)):
            console.warn(warning)
        # The first rank has the most samples, and training everything takes the most memory
        samples, last = rows(run.plan.size(0), 0, ranks).stop, config.accumulate - 1
        of_rank = f", of one of {ranks} ranks" * (ranks > 1)
        problem = f"a step with batches of {samples}{of_rank} fails: "
        failed = explaining("data.batch_size", problem, "a larger data.batch_size, or fewer devices")
        short = explaining_memory("data.batch_size", samples, "a smaller data.batch_size with a larger accumulate")
        reset_peak_memory(run.device)
        with run.state.freezing.as_at(None), failed, short:
            batch = run.data.example_batch(samples)
            for number in range(last + 1):
                run.step(batch, 1 / (last + 1), samples, update=number == last)
    peak = peak_memory(run.device)
    console.line(f"a step with batches of {samples}{of_rank}: {readable(peak.bytes)} ({peak.what})")
