"""From the words after a verb to its jobs: help, one job or a sweep, and how the errors of a job are reported.

Imports nothing heavy until a verb runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import __version__
from runner.base import slurm
from runner.base.errors import OK, USAGE, ConfigError, UserError, explain
from runner.base.files import make_folder
from runner.base.secrets import mask_words
from runner.base.signals import interruptible
from runner.verbs._table import VERBS, Verb, print_error, sources_and_words

if TYPE_CHECKING:
    from runner.config.composition import Composition

_FLAGS_THAT_SHOW = {"--cfg", "-c", "--info", "-i", "--hydra-help"}
_LAUNCHERS = {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}
"""Variables of torchrun and of srun."""


def launch_verb(verb: Verb, argv: Sequence[str]) -> int:
    """Run a verb: its help, one job, or several with `--multirun`; returns the exit status.

    Raises:
        UserError: for a mistake in the call.
        SystemExit: with the exit status of a single job that failed.
    """
    asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
    # Verbs without a config parse their words themselves, and start without Hydra
    if not verb.takes_config:
        main = pkgutil.resolve_name(verb.module)
        if not asks_for_help:
            return int(main([verb.aliases.get(word, word) for word in argv]))
        print(f"{verb.help}\n\n{cleandoc(main.__doc__ or '')}")
        return OK
    if asks_for_help:
        print_help(verb, argv)
        return OK
    with slurm.early_warnings(), contextlib.ExitStack() as ending:
        in_ranks = False
        # torch is imported only if variables suggest that a launcher started this process
        if not _LAUNCHERS.isdisjoint(os.environ):
            from runner.distributed.world import started_by_launcher

            in_ranks = started_by_launcher()
        if in_ranks and (status := _meet_ranks(verb, argv, ending)) is not None:
            return status
        from runner.config.load import opened, problems_without_imports

        ending.enter_context(interruptible())
        command = ending.enter_context(opened(verb.name, verb.expand_shorthand(argv)))
        if command is None:
            return OK
        try:
            if command.is_sweep:
                return _run_jobs(verb, command, in_ranks)
            # Keys of sweeps would have no effect on a single run, and are probably a forgotten --multirun
            command.refuse_keys_of_sweeps("applies to a sweep, and this is a single run", "--multirun, or no such key")
            # Checks without imports take milliseconds, so a wrong key or value is reported before torch is loaded
            if problems := problems_without_imports(command):
                raise ConfigError(problems)
            # Standard output may be a pipe, and its last line is the run directory
            if sys.stderr.isatty() and _FLAGS_THAT_SHOW.isdisjoint(argv):
                print(f"runner {__version__}: {verb.name}, loading torch ...", file=sys.stderr, flush=True)
            run_job(verb.name, command)
            return OK
        finally:
            if slurm.warned(command.values):  # nothing that failed prevents that
                slurm.requeue()


def _meet_ranks(verb: Verb, argv: Sequence[str], ending: contextlib.ExitStack) -> int | None:
    """Meet the other ranks that torchrun or SLURM started; returns the exit status, or None on rank 0, which leads them."""
    from runner.distributed import store
    from runner.launch.processes import end_with_parent

    end_with_parent()
    if not verb.on_ranks:
        if store.rank():
            return USAGE  # rank 0 says why
        problem = f"runs in one process, and torchrun or srun started {store.size()}"
        raise UserError(verb.name, problem, f"python -m runner {verb.name} without torchrun and srun")
    if not store.rank():
        ending.callback(store.dismiss)  # they wait for jobs, and are released even if this rank fails
    # Ranks with different commands would train different things, so they compare their words first
    store.compare(mask_words([verb.name, *argv]))
    if not store.rank():
        return None
    from runner.verbs import _ranks

    return _ranks.follow(importlib.import_module(verb.module).as_rank if verb.keeps_runs else _ranks.as_rank)


def run_job(name: str, composition: Composition) -> None:
    """Run one job of a verb in this process; an error becomes a sentence, or a traceback if it is unexpected.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    verb = VERBS[name]
    # Variables of libraries have to be set before these are imported
    for variable, value in verb.environment.items():
        os.environ.setdefault(variable, value)
    run: Callable[[Composition], Any] = importlib.import_module(verb.module).run
    if not gc.get_freeze_count():  # a second job in this process must not keep the garbage of the first
        gc.freeze()  # no collection during a run looks at what was imported
    gc.enable()
    if verb.keeps_runs:
        from runner.tracking.verb_report import ending_in_json

        with ending_in_json(not composition.supervised and composition.values["json"]) as record:
            directory, _ = run(composition)
            record |= directory.record()
            directory.finish()
        return
    from runner.runtime.determinism import operations_named
    from runner.verbs._ranks import on_ranks

    try:
        with operations_named(lambda text: print(f"warning: {text}", file=sys.stderr)):
            on_ranks(verb, run, composition)
    except Exception as error:
        if isinstance(error, UserError) and os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        status, _, text = explain(error)
        print_error(text)
        raise SystemExit(status) from None


