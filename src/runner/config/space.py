"""The search space of `sweep=optuna`: the keys that it varies, and the values that each of them may take."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.base.errors import Problem, nearest
from runner.config import keys
from runner.config.schema.train import Search
from runner.config.validate import shown

KINDS = ("log", "uniform", "int", "choice")
_FORMS = "{log: [1e-4, 1e-1]}, {uniform: [0, 0.5]}, {int: [16, 256], step: 16} or {choice: [a, b]}"
_MODIFIERS = {"uniform": ("step",), "int": ("step", "log")}


@dataclass(frozen=True)
class Range:
    """The values that a key may take."""

    kind: str  # `float`, `int` or `choice`
    low: float = 0
    high: float = 0
    step: float | None = None  # between two numbers
    log: bool = False  # drawn on a logarithmic scale
    choices: tuple[Any, ...] = ()  # lists and mappings as the text of an override

    @property
    def ends(self) -> list[Any]:
        """The values that are tried when a search is validated: the smallest and the largest, or every choice."""
        return list(self.choices) if self.kind == "choice" else [self.low, self.high]


def with_space(search: Mapping[str, Any]) -> dict[str, Any]:
    """The section `search` with every key that is not a setting in its `space`, by dotted key."""
    settings = {key: value for key, value in search.items() if key in keys.hints(Search)}
    rest = {key: value for key, value in search.items() if key not in settings}
    space = settings.get("space")
    return settings | {"space": _by_key(space) | _by_key(rest)} if isinstance(space, dict) else settings


def _by_key(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The ranges of nested keys by dotted key."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if not isinstance(value, dict) or not value:
            found[key] = value
            continue
        own = {part: each for part, each in value.items() if not isinstance(each, dict)}
        if own.keys() & {*KINDS} or (prefix and own):
            found[key] = own
            value = {part: each for part, each in value.items() if part not in own}
        found |= _by_key(value, key)
    return found


def ranges_of(space: Mapping[str, Any]) -> tuple[dict[str, Range], list[Problem]]:
    """The range of each key of a search space, and what is wrong with others; keys are not looked up in the schema."""
    found, problems = dict[str, Range](), list[Problem]()
    for key, given in space.items():
        try:
            found[key] = _range(given)
        except ValueError as error:
            settings = [name for name in keys.hints(Search) if name != "space"]
            close = "" if isinstance(given, dict) else nearest(key, settings)
            problems.append(Problem(f"search.{key}", str(error), _FORMS, close and f"search.{close}"))
    return found, problems


def _range(given: Any) -> Range:
    """A range as it is written.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(given, dict):
        raise ValueError(f"cannot be {shown(given)}")
    # `log` may also be a switch of another kind
    kinds = [name for name in KINDS if name in given and not (name == "log" and isinstance(given["log"], bool))]
    if len(kinds) != 1:
        raise ValueError(f"has {' and '.join(kinds) or 'none'} of {', '.join(KINDS)}, and one is expected")
    [kind] = kinds
    values = given[kind]
    if others := [name for name in given if name != kind and name not in _MODIFIERS.get(kind, ())]:
        raise ValueError(f"has {others[0]}, which {kind} does not take")
    if kind == "choice":
        return Range("choice", choices=_choices(values))
    wrong = f"has {kind}: {shown(values)}, but"
    if not isinstance(values, list) or len(values) != 2 or not all(_is_number(value) for value in values):
        raise ValueError(f"{wrong} two numbers are expected")
    low, high, step = values[0], values[1], given.get("step")
    log = kind == "log" or given.get("log") is True
    # What a sampler would refuse later, and in other words, is refused here
    if not low < high:
        raise ValueError(f"{wrong} the first number has to be smaller")
    if log and low <= 0:
        raise ValueError(f"{wrong} a logarithmic scale begins above 0")
    if kind == "int" and any(not float(value).is_integer() for value in (low, high, step or 1)):
        raise ValueError(f"{wrong} whole numbers are expected")
    if step is not None and (log or not _is_number(step) or step <= 0):
        raise ValueError(f"has step: {shown(step)}, but a positive number is expected, without a logarithmic scale")
    if kind == "int":
        return Range("int", int(low), int(high), int(step or 1), log)
    return Range("float", float(low), float(high), step, log)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _choices(values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"has choice: {shown(values)}, but a list of values is expected")
    plain = tuple(text_of(value) if isinstance(value, list | dict) else value for value in values)
    if len(set(map(repr, plain))) < len(plain):
        raise ValueError(f"has choice: {shown(values)}, with a value twice")
    return plain


def word_of(key: str, value: Any) -> str:
    """The override that sets a key to one of the values of its range; a choice may be the text of a list or a mapping."""
    return f"{key}={value if isinstance(value, str) and value[:1] in ('[', '{') else text_of(value)}"


def text_of(value: Any) -> str:
    """A value as an override has it."""
    if isinstance(value, list):
        return f"[{','.join(map(text_of, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{text_of(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, str) and not (value[:1] in ("[", "{") or re.fullmatch(r"[A-Za-z_][\w./:@-]*", value)):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)
