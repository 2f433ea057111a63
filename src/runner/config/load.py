"""From the words after a verb to the validated config, in the order in which it happens.

`opened` reads Hydra's grammar and composes the first job; `problems_in` is the one validation: types and ranges, rules between
keys, components, and where each mistake came from. Only components need torch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.base import slurm
from runner.base.errors import ConfigError, Problem, UserError, nearest
from runner.config import keys, overrides
from runner.config.app import REFUSALS, application, as_problem, merged_once, show
from runner.config.composition import Composition
from runner.config.data_path import written_out
from runner.config.keys import key_of, says, to_plain, with_changes, within
from runner.config.output_folders import in_sweep, not_folders
from runner.config.overrides import CheckedOverrides, check_overrides, parse_flags
from runner.config.rules import conflicts
from runner.config.schema import VERBS
from runner.config.schema.sections import Normalize
from runner.config.schema.train import Train
from runner.config.sources import Sources, searchpath_folder, text_of
from runner.config.space import with_space
from runner.config.targets import FACTS, bind, preferred_data, targets_in
from runner.config.validate import nodes, typed

T = TypeVar("T", bound=Train)

PREPARATION = ("image_size", "normalize")
"""Keys of `data` that trained weights of a model can ask for."""
_WITH_DATA = ("task", "model", "transform")  # groups that `data=PATH` may select too
_IMAGENET = [0.485, 0.456, 0.406]  # mean of each channel


@contextlib.contextmanager
def opened(verb: str, argv: Sequence[str], imports: bool = False) -> Iterator[Composition | None]:
    """Parse, check and compose a command line, see `compose`, with Hydra set up to compose further jobs.

    Yields None once Hydra has shown what the command line asks it to show. With `imports`, which is for Python, no preset makes
    several values a sweep.

    Raises:
        ConfigError: with every problem found in the overrides and the composition.
        UserError: for a flag that Hydra does not have, or one that is refused.
    """
    schema = VERBS[verb]
    flags = parse_flags(argv, [*keys.all_keys(schema), *Sources().groups()])
    shows = bool(flags.cfg or flags.info or flags.hydra_help)
    if flags.resolve and not shows:
        raise UserError("--resolve is for what --cfg shows; a run resolves its config anyway")
    sources = sources_of(flags)
    # A file of the user with the name of a shipped one would silently have no effect
    for path in sources.hidden():
        print(f"warning: {path} is not read: a shipped file takes precedence; rename it", file=sys.stderr)
    several = flags.multirun or (not imports and _asks_for_sweep(flags.overrides, sources))
    checked = check_overrides(flags.overrides, schema, sources, several)
    named = {"--config-dir": flags.config_dir, "--config-name": flags.config_name}
    command = Composition(
        schema,
        primary=(flags.config_name or verb).removesuffix(".yaml"),
        sources=sources,
        flags=[f"{flag}={value}" for flag, value in named.items() if value],
        is_sweep=bool(flags.multirun),
    )
    # Jobs of a sweep differ in a few words, so what they share is merged once
    with application(verb, sources), merged_once() if several else contextlib.nullcontext():
        if not shows:
            yield compose(command, checked, imports)
            return
        # Flags that only show something go to Hydra, once the overrides are known to be right
        if checked.problems:
            raise ConfigError(checked.explained())
        show(flags, command.primary, written_out(checked.accepted, sources)[0])
        yield None


def sources_of(flags: argparse.Namespace) -> Sources:
    """The folders of configs that a command line names."""
    folders = [Path(flags.config_dir)] if flags.config_dir else []
    for word in flags.overrides:
        if word.lstrip("+").startswith("hydra.searchpath="):
            entries = yaml.safe_load(word.split("=", 1)[1])
            folders += [path for entry in entries or [] if (path := searchpath_folder(str(entry)))]
    return Sources(folders)


def _asks_for_sweep(words: Sequence[str], sources: Sources) -> bool:
    """Tell whether a mode of Hydra or a selected preset turns a plain call into a sweep."""
    plain = [word.replace(" ", "") for word in words]
    presets = [word.split("=", 1)[1] for word in words if word.lstrip("+").startswith("sweep=")]
    options = [option for name in presets if (option := sources.option("sweep", name)) is not None]
    sweeps = "hydra.mode=MULTIRUN" in plain or any("MULTIRUN" in text_of(option.path) for option in options)
    return sweeps and "hydra.mode=RUN" not in plain


def compose(command: Composition, checked: CheckedOverrides, imports: bool = False) -> Composition:
    """Compose the first job of a command inside `application`, before folders are made, callbacks run and loggers are built.

    With `imports`, mistakes are reported together with those of components, for which torch is imported.

    Raises:
        ConfigError: with every problem found.
    """
    if command.sources.primary(command.primary) is None:
        names = sorted(path.stem for folder in command.sources.folders for path in folder.glob("*.yaml"))
        message, close = f"there is no config '{command.primary}'", nearest(command.primary, names)
        raise ConfigError([Problem("--config-name", message, ", ".join(names), close)])
    # A sweep is checked by its first job before a folder is made.
    words, names = overrides.first_of_sweeps(checked.accepted), list(keys.flatten(command.values))
    job = dataclasses.replace(command, accepted=checked.accepted, values={}, group_choices={})
    # Problems are collected, so that one start shows all of them
    failure = list[Problem]()
    try:
        words, found = written_out(words, command.sources)
        # The composition of Hydra itself: what it refuses becomes a problem in the words of this program
        deleted = [word[1:] for word in words if word.startswith("~") and "." in word and "=" not in word]
        # A checkpoint may have these keys, or may have had them
        added = [f"++{key}=0" for key in deleted] if "ckpt_path" in map(key_of, words) else []
        app: Any = GlobalHydra.instance().hydra
        cfg: DictConfig = app.compose_config(command.primary, [*added, *words], RunMode.RUN)
        names = [key for key in keys.flatten(OmegaConf.to_container(cfg, resolve=False)) if key[:6] != "hydra."]
        choices = {str(group): str(name) for group, name in cfg.hydra.runtime.choices.items() if name}
        is_sweep = command.is_sweep or str(cfg.hydra.mode or "").endswith("MULTIRUN")
        job = dataclasses.replace(
            job,
            overrides=[word.lstrip("+") for word in words if not keys.is_of_hydra(word)],
            group_choices={group: name for group, name in choices.items() if "hydra/" not in group},
            is_sweep=is_sweep,
            run_dir=Path(cfg.hydra.run.dir) if cfg.hydra.run.dir != "." else None,
            data_found=found and " ".join([found, *(f"{each}={choices.get(each, 'null')}" for each in _WITH_DATA)]),
        )
        job = dataclasses.replace(job, values=_plain(cfg))
        if is_sweep and not command.hydra:  # a single run has no use for them, and jobs have those of their command
            parts = {kind: OmegaConf.to_container(cfg.hydra[kind], resolve=True) for kind in ("launcher", "sweeper")}
            job = dataclasses.replace(job, hydra={kind: (choices[f"hydra/{kind}"], parts[kind]) for kind in parts})
    except UserError as error:
        failure = list(error.problems)
    except REFUSALS as error:
        failure = [as_problem(error, names)]
        if job.group_choices:  # it is composed, and a value of it cannot be resolved
            failure = job.with_origins(failure)
    # Only now, as the nearest key may be one of a component that this config selects
    problems = [*checked.explained(names), *not_folders(checked.accepted)]
    if failure:
        raise ConfigError([*problems, *failure])
    # A run inside a sweep's folder that resumes is a job of it
    if job.run_dir is not None and in_sweep(job.run_dir) and job.resumes:
        job = dataclasses.replace(job, job_dir=job.run_dir)
    # Words without effect are probably mistakes, so they are refused too
    problems += overrides.without_effect(checked.accepted)
    if problems:
        others = problems_in(job.values, job, job.schema)[1] if imports else problems_without_imports(job)
        raise ConfigError([*problems, *others])
    return job


def compose_job(command: Composition, words: Sequence[str]) -> Composition:
    """Another job of a command, from overrides that are known to be right; see `compose`."""
    return compose(command, CheckedOverrides([*words]))


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """A config without `hydra` as plain containers, interpolations resolved."""
    plain = dict[str, Any]()
    for name in (str(name) for name in cfg if name != "hydra"):
        value = "???" if OmegaConf.is_missing(cfg, name) else cfg[name]
        plain[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    if isinstance(plain.get("search"), dict):
        plain["search"] = with_space(plain["search"])
    return plain


def problems_in(
    values: dict[str, Any],
    composition: Composition,
    schema: type[T],
    *,
    where: str = "",
    builds: Sequence[str] | None = None,
    imports: bool = True,
) -> tuple[T | None, list[Problem]]:
    """Validate plain values: types, ranges, rules between keys, and the signature of every component that is built.

    Args:
        composition: the command line, for the origins of problems.
        where: path of the checkpoint that the values come from, if they do.
        builds: the sections of components that are built; None means all.
        imports: False skips what imports components, and with them torch, which takes seconds.

    Returns:
        The config, or None where a value has the wrong type, and the problems. A number under `lr` is moved to `optimizer.lr`.
    """
    config, problems = typed(schema, values)
    if config is not None:
        words = composition.overrides
        problems += [*conflicts(config), *two_rates(values, words), *two_lengths(values, words, where)]
        # `lr` is short for `optimizer.lr`, and from here on only the long form exists
        if isinstance(config.lr, float):
            config = with_changes(config, {"optimizer.lr": config.lr, "lr": None})
    # Each component is compared with the signature of what it names, before anything is built
    for key, node in nodes(schema, values) if imports else ():
        if (builds is None or within(key, builds)) and isinstance(node, dict) and isinstance(node.get("_target_"), str):
            section = key if key in FACTS else key.split(".")[0]
            problems += bind(key, node, FACTS.get(section, ()), int(section == "optimizer"))
    problems = [
        _of_an_option(problem, composition)
        for problem in problems
        # Options set arguments to null by default: such a null is left over after a change of _target_, and means nothing
        if not (problem.kind == "argument" and keys.at(values, problem.key) is None)
        or says(problem.key, composition.overrides)
    ]
    if imports and config is not None and not (problems or where or may_resume(composition)):
        problems = statistics_of_others(config, composition)
    return config, composition.with_origins(problems, where)


def problems_without_imports(composition: Composition) -> list[Problem]:
    """The problems of a command line that are known before torch is imported.

    Where a checkpoint has the last say on the config, these are the values on the command line of a wrong type.
    """
    config, problems = problems_in(composition.values, composition, composition.schema, imports=False)
    if not may_resume(composition):
        return problems
    given = set(map(key_of, composition.overrides))
    return [problem for problem in problems if config is None and problem.key in given]


def may_resume(composition: Composition) -> bool:
    """Tell whether a checkpoint may have the last say on the config."""
    return composition.values.get("ckpt_path") is not None or composition.resumes or slurm.restarted()


def two_rates(values: dict[str, Any], words: Sequence[str]) -> list[Problem]:
    """A problem if the command line gives both `lr` and `optimizer.lr`."""
    named = {key_of(word): word.partition("=")[2] for word in words}
    if values.get("lr") is None or named.get("lr", "null") == "null" or "optimizer.lr" not in named:
        return []
    return [Problem("lr", f"is {named['lr']}, and optimizer.lr is given too", "one of them")]


def two_lengths(values: dict[str, Any], words: Sequence[str], where: str) -> list[Problem]:
    """A problem if the command line gives a length beside `budget`; that of a file from `where` has had its effect."""
    if values.get("budget") is None or (where and not says("budget", words)):
        return []
    given = [key for key in ("epochs", "max_steps") if values.get(key) is not None and says(key, words)]
    problem = "and budget determines the number of steps"
    return [Problem(key, f"is {values[key]}, {problem}", "one of them") for key in given]


def statistics_of_others(config: Train, composition: Composition) -> list[Problem]:
    """A problem if images would be normalised with the numbers that a file gives for other data than those that are read."""
    data, origin = config.data, composition.origin("data.normalize.mean")
    mean, composed = data.normalize.mean, keys.at(composition.values, "data.normalize.mean")
    # ImageNet's numbers are for photographs of any data set
    of_any = mean in (None, _IMAGENET) or mean != composed or data.images == []
    if of_any or not origin or says("data.normalize", composition.overrides):
        return []
    file, read = Path(origin.rpartition(":")[0]), {target for _, target in targets_in(data.dataset)}
    given = targets_in(yaml.safe_load(text_of(file)))
    own = {target for key, target in given if key in ("dataset", "data.dataset")}
    # Another class around the same data has the same numbers, and those of trained weights replace them
    if not own or own & read or with_preferred_data(config, composition.overrides).data.normalize != data.normalize:
        return []
    problem = f"has the numbers of {file.parent.name}={file.stem}, and '{data.dataset['_target_']}' reads other data"
    allowed = "data=own, or data.normalize.mean and data.normalize.std of these data"
    return [Problem("data.normalize", problem, allowed, origin=origin)]


def _of_an_option(problem: Problem, composition: Composition) -> Problem:
    """Say what to do about a key that an option brings or should bring.

    A new `_target_` may not take the arguments of the option, and keys of a callback or logger need its option.
    """
    section = problem.key.rpartition(".")[0]
    # A key that belonged to the option is a leftover once another class was put into it
    if problem.kind == "argument" and says(f"{section}._target_", composition.overrides):
        if says(problem.key, composition.overrides):
            return problem
        chosen = composition.group_choices.get(section)
        owner = f"{section}={chosen}" if chosen else f"the former {section}._target_"
        allowed = f"~{problem.key} too, as it is an argument of {owner}"
        return dataclasses.replace(problem, allowed=allowed, nearest="")
    group, _, name = problem.key.partition(".")
    is_node = group in ("callbacks", "logger") and "names nothing to build" in problem.message
    if not is_node or composition.sources.option(group, name) is None:
        return problem
    chosen = composition.group_choices.get(group, "none")
    several = name if chosen in ("none", "default") else f"'[{chosen},{name}]'"
    allowed = f"{group}={several}, or no key of {problem.key}"
    return dataclasses.replace(problem, message=f"has keys, but {group}={name} is not selected", allowed=allowed)


def resolve_config(composition: Composition, schema: type[T]) -> T:
    """The validated config of a command line. Raises `ConfigError` with every problem there is."""
    config, problems = problems_in(composition.values, composition, schema)
    if problems or config is None:
        raise ConfigError(problems)
    return config if config.ckpt_path is not None else with_preferred_data(config, composition.overrides)


def with_preferred_data(config: T, words: Sequence[str]) -> T:
    """Prepare images as the trained weights of the model expect them, unless the command line says otherwise."""
    mean = config.data.normalize.mean
    wanted = preferred_data(config.model, grey=mean is not None and len(mean) == 1)
    if "normalize" in wanted:
        wanted["normalize"] = Normalize(**wanted["normalize"])
    chosen = [name for name in PREPARATION if name in wanted and not says(f"data.{name}", words)]
    return with_changes(config, {f"data.{name}": wanted[name] for name in chosen})


def problems_with(config: Train, changes: Mapping[str, Any], composition: Composition) -> list[Problem]:
    """The problems that a validated config of a command line has with other values under dotted keys."""
    values = to_plain(config)
    for key, value in changes.items():
        keys.put(values, key, copy.deepcopy(value))
    return problems_in(values, composition, type(config))[1]
