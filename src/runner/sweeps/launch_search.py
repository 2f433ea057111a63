"""A search: what is checked before its first trial, and its way through the storage, the ledger and the jobs."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from runner.config import overrides
from runner.config.composition import Composition
from runner.config.errors import ConfigError, Problem, UserError
from runner.config.keys import OF_THE_SWEEP, at, key_of, within
from runner.config.space import Range, is_nested, ranges_of, word_of
from runner.sweeps.command import Command
from runner.sweeps.jobs import validate_jobs
from runner.sweeps.ledger import NAME, Plan, counted
from runner.sweeps.pool_launcher import PoolConfig, pool_of, problems_of

_SAME = ("sampler", "pruner", "warmup", "reduction", "seeds", "objectives", "space")
"""Settings that make a study what it is; the others may change when it continues."""
_NO_RANGE = ("hydra", "name", "output_root", "ckpt_path", "resume", *OF_THE_SWEEP)


def launch_search(command: Command, sweep_root: Callable[[Plan], Path]) -> tuple[Path, Callable[[], NoReturn]]:
    """Check a search, and open its folder; returns the folder, and what runs the trials that are left and exits.

    Raises:
        ConfigError: with every problem of the search space, and of the values at its ends.
        UserError: for settings that do not fit together, or if Optuna is not installed.
    """
    values, launcher = command.composition.values, command.chosen("hydra/launcher")
    settings = values["search"]
    if command.verb != "train":
        raise UserError("sweep", f"is a search, which is for train, and this is {command.verb}", "another sweep")
    if launcher not in ("basic", "pool"):
        raise UserError("hydra/launcher", f"is {launcher}, and a search starts its trials itself", "basic or pool")
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
    from runner.sweeps.study import JOURNAL, StudySpec, check_storage  # which says what to install before it is needed

    check_storage(settings["storage"])
    jobs = settings["jobs"]
    slots: Any = command.cfg.hydra.launcher if command.in_pool else None
    if slots is None and (jobs or 1) > 1:
        slots = PoolConfig(per_device=jobs)
        if wrong := problems_of(slots, values, command.verb, f"search.jobs={jobs}"):
            raise ConfigError(wrong)
    _check_ends(command, words, space)
    goals = dict(settings["objectives"]) or dict([command.monitor(command.composition)])
    swept = [*space, *(["seed"] if settings["seeds"] else [])]

    def base() -> dict[str, Any]:
        return counted(command.composed(words).values) | {f"search.{key}": settings[key] for key in _SAME}

    detach = command.in_pool and bool(slots.detach)
    folder = sweep_root(Plan(values, swept, None, base, command.flags_of_jobs, command.place, detach, searches=True))
    spec = StudySpec(
        storage=str(settings["storage"] or folder / JOURNAL),
        name=str(folder.absolute()) if settings["storage"] else "search",
        directions=list(goals.values()),
        seed=values["seed"],
        parallel=slots is not None,
        evaluations=_evaluations(values),
        **{key: settings[key] for key in ("sampler", "pruner", "warmup", "reduction")},
    )

    def run() -> NoReturn:
        from runner.sweeps.trials import Search

        search = Search(folder, spec, command, space, goals, words)
        if slots is None:
            raise SystemExit(search.run(None))
        sources = [str(each) for each in command.sources.extra]
        with pool_of(folder, command.task, slots, values, most=jobs, primary=command.primary, sources=sources) as pool:
            raise SystemExit(search.run(pool))

    return folder, run


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
            word = word_of(key, value)
            checked = overrides.check_overrides([word], command.schema, command.sources, False)
            unknown = [overrides.unknown_key(each, word, command.schema, groups, []) for each, _ in checked.unknown]
            for problem in [*checked.problems, *unknown]:
                close = problem.nearest
                problems.append(dataclasses.replace(problem, key=f"search.{key}", nearest=close, origin=""))
    listed = composition.values["search"]["warm_start"] or []
    for source in [listed] if isinstance(listed, str) else listed:
        if not (Path(source) / NAME).is_file():
            problems.append(Problem("search.warm_start", f"{source} is not a sweep's folder", f"one that has {NAME}"))
    if problems:
        raise ConfigError(composition.with_origins(problems))
    return space


def _check_ends(command: Command, words: Sequence[str], space: dict[str, Range]) -> None:
    """Validate the values at the ends of each range, and each choice, with the first values of the others.

    Raises:
        ConfigError: with every problem.
    """
    first = {key: values.ends[0] for key, values in space.items()}
    groups = command.sources.groups()
    changed = [{}, *({key: value} for key, values in space.items() for value in values.ends[1:])]
    jobs = [[*words, *(word_of(*each) for each in (first | other).items())] for other in changed]
    known: list[Composition] = []

    def problems_of(job: list[str], imports: bool) -> list[Problem]:
        other = changed[jobs.index(job)]
        if not known or any(key in groups or is_nested(value) for key, value in other.items()):
            known.append(composition := command.composed(job))
        else:  # composing takes long
            composition = dataclasses.replace(known[0], values=copy.deepcopy(known[0].values))
            for key, value in other.items():
                path, _, last = key.rpartition(".")
                section: Any = at(composition.values, path) if path else composition.values
                section[last] = value
        return [] if composition.values.get("ckpt_path") is not None else command.also(composition, imports)

    try:
        validate_jobs(jobs, problems_of)
    except ConfigError as error:
        problems = [
            dataclasses.replace(each, key=f"search.{each.key}") if each.key in space else each
            for each in error.problems
        ]
        raise ConfigError(problems) from None