def exit_status(stop: SystemExit) -> int:
    """The exit status of a process that this ends."""
    return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _run_jobs(verb: Verb, command: Composition, in_ranks: bool) -> int:
    """Run the jobs of a sweep: those that train as a ledger says, others one after the other; returns the highest exit status."""
    if verb.keeps_runs:
        # A job of a sweep starts its own ranks, which cannot be started inside ranks
        if in_ranks:
            problem = "starts a process for each job, and torchrun or srun started several"
            allowed = "devices=N without torchrun, or hydra/launcher=slurm for jobs on several nodes"
            raise UserError("--multirun", problem, allowed)
        from runner.verbs._sweep import run_sweep

        return run_sweep(verb, command, run_job)
    from runner.run.directory import claim
    from runner.sweeps.plan import plan_of

    # Without a ledger, such a sweep is a loop: nothing is skipped or repeated
    command.refuse_keys_of_sweeps("is about jobs that train, and this verb keeps no ledger", "no such key")
    plan, values = plan_of(command), command.values
    root = Path(str(values["output_root"])) / verb.sweeps.format(name=values["name"])
    folder, status = command.place or claim(root), OK
    for job in plan.jobs or ():
        print(f"job {job.number + 1} of {len(plan.jobs or ())}: {job.varied or 'as all others'}", flush=True)
        directory = folder / str(job.number)
        make_folder(directory)
        try:
            run_job(verb.name, dataclasses.replace(job.composition, job_dir=directory, run_dir=None))
        except SystemExit as stop:
            status = max(status, exit_status(stop))
        with contextlib.suppress(OSError):  # it holds what the job wrote
            directory.rmdir()
    print(folder)
    return status


def print_help(verb: Verb, argv: Sequence[str]) -> None:
    """Print what a verb does, the groups and their options, and the keys with their comments."""
    sources, _ = sources_and_words(verb.name, argv, other_flags=True)
    print(f"{verb.help}\n\n  python -m runner {verb.name} [key=value ...] [group=option ...] [flags]\n")
    print("groups (python -m runner list explains the options)")
    for group in sources.groups():
        print(f"  {group:<16} {', '.join(option.name for option in sources.options(group))}")
    print("\nkeys (python -m runner show data=digits, and so on, for those of an option)")
    for name in dict.fromkeys([verb.name, "train"]):
        path = sources.primary(name)
        assert path is not None, f"the primary config {name} is shipped"
        body = path.read_text(encoding="utf-8").split("\n\n", 1)[1]
        print(*(f"  {line}".rstrip() for line in body.split("\nhydra:")[0].rstrip().splitlines()), sep="\n")
    print(_FLAGS)


_FLAGS = """
flags
  --multirun, -m        run every combination of key=a,b values
  --cfg job             print the config and stop; with --resolve, interpolations resolved
  --info                print what Hydra searched and found
  --config-dir DIR      also search your own config folder
  --config-name NAME    start from another primary config
  --hydra-help          all flags of Hydra"""
