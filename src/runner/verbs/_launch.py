"""From the words after a verb to its jobs: help, tab completion, Hydra, and how errors are reported.

Imports nothing heavy until a verb runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import __version__
from runner.config import slurm
from runner.config.errors import OK, PREEMPTED, USAGE, UserError, called_exit, explain
from runner.config.secrets import mask_text, mask_words
from runner.config.signals import interruptible
from runner.verbs._errors import print_error
from runner.verbs._help import print_help
from runner.verbs._table import VERBS, Verb

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from runner.config.app import Composition
    from runner.config.errors import Problem
    from runner.sweeps.ledger import Plan


_FLAGS_THAT_SHOW = {"--cfg", "-c", "--info", "-i", "--hydra-help"}
_LAUNCHERS = {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}
"""Variables of torchrun and of srun."""


def launch_verb(verb: Verb, argv: Sequence[str]) -> int:
    """Run a verb: its help, one job, or several with `--multirun`; returns the exit status.

    Raises:
        UserError: for a mistake in the call.
    """
    asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
    if not verb.takes_config:
        main = importlib.import_module(verb.module).main
        if not asks_for_help:
            return int(main(argv))
        print(f"{verb.help}\n\n{cleandoc(main.__doc__ or '')}")
        return OK
    if asks_for_help:
        print_help(verb, argv)
        return OK
    with slurm.early_warnings():
        if not _LAUNCHERS.isdisjoint(os.environ):
            from runner.distributed.world import started_by_launcher

            if started_by_launcher():
                return _launch_rank(verb, argv)
        return _launch(verb, argv, slurm.restarted())


def _launch_rank(verb: Verb, argv: Sequence[str]) -> int:
    """Run a verb as one of the ranks that torchrun or SLURM started."""
    from runner.distributed import follow
    from runner.distributed.world import restarted
    from runner.launch.ranks import end_with_parent

    end_with_parent()
    if not verb.on_ranks:
        if follow.rank():
            return USAGE  # rank 0 says why
        problem = f"runs in one process, and torchrun or srun started {follow.size()}"
        raise UserError(verb.name, problem, f"python -m runner {verb.name} without torchrun and srun")
    words = mask_words([verb.name, *argv])
    if follow.rank():
        follow.compare(words)
        module = verb.module if verb.keeps_runs else "runner.verbs._ranks"
        return int(importlib.import_module(module).main_of_follower())
    try:
        follow.compare(words)
        return _launch(verb, argv, restarted())
    finally:
        follow.dismiss()


def _launch(verb: Verb, argv: Sequence[str], restarted: bool = False) -> int:
    """Run the jobs of a verb that takes a config; see `runner.sweeps.launch`."""
    from runner.config.resolve import problems_in, problems_without_imports
    from runner.config.schema import VERBS as SCHEMAS
    from runner.sweeps.launch import launch
    from runner.sweeps.ledger import Ledger
    from runner.sweeps.view import headline_of
    from runner.tracking import live

    schema, asked, job = SCHEMAS[verb.name], 0, job_of(verb.name)
    job.says_loading = sys.stderr.isatty() and _FLAGS_THAT_SHOW.isdisjoint(argv)
    opened, showing, continued = list[Path](), contextlib.ExitStack(), ""

    def also(composition: Composition, imports: bool) -> list[Problem]:
        problems = problems_without_imports(composition, schema)
        if problems or not imports:
            return problems
        job.say_loading()
        return problems_in(composition.values, composition, schema)[1]

    def announce(number: int, count: int, varied: str) -> None:
        nonlocal asked
        asked = count
        told = headline_of(Ledger(opened[-1]).read()) if verb.keeps_runs else ""
        live.heading = f"job {number} of {count}"
        print(f"{live.heading}: {mask_text(varied) or 'as all others'}{f'; {told}' if told else ''}", flush=True)

    def open_sweep(plan: Plan) -> Path:
        nonlocal continued
        opened.append(_open_sweep(verb, plan))
        named = plan.jobs is None and not plan.searches
        continued = f"the same command continues it{f', with sweep_dir={opened[-1]}' if named else ''}"
        continued = continued if plan.given is None else ""
        if verb.keeps_runs:
            showing.enter_context(_shown(opened[-1]))
        return opened[-1]

    live.heading = ""
    try:
        with showing, interruptible():
            status, sweep = launch(
                job,
                schema,
                verb.name,
                verb.expand_shorthand(argv),
                also=also,
                sweep_root=open_sweep,
                monitor=_monitor,
                restarted=restarted,
                announce=announce,
                keeps_runs=verb.keeps_runs,
            )
    except KeyboardInterrupt:  # between two jobs: a job that runs saves, and ends with status 75
        if not (verb.keeps_runs and opened and Ledger(opened[-1]).read().jobs):
            raise
        print("interrupted", file=sys.stderr)
        status, sweep = PREEMPTED, opened[-1]
    if sweep is None or status == USAGE or not sweep.is_dir() or not verb.keeps_runs:
        return status  # of a single run, or no job was started
    from runner.sweeps.table import print_best, print_table, summarise
    from runner.tracking.console import Console

    try:
        rows = summarise(sweep)
    except UserError as error:
        print_error(str(error))
        status, rows = max(status, error.exit_code), summarise(sweep, write=False)
    failed = print_table(rows, console := Console(None), asked)
    print_best(sweep, console)
    if status == PREEMPTED and continued:
        print(f"stopped: {continued}")
    print(sweep)
    return max(status, int(failed))


@contextlib.contextmanager
def _shown(sweep: Path) -> Iterator[None]:
    """Show what happens to jobs that run side by side."""
    from runner.sweeps.events import listening
    from runner.sweeps.follow import PoolDisplay
    from runner.tracking.console import Console

    display = PoolDisplay(sweep, Console(None))
    try:
        with listening(display.tell, display.period_s):
            yield
    finally:
        display.stop()


def _monitor(composition: Composition) -> tuple[str, str]:
    """The metric that runs of a composition watch, and whether the `min` or the `max` of it is best."""
    from runner.build.metrics import expected_monitor
    from runner.config.resolve import resolve_config
    from runner.config.schema import Train

    return expected_monitor(resolve_config(composition, Train))


def _open_sweep(verb: Verb, plan: Plan) -> Path:
    """The folder of a sweep: a new one, or that of the sweep to continue."""
    from runner.distributed import follow
    from runner.distributed.world import started_by_launcher
    from runner.sweeps import resume
    from runner.sweeps.detach import detached
    from runner.tracking.run_directory import claim, timestamp

    root = Path(str(plan.values["output_root"])) / verb.sweeps.format(name=plan.values["name"])

    def place() -> str:
        found = resume.to_continue(root, plan) if verb.keeps_runs else plan.given
        return str(found or claim(root, timestamp()))

    with resume.one_at_a_time(root, plan):
        folder = Path(follow.kept("sweep", place) if started_by_launcher() else place())
        if plan.detach:
            resume.refuse_held(folder)
            detached(folder, functools.partial(resume.begin, folder, plan))
        elif verb.keeps_runs:
            resume.begin(folder, plan)
    return folder


class Job:
    """What Hydra calls for each job of a verb. Launchers pickle it as the name of the verb, without torch."""

    def __init__(self, verb: Verb) -> None:
        self.verb, self.says_loading = verb, False
        # Hydra names its jobs after the last part of the module, and callbacks see the whole.
        self.__module__ = f"runner.verbs.{verb.name.replace('-', '_')}"
        self.__name__ = self.__qualname__ = "job"

    def __call__(self, cfg: DictConfig | Composition) -> float | None:
        """Run one job; returns the value that sweepers optimise.

        Raises:
            SystemExit: with the exit status if it failed.
        """
        self.say_loading()
        for name, value in self.verb.environment.items():
            os.environ.setdefault(name, value)
        if not self.verb.keeps_runs:
            return self._run(cfg)
        from runner.sweeps.resume import run_or_skip

        if "SUBMITIT_EXECUTOR" not in os.environ or _LAUNCHERS.isdisjoint(os.environ):
            return run_or_skip(cfg, self._run)
        from runner.distributed import follow
        from runner.distributed.world import started_by_launcher

        if not started_by_launcher():
            return run_or_skip(cfg, self._run)
        if follow.rank():  # one of the tasks that submitit started for the job
            importlib.import_module(self.verb.module).main_of_follower()
            return None
        try:
            return run_or_skip(cfg, self._run)
        finally:
            follow.dismiss()

    def _run(self, cfg: Any) -> float | None:
        run: Callable[[Any], float | None] = importlib.import_module(self.verb.module).run
        _freeze_imports()
        gc.enable()
        if self.verb.keeps_runs:
            return run(cfg)
        from runner.config.app import current
        from runner.verbs._ranks import on_ranks

        return _report_errors(functools.partial(on_ranks, self.verb, run), current(cfg))

    def say_loading(self) -> None:
        """Say once that torch is imported, which takes seconds."""
        if self.says_loading:
            # Standard output may be a pipe, and its last line is the run directory.
            print(f"runner {__version__}: {self.verb.name}, loading torch ...", file=sys.stderr, flush=True)
            self.says_loading = False

    def __reduce__(self) -> tuple[Callable[[str], Job], tuple[str]]:
        return job_of, (self.verb.name,)


@functools.cache
def _freeze_imports() -> None:
    """Once a process: no collection during a run looks at what was imported. Asking `gc` whether it is done takes 50 ms."""
    gc.freeze()


@functools.cache
def job_of(verb: str) -> Job:
    """The job of a verb."""
    return Job(VERBS[verb])


def _report_errors(run: Callable[[Composition], float | None], composition: Composition) -> float | None:
    """Call `run`; an error becomes an exit status and a sentence, or a traceback if it is unexpected."""
    from runner.runtime.determinism import operations_named

    try:
        with operations_named(lambda text: print(f"warning: {text}", file=sys.stderr)):
            return run(composition)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not called_exit(error):
            raise
        if isinstance(error, UserError) and os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        status, _, text = explain(error)
        print_error(text)
        raise SystemExit(status) from None


def complete_verb(verb: Verb, argv: Sequence[str]) -> int:
    """Answer a query of tab completion; returns the exit status."""
    from runner.config.app import complete

    return complete(job_of(verb.name), verb.name, argv)
