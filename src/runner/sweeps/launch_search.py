"""A search: what is checked before its first trial, and its way through the storage, the ledger and the jobs."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config import overrides
from runner.config.composition import Composition
from runner.config.errors import FAILED, PREEMPTED, ConfigError, Problem, UserError
from runner.config.keys import OF_THE_SWEEP, at, key_of, within
from runner.config.sources import Sources
from runner.config.space import Range, ranges_of, text_of
from runner.config.truth import is_true
from runner.sweeps.executors import InPool, InProcess
from runner.sweeps.jobs import validate_jobs
from runner.sweeps.ledger import NAME, Plan, counted
from runner.sweeps.pool import Common, Pool, PoolBroken
from runner.sweeps.pool_launcher import PoolConfig, slots_for

_SAME = ("sampler", "pruner", "warmup", "reduction", "seeds", "objectives", "space")
"""Settings that make a study what it is; the others may change when it continues."""
_NO_RANGE = ("hydra", "name", "output_root", "ckpt_path", "resume", *OF_THE_SWEEP)


@dataclass(frozen=True)
class Command:
    """The command line of a search.

    Attributes:
        composition: its config.
        words: its overrides, without those about the sweep as a whole.
        schema: of the verb.
        sources: folders of configs.
        compose: the composition of a job with other overrides.
        also: finds problems in a composition.
        monitor: metric and direction that a run of a composition watches.
        run: runs a job of a composition; its `verb` is that of the command line.
        flags: see `Plan`.
        given: see `Plan`.
        verb: of the command line.
        primary: name of the primary config.
        launcher: name of the option of `hydra/launcher`.
        slots: the section `hydra.launcher` if that is `pool`; None for any other.
    """

    composition: Composition
    words: Sequence[str]
    schema: type
    sources: Sources
    compose: Callable[[list[str]], Composition]
    also: Callable[[Composition], list[Problem]]
    monitor: Callable[[Composition], tuple[str, str]]
    run: Any
    flags: Sequence[str] = ()
    given: Path | None = None
    verb: str = "train"
    primary: str = "train"
    launcher: str = "basic"
    slots: Any = None


def launch_search(command: Command, sweep_root: Callable[[Plan], Path]) -> tuple[Path, Callable[[], None]]:
    """Check a search, and open its folder; returns the folder, and what runs the trials that are left.

    Raises:
        ConfigError: with every problem of the search space, and of the values at its ends.
        UserError: for settings that do not fit together, or if Optuna is not installed.
    """
    settings = command.composition.values["search"]
    if command.verb != "train":
        raise UserError("sweep", f"is a search, which is for train, and this is {command.verb}", "another sweep")
    if command.launcher not in ("basic", "pool"):
        raise UserError(
            "hydra/launcher", f"is {command.launcher}, and a search starts its trials itself", "basic or pool"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        problem = "is a search, which runs in one process, and torchrun or srun started several"
        raise UserError("sweep", problem, "devices=N without torchrun, for trials of several processes")
    space = _checked_space(command)
    words = [word for word in command.words if key_of(word).replace("/", ".") not in space]
    if several := overrides.swept(words):
        allowed = f"search.{several[0]}={{choice: [...]}}, or search.seeds=[0,1,2] for several seeds of each trial"
        raise UserError(several[0], "has several values, and a search chooses values itself", allowed)
    if settings["pruner"] != "none" and len(settings["objectives"]) > 1:
        raise UserError("search.pruner", f"is {settings['pruner']}, and decides by one objective", "search.pruner=none")
    from runner.sweeps.search import (
        JOURNAL,
        StudySpec,
        check_storage,
    )  # which says what to install, before anything is written

    check_storage(settings["storage"])
    _check_ends(command, words, space)
    monitor = command.monitor(command.composition)
    goals = dict(settings["objectives"]) or dict([monitor])
    swept = [*space, *(["seed"] if settings["seeds"] else [])]

    def base() -> dict[str, Any]:
        return counted(command.compose(words).values) | {f"search.{key}": settings[key] for key in _SAME}

    detach = command.slots is not None and bool(command.slots.detach)
    values = command.composition.values
    folder = sweep_root(Plan(values, swept, None, base, command.flags, command.given, detach, searches=True))
    seed = command.composition.values["seed"]
    spec = StudySpec(
        storage=str(settings["storage"] or folder / JOURNAL),
        name=str(folder.absolute()) if settings["storage"] else "search",
        directions=list(goals.values()),
        seed=seed,
        parallel=command.slots is not None or (settings["jobs"] or 1) > 1,
        evaluations=_evaluations(command.composition.values),
        **{key: settings[key] for key in ("sampler", "pruner", "warmup", "reduction")},
    )

    def run() -> None:
        from runner.sweeps.trials import Search, SearchPlan

        plan = SearchPlan(
            settings=settings,
            space=space,
            goals=goals,
            monitored=goals == dict([monitor]),
            words=words,
            swept=swept,
            fail_fast=is_true(command.composition.values["fail_fast"]),
            flags=command.flags,
            groups=command.sources.groups(),
        )
        search = Search(folder, spec, plan, command.compose, lambda text: print(text, flush=True))
        if not spec.parallel:
            search.run(InProcess(command.run))
            return
        with _pool(command, folder, settings["jobs"]) as pool:
            try:
                search.run(InPool(pool, settings["jobs"]))
            except PoolBroken as error:
                print(f"error: {error}", flush=True)
                raise SystemExit(FAILED) from None
        if pool.asked:
            raise SystemExit(PREEMPTED)
        if search.unended:
            raise SystemExit(FAILED)

    return folder, run


def _pool(command: Command, folder: Path, jobs: int | None) -> Pool:
    """The processes for trials at the same time."""
    values = command.composition.values
    wanted = command.slots
    if wanted is None and jobs is not None:
        devices = len(slots_for(PoolConfig(per_device=1), values)[0])
        wanted = PoolConfig(per_device=-(-jobs // devices))
    slots, environment = slots_for(wanted, values)
    common = Common(
        folder=folder,
        verb=command.verb,
        primary=command.primary,
        sources=[str(each) for each in command.sources.extra],
        environment={**command.run.verb.environment, **environment},
    )
    return Pool(slots, common)


def _evaluations(values: dict[str, Any]) -> int | None:
    """The number of evaluations of a run, as far as the config tells it without the data."""
    epochs, every = values.get("epochs"), at(values, "evaluate.every_epochs")
    if at(values, "evaluate.every_steps") is None and isinstance(epochs, int) and isinstance(every, int):
        return max(1, epochs // every)
    return None


def _checked_space(command: Command) -> dict[str, Range]:
    """The search space, every key of which exists."""
    composition = command.composition
    given = composition.values["search"]["space"]
    if not given:
        example = "search.optimizer.lr={log: [1e-4, 1e-1]}"
        raise UserError("search", "names no key to vary", f"one or more such as '{example}'")
    space, problems = ranges_of(given)
    groups = command.sources.groups()
    for key, values in space.items():
        if within(key, _NO_RANGE):
            problems.append(Problem(f"search.{key}", "cannot vary in a search", "a key that trials may differ in"))
            continue
        if key in groups and values.kind != "choice":
            names = [option.name for option in command.sources.options(key)]
            problems.append(Problem(f"search.{key}", "is a group of options", f"{{choice: [{', '.join(names)}]}}"))
            continue
        for value in values.ends if key in groups else values.ends[:1]:
            word = f"{key}={value if str(value)[:1] in ('[', '{') else text_of(value)}"
            checked = overrides.check_overrides([word], command.schema, command.sources, False)
            unknown = [overrides.unknown_key(each, word, command.schema, groups, []) for each, _ in checked.unknown]
            for problem in [*checked.problems, *unknown]:
                close = problem.nearest
                problems.append(dataclasses.replace(problem, key=f"search.{key}", nearest=close, origin=""))
    for source in _listed(composition.values["search"]["warm_start"]):
        if not (Path(source) / NAME).is_file():
            problems.append(Problem("search.warm_start", f"{source} is no folder of a sweep", f"one that has {NAME}"))
    if problems:
        raise ConfigError(composition.with_origins(problems))
    return space


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _check_ends(command: Command, words: Sequence[str], space: dict[str, Range]) -> None:
    """Validate the values at the ends of each range, and each choice, with the first values of the others.

    Raises:
        ConfigError: with every problem.
    """

    def text(key: str, value: Any) -> str:
        return f"{key}={value if str(value)[:1] in ('[', '{') else text_of(value)}"

    first = {key: values.ends[0] for key, values in space.items()}
    groups = command.sources.groups()
    start = [*words, *(text(key, value) for key, value in first.items())]
    jobs, changed = [start], [("", None)]
    for key, values in space.items():
        for value in values.ends[1:]:
            jobs.append([*words, *(text(each, value if each == key else first[each]) for each in space)])
            changed.append((key, value))
    known: list[Composition] = []

    def problems_of(job: list[str]) -> list[Problem]:
        key, value = changed[jobs.index(job)]
        if not known or key in groups or key not in space or str(value)[:1] in ("[", "{"):
            composition = command.compose(job)
            known.append(composition)
        else:  # composing takes long
            composition = dataclasses.replace(known[0], values=copy.deepcopy(known[0].values))
            *path, last = key.split(".")
            section: Any = at(composition.values, ".".join(path)) if path else composition.values
            section[last] = value
        return [] if composition.values.get("ckpt_path") is not None else command.also(composition)

    try:
        validate_jobs(jobs, problems_of)
    except ConfigError as error:
        problems = [
            dataclasses.replace(each, key=f"search.{each.key}") if each.key in space else each
            for each in error.problems
        ]
        raise ConfigError(problems) from None
