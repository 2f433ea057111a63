"""From a composed mapping to the typed config, with every problem found on the way."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from runner.base.errors import Problem, nearest
from runner.config import keys
from runner.config.schema.sections import SEVERAL, components_of

T = TypeVar("T")

adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
"""A validator of a type."""

_IN_STEPS = ("evaluate.every_epochs", "checkpoint.every_epochs")  # for people who want a part of an epoch
_OF_NUMBERS = ("optimizer", "scheduler")  # components of which no argument can be infinite


def typed(section: type[T], values: dict[str, Any]) -> tuple[T | None, list[Problem]]:
    """Convert plain `values` to the dataclass `section`.

    Returns:
        The object, or None if anything is wrong, and the problems: unknown keys, wrong types, values out of range,
        components without `_target_`.
    """
    # What pydantic accepts and this program does not comes first, with better words
    flat = keys.flatten(values)
    problems = [problem for key, value in flat.items() if (problem := _untyped(section, key, value, flat))]
    for key, node in nodes(section, values):
        if isinstance(node, dict) and not isinstance(node.get("_target_"), str):
            problems.append(Problem(key, "names nothing to build", "a mapping with _target_: package.module.Name"))
        elif not isinstance(node, dict) and "." in key and keys.within(key, SEVERAL):
            whole, _, name = key.partition(".")
            others = [f"{whole}.{other}" for other, inner in values[whole].items() if isinstance(inner, dict)]
            allowed = ", ".join(f"{other}.{name}" for other in others)
            problems.append(Problem(key, f"is {shown(node)}, and there are {', '.join(others)}", allowed))
    config = None
    try:
        # pydantic names a place for each alternative of a type, so a key is reported once
        config = adapter(section).validate_python(values)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            problem = _problem(section, item["loc"], item["type"], item["input"])
            if problem.key not in {known.key for known in problems}:
                problems.append(problem)
    return (None if problems else config), problems


def _untyped(section: type, key: str, value: Any, others: Iterable[str]) -> Problem | None:
    """A problem that pydantic does not find: a number that is not finite, and true or false for 1 and 0."""
    annotation = keys.find(section, key)
    if isinstance(value, str) and value == "???":  # what Hydra calls a mandatory value
        allowed = "a value" if annotation is None else keys.describe(annotation)
        beside = [other.removeprefix(key[:-8]) for other in others if other != key and key.endswith("._target_")]
        wrong = f", and '{close}' is not a key" if (close := nearest("_target_", beside)) else ""
        return Problem(key, f"is missing{wrong}", "package.module.Name" if key.endswith("._target_") else allowed)
    takes_bool = annotation in (None, Any) or bool in map(keys.bare, keys.members(annotation))
    if isinstance(value, bool) and not takes_bool:
        return Problem(key, f"cannot be {shown(value)}", keys.describe(annotation))
    is_number = annotation is not Any or keys.within(key, _OF_NUMBERS)
    if is_number and any(isinstance(each, float) and not math.isfinite(each) for _, each in keys.walk(value)):
        return Problem(key, f"cannot be {shown(value)}", "finite numbers")
    return None


def _problem(section: type, location: tuple[int | str, ...], kind: str, value: Any) -> Problem:
    """The problem behind an error of pydantic's; what follows the key in its location are alternatives of a type."""
    path: list[str] = []
    # The part of the location that exists in the schema is the key
    annotation: Any = section
    for part in map(str, location):
        if dataclasses.is_dataclass(annotation):
            fields = keys.hints(annotation)  # type: ignore[arg-type]
            path.append(part)
            if part not in fields:  # maybe one of another section
                close = nearest(part, fields) or keys.closest(".".join(path), keys.all_keys(section))
                return Problem(".".join(path), "is not a key", ", ".join(fields), close)
            annotation = fields[part]
        elif component := keys.component_inside(annotation):
            path.append(part)
            annotation = component
        else:
            break
    key = ".".join(path)
    allowed = keys.describe(annotation)
    if key == "vary":
        allowed += ": vary=threads:1,2, or 'vary={threads: [1, 2], amp: bf16}'"
    if kind in ("missing", "missing_argument"):
        return Problem(key, "is missing", allowed)
    # The value may be that of another library, or nearly right
    suggestion = keys.value_meant(key, value) or (keys.key_meant(key) if dataclasses.is_dataclass(annotation) else "")
    if not suggestion and isinstance(value, str):
        suggestion = nearest(value, allowed.replace(" or ", ", ").split(", "))
    if isinstance(value, float) and key in _IN_STEPS:
        in_steps = key.replace("epochs", "steps")
        allowed += f"; {in_steps} counts in optimizer steps, which can be fewer than an epoch has"
    return Problem(key, f"cannot be {shown(value)}", allowed, suggestion)


def shown(value: Any) -> str:
    """A value as a user would type it."""
    text = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
    return text if len(text) <= 80 else text[:77] + "..."


def nodes(section: type, values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every component of a config as (dotted key, mapping), in the order of the schema; lists by number."""
    for name, annotation in keys.hints(section).items():
        value, key = values.get(name), prefix + name
        if value is None:
            continue
        if any(map(keys.is_node, keys.members(annotation))):
            yield from components_of(key, value).items() if isinstance(value, dict) else [(key, value)]
        elif dataclasses.is_dataclass(annotation) and isinstance(value, dict):
            yield from nodes(annotation, value, f"{key}.")  # type: ignore[arg-type]
        elif keys.component_inside(annotation) and isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{key}.{index}", item) for index, item in pairs if item is not None)
