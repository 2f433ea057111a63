"""From a composed mapping to the typed config, with every problem found on the way."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from runner.config import keys
from runner.config.errors import Problem, nearest
from runner.config.renamed import renamed_problem
from runner.config.schema.sections import HasTarget

T = TypeVar("T")

_STRICT: ConfigDict = {"extra": "forbid", "coerce_numbers_to_str": True}


@functools.cache
def _adapter(section: type) -> TypeAdapter[Any]:
    """A validator of a dataclass and of all sections below it."""
    _forbid_extras(section)
    return TypeAdapter(section)


def _forbid_extras(section: type) -> None:
    section.__pydantic_config__ = _STRICT  # type: ignore[attr-defined]
    for annotation in keys.hints(section).values():
        if dataclasses.is_dataclass(annotation):
            _forbid_extras(annotation)  # type: ignore[arg-type]


_IN_STEPS = {
    "evaluate.every_epochs": "evaluate.every_steps",
    "checkpoint.every_epochs": "checkpoint.every_steps",
}  # for people who want a part of an epoch


def typed(section: type[T], values: dict[str, Any]) -> tuple[T | None, list[Problem]]:
    """Convert plain `values` to the dataclass `section`.

    Returns:
        The object, or None if anything is wrong, and the problems: unknown keys, wrong types, values out of range,
        components without `_target_`.
    """
    problems = _renamed(values) + _booleans_as_numbers(section, values) + _without_target(section, values)
    try:
        config = _adapter(section).validate_python(values)  # type: ignore[arg-type]
    except ValidationError as error:
        config = None
        seen = {problem.key for problem in problems}
        for item in error.errors(include_url=False):
            problem = _problem(section, item["loc"], item["type"], item["input"])
            if problem.key not in seen:
                seen.add(problem.key)
                problems.append(problem)
    return (None if problems else config), problems


def _problem(section: type, location: tuple[int | str, ...], kind: str, value: Any) -> Problem:
    path: list[str] = []
    annotation: Any = section
    for part in location:
        if not dataclasses.is_dataclass(annotation):
            insides = [get_args(keys.bare(member)) for member in keys.members(annotation)]
            components = [inside[-1] for inside in insides if inside and _is_node(inside[-1])]
            if components:  # one of a list or mapping of them
                path.append(str(part))
                annotation = components[0]
            break
        fields = keys.hints(annotation)  # type: ignore[arg-type]
        path.append(str(part))
        if part not in fields:
            return Problem(".".join(path), "is not a key", ", ".join(fields), nearest(str(part), fields))
        annotation = fields[str(part)]
    key = ".".join(path)
    allowed = keys.describe(annotation)
    if kind in ("missing", "missing_argument"):
        return Problem(key, "is missing", allowed)
    choices = allowed.replace(" or ", ", ").split(", ")
    suggestion = nearest(value, choices) if isinstance(value, str) else ""
    if isinstance(value, float) and key in _IN_STEPS:
        allowed += f"; {_IN_STEPS[key]} counts in optimizer steps, which can be fewer than an epoch has"
    return Problem(key, f"cannot be {shown(value)}", allowed, suggestion)


def shown(value: Any) -> str:
    """A value as a user would type it."""
    text = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
    return text if len(text) <= 80 else text[:77] + "..."


def _booleans_as_numbers(section: type, values: dict[str, Any]) -> list[Problem]:
    """True and false where only numbers are meant: Python would take them for 1 and 0."""
    problems = []
    for key, value in keys.flatten(values).items():
        annotation = keys.find(section, key)
        if not isinstance(value, bool) or annotation is None or annotation is Any:
            continue
        if not any(keys.bare(member) is bool for member in keys.members(annotation)):
            problems.append(Problem(key, f"cannot be {shown(value)}", keys.describe(annotation)))
    return problems


def _renamed(values: dict[str, Any]) -> list[Problem]:
    found = (renamed_problem(key) for key in keys.flatten(values))
    return [problem for problem in found if problem is not None]


def _without_target(section: type, values: dict[str, Any]) -> list[Problem]:
    problems = []
    for key, node in nodes(section, values):
        if isinstance(node, dict) and not isinstance(node.get("_target_"), str):
            problems.append(Problem(key, "names nothing to build", "a mapping with _target_: package.module.Name"))
    return problems


def nodes(section: type, values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every component of a config as (dotted key, mapping), in the order of the schema; lists by number."""
    found: list[tuple[str, Any]] = []
    for name, annotation in keys.hints(section).items():
        value, key = values.get(name), prefix + name
        if value is None:
            continue
        if dataclasses.is_dataclass(annotation):
            if isinstance(value, dict):
                found += nodes(annotation, value, key + ".")  # type: ignore[arg-type]
            continue
        for member in keys.members(annotation):
            arguments = getattr(keys.bare(member), "__args__", ())
            if _is_node(member):
                found.append((key, value))
            elif arguments and _is_node(arguments[-1]):
                pairs = (
                    value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else [])
                )
                found += [(f"{key}.{index}", item) for index, item in pairs if item is not None]
    return found


def _is_node(annotation: Any) -> bool:
    return any(isinstance(mark, HasTarget) for mark in getattr(annotation, "__metadata__", ()))
