"""From a composition, or a checkpoint with a command line on top, to the validated config."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from runner.base import slurm
from runner.base.errors import ConfigError, Problem, UserError
from runner.config import keys
from runner.config.composition import Composition
from runner.config.frozen import to_plain, with_changes
from runner.config.merge import PREPARATION, merge_with_checkpoint, says, two_rates
from runner.config.rules import conflicts
from runner.config.schema.sections import Normalize
from runner.config.schema.train import Train
from runner.config.targets import FACTS, bind, preferred_data, targets_in
from runner.config.validate import nodes, shown, typed
from runner.config.yaml_files import compose, walk

T = TypeVar("T", bound=Train)

_IMAGENET = [0.485, 0.456, 0.406]  # mean of each channel


def problems_in(
    values: dict[str, Any],
    composition: Composition,
    schema: type[T],
    *,
    where: str = "",
    builds: Sequence[str] | None = None,
) -> tuple[T | None, list[Problem]]:
    """Validate plain values: types, ranges, rules between keys, and the signature of every component that is built.

    `builds` are the sections of these components; None means all.

    Returns:
        The config, or None where a value has the wrong type, and the problems. A number under `lr` is moved to `optimizer.lr`.
    """
    config, problems = _typed_and_compatible(values, composition, schema)
    # `lr` is short for `optimizer.lr`, and from here on only the long form exists
    if config is not None and isinstance(config.lr, float):
        config = with_changes(config, {"optimizer.lr": config.lr, "lr": None})
    # Each component is compared with the signature of what it names, before anything is built
    for key, node in nodes(schema, values):
        built = builds is None or keys.within(key, builds)
        if built and isinstance(node, dict) and isinstance(node.get("_target_"), str):
            section = key if key in FACTS else key.split(".")[0]
            problems += bind(key, node, FACTS.get(section, ()), int(section == "optimizer"))
    # Options set arguments to null by default: such a null is left over after a change of _target_, and means nothing
    left_over = [key for key, value in keys.walk(values) if value is None and not says(key, composition.overrides)]
    problems = [each for each in problems if not (each.kind == "argument" and each.key in left_over)]
    problems = [_of_an_option(problem, composition) for problem in problems]
    if config is not None and not (problems or where or may_resume(composition)):
        problems = statistics_of_others(config, composition)
    return config, composition.with_origins(problems, where)


def _typed_and_compatible(
    values: dict[str, Any], composition: Composition, schema: type[T]
) -> tuple[T | None, list[Problem]]:
    """The config, or None where a value has the wrong type, and the problems of types, ranges, and rules between keys."""
    config, problems = typed(schema, values)
    if config is not None:
        problems += [*conflicts(config), *two_rates(values, composition.overrides)]
    return config, problems


def problems_without_imports(composition: Composition, schema: type[T]) -> list[Problem]:
    """The problems of a command line that are known before torch is imported, which takes seconds: all but those of components.

    Where a checkpoint has the last say on the config, these are the values on the command line of a wrong type.
    """
    if not may_resume(composition):
        problems = _typed_and_compatible(composition.values, composition, schema)[1]
        return composition.with_origins([_of_an_option(problem, composition) for problem in problems])
    given = set(map(keys.key_of, composition.overrides))
    wrong = [problem for problem in typed(schema, composition.values)[1] if problem.key in given]
    return composition.with_origins(wrong)


def may_resume(composition: Composition) -> bool:
    """Tell whether a checkpoint may have the last say on the config."""
    return composition.values.get("ckpt_path") is not None or composition.resumes or slurm.restarted()


def statistics_of_others(config: Train, composition: Composition) -> list[Problem]:
    """A problem if images would be normalised with the numbers that a file gives for other data than those that are read."""
    data, origin = config.data, composition.origin("data.normalize.mean")
    mean, composed = data.normalize.mean, keys.at(composition.values, "data.normalize.mean")
    # ImageNet's numbers are for photographs of any data set
    if (
        mean in (None, _IMAGENET)
        or mean != composed
        or data.images == []
        or not origin
        or says("data.normalize", composition.overrides)
    ):
        return []
    file, read = Path(origin.rpartition(":")[0]), {target for _, target in targets_in(data.dataset)}
    targets = ("dataset._target_", "data.dataset._target_")
    own = {str(node.value) for name, _, node in walk(compose(file)) if name in targets}
    # Another class around the same data has the same numbers
    if not own or own & read:
        return []
    # Those of trained weights replace them
    if _with_preferred_data(config, composition.overrides).data.normalize != data.normalize:
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
    if group not in ("callbacks", "logger"):
        return problem
    if "names nothing to build" not in problem.message or composition.sources.option(group, name) is None:
        return problem
    chosen = composition.group_choices.get(group, "none")
    several = name if chosen in ("none", "default") else f"'[{chosen},{name}]'"
    allowed = f"{group}={several}, or no key of {problem.key}"
    return dataclasses.replace(problem, message=f"has keys, but {group}={name} is not selected", allowed=allowed)


def resolve_config(composition: Composition, schema: type[T]) -> T:
    """The validated config of a command line.

    Raises:
        ConfigError: with every problem there is.
    """
    config = _validated(composition.values, composition, schema)
    return config if config.ckpt_path is not None else _with_preferred_data(config, composition.overrides)


def resolve_with_checkpoint(
    text: str,
    where: str,
    composition: Composition,
    schema: type[T],
    *,
    normalize: Mapping[str, Any] | None = None,
    builds: Sequence[str] | None = None,
) -> tuple[T, list[tuple[str, str, str]]]:
    """The validated config of a checkpoint with the command line on top.

    Args:
        text: the config in the checkpoint.
        where: path of the checkpoint.
        composition: the command line, which alone gives the keys that a verb adds to those of `train`.
        schema: of the verb.
        normalize: statistics of the images to use, unless the command line gives others; None for those of the result.
        builds: sections whose components will be built, None for all; others are not even imported.

    Returns:
        The config, and what the command line changed: see `runner.config.stored.differences`.

    Raises:
        ConfigError: with every problem there is.
    """
    values, changed = merge_with_checkpoint(text, where, composition, builds)
    data = values.get("data")
    # Statistics of the training data belong to the weights, so other data are normalised with them
    if normalize is not None and isinstance(data, dict) and not says("data.normalize", composition.overrides):
        data["normalize"] = dict(normalize)
    kind: type = schema
    own = {key: composition.values[key] for key in keys.hints(kind) if key not in keys.hints(Train)}
    return _validated(values | own, composition, schema, where, builds), changed


def resolve_changes(
    config: T, changes: Mapping[str, Any], composition: Composition, prefix: str = ""
) -> tuple[T | None, list[Problem]]:
    """The config with other values under dotted keys, validated, and the problems that they cause.

    `prefix` says where the keys stand on the command line, such as `vary.`.

    Raises:
        UserError: if a key lies inside what is not a section.
    """
    values = to_plain(config)
    for key, value in changes.items():
        *path, last = key.split(".")
        section = values
        for part in path:
            inner = section.setdefault(part, {})
            if not isinstance(inner, dict):
                raise UserError(prefix + key, f"does not exist here, as {part} is {shown(inner)}")
            section = inner
        section[last] = copy.deepcopy(value)
    return problems_in(values, composition, type(config))


def _validated(
    values: dict[str, Any],
    composition: Composition,
    schema: type[T],
    where: str = "",
    builds: Sequence[str] | None = None,
) -> T:
    config, problems = problems_in(values, composition, schema, where=where, builds=builds)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def _with_preferred_data(config: T, words: Sequence[str]) -> T:
    """Prepare images as the trained weights of the model expect them, unless the command line says otherwise."""
    mean = config.data.normalize.mean
    wanted = preferred_data(config.model, grey=mean is not None and len(mean) == 1)
    if "normalize" in wanted:
        wanted["normalize"] = Normalize(**wanted["normalize"])
    chosen = [name for name in PREPARATION if name in wanted and not says(f"data.{name}", words)]
    return with_changes(config, {f"data.{name}": wanted[name] for name in chosen})
