"""`train` with several jobs: the plan, the launcher, the folder, and the table at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_class

from runner.base.errors import PREEMPTED, ConfigError, Problem, UserError
from runner.base.reading import read_json
from runner.config.app import REPLACED
from runner.config.composition import Composition
from runner.config.keys import walk, within
from runner.config.load import problems_without_imports
from runner.config.output_folders import holds_run
from runner.launch.jobs import Launcher
from runner.launch.local import Local
from runner.sweeps.plan import Plan, plan_of, problems_of_all
from runner.sweeps.rows import rows_in
from runner.sweeps.run import Jobs, Sweep, opened_folder
from runner.sweeps.table import print_best, print_table, summarise
from runner.tracking.console import Console
from runner.tracking.verb_report import ending_in_json
from runner.verbs._table import Verb, print_error

_PRELOADED = "runner.verbs._preloaded"
_SLOW = {"torchvision": "torchvision", "timm": "timm", "torchmetrics": "torchmetrics.classification"}
"""Packages that take seconds to import, by what is in the `_target_` of components that need them, and their modules."""


def run_sweep(verb: Verb, command: Composition, run_job: Callable[[str, Composition], None]) -> int:
    """Run the jobs that are left of a sweep or a search; returns the exit status.

    Raises `ConfigError` with every problem before the first job, `UserError` for what makes a sweep impossible.
    """
    with ending_in_json(command.values["json"]) as record:
        return _run(verb, command, run_job, record)


def _run(verb: Verb, command: Composition, run_job: Callable[[str, Composition], None], record: dict[str, Any]) -> int:
    _check(command)
    values, launcher = command.values, functools.cache(lambda: _launcher(command))

    def validate(compositions: Sequence[Composition]) -> list[list[Problem]]:
        """In a process that has torch, where jobs are forked from one: this process need not import it."""
        call, local = functools.partial(problems_of_all, compositions), launcher()
        return local.call(call) if isinstance(local, Local) else call()

    # A search chooses its jobs itself while it runs; a plain sweep knows all of them now
    search: Any = None
    if values["search"]["sampler"] is not None:
        from runner.sweeps.search import Search  # needs Optuna, and says what to install

        search = Search(command, launcher, validate)
    plan: Plan = search.plan if search else plan_of(command, validate)
    place = Path(str(values["output_root"])) / verb.sweeps.format(name=values["name"])
    console = Console(None)
    with opened_folder(place, plan) as folder:
        sweep = Sweep(folder, plan, functools.partial(run_job, verb.name), console)
        # Whatever ends the jobs early, the table of those that ended is written and shown
        sweep.begin()
        try:
            if search:
                search.run(sweep, launcher())
            else:
                sweep.run(Jobs(sweep.plan.jobs or ()), launcher())
        except KeyboardInterrupt:  # before the launcher listened to signals, or after
            sweep.status = PREEMPTED
        except UserError as error:  # such as a full disk
            print_error(str(error))
            sweep.status = error.exit_code
        status = sweep.status
        # A full disk must not hide the table, which is shown without being stored
        try:
            rows = summarise(folder)
        except UserError as error:
            print_error(str(error))
            status, rows = max(status, error.exit_code), rows_in(folder)
        failed = print_table(rows, console, len(plan.jobs or ()))
        print_best(folder, console)
        if status == PREEMPTED:
            print("stopped: the same command continues it")
        print(folder)
        record |= (read_json(folder / "sweep.json") or {}) | {"directory": str(folder)}
        return max(status, int(failed))


def _check(command: Composition) -> None:
    """Refuse what is wrong with a sweep as a whole."""
    wrong = [each for each in problems_without_imports(command) if within(each.key, ("sweep", "search"))]
    if (chosen := command.hydra["sweeper"][0]) != "basic":
        message = f"is {chosen}, and runner makes the jobs of a sweep itself"
        wrong.append(Problem("hydra/sweeper", message, "basic, or sweep=optuna for a search"))
    if wrong:
        raise ConfigError(wrong)
    if (place := command.place) is not None and holds_run(place):
        raise UserError("sweep.dir", f"cannot be {place}: it holds a run", "another folder")
    search = command.values["search"]
    if search["space"] and search["sampler"] is None:
        raise UserError("search", "has keys to vary, and this sweep is not a search", "sweep=optuna too")


def _launcher(command: Composition) -> Launcher:
    """The launcher that `hydra/launcher` names; one of this machine begins to import torch for its jobs."""
    jobs = command.values["search"]["jobs"]
    chosen, settings = command.hydra["launcher"]
    if chosen == "basic":
        own: dict[str, Any] = {"per_device": jobs, "most": jobs or 1}
        kind: Any = Local
    else:
        own = dict(settings)
        kind = get_class(own.pop("_target_"))
    if not hasattr(kind, "survives"):
        problem = f"is {chosen}, a plugin of Hydra's, and runner starts its jobs itself"
        raise UserError("hydra/launcher", problem, "basic, pool, slurm or ray", REPLACED.get(chosen, ""))
    try:
        launcher: Launcher = kind(**own, values=command.values)
    except TypeError as error:
        raise UserError("hydra.launcher", str(error)) from error
    if isinstance(launcher, Local):
        # What not every job has to import then
        targets = " ".join(str(value) for key, value in walk(command.values) if key.endswith("_target_"))
        launcher.prepare([_PRELOADED, *(module for name, module in _SLOW.items() if name in targets)])
    return launcher
