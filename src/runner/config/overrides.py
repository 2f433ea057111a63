"""The words after the verb: parsed, made canonical, and checked against the schema and the groups.

`key=value`, `+key=value` and `++key=value` mean the same for a key that the schema knows, so the plus signs are dropped
before Hydra sees them; a key inside an open section (an argument of a component) may be new, so it is passed as `++`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from runner.config import keys
from runner.config.errors import Problem, nearest
from runner.config.renamed import renamed_problem
from runner.config.sources import Sources


@dataclass(frozen=True)
class CheckedOverrides:
    """Overrides that passed, in the form that Hydra is given, and the problems of those that did not."""

    accepted: list[str]
    problems: list[Problem]
    unknown: list[tuple[str, str]]  # key and override, to be reported once the known keys can be listed


def check_overrides(words: Iterable[str], schema: type, sources: Sources, multirun: bool) -> CheckedOverrides:
    """Check each override by itself; a wrong one never hides the others."""
    parser = OverridesParser.create()
    groups = {group: [option.name for option in sources.options(group)] for group in sources.groups()}
    result = CheckedOverrides([], [], [])
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException:
            problem = Problem(word, "is not an override", "key=value, group=option, ~key or a verb's flag")
            if "=" in word:
                problem = Problem(word, "has a value that cannot be read", "quote special characters: 'key=\"a b\"'")
            result.problems.append(problem)
            continue
        _check_override(override, word, schema, groups, multirun, result)
    return result


def _check_override(
    override: Override, word: str, schema: type, groups: dict[str, list[str]], multirun: bool, result: CheckedOverrides
) -> None:
    key = override.key_or_group
    if key.startswith(("hydra/", "hydra.")):
        result.accepted.append(word)
        return
    if override.is_sweep_override() and not multirun:
        problem = Problem(key, "has several values, which needs the flag --multirun", "one value, or quotes around it")
        result.problems.append(replace(problem, origin=_origin(word)))
        return
    value: Any = override.value()
    if isinstance(value, Glob) and (names := value.filter(groups.get(key, []))):
        # Spelled out here, as Hydra would also take parts of options, whose names begin with `_`.
        word = f"{key}={','.join(name if name.isidentifier() else repr(name) for name in names)}"
        override = OverridesParser.create().parse_override(word)
    if override.is_sweep_override() and (reason := _wrong_sweep(override, key in groups)):
        allowed = ", ".join(groups.get(key, [])) or "values such as 1,2 or range(3)"
        result.problems.append(Problem(key, reason, allowed, origin=_origin(word)))
        return
    if key in groups and not isinstance(override.value(), dict):
        problem_of_group = None if override.is_delete() else _wrong_option(override, word, groups[key])
        if problem_of_group:
            result.problems.append(problem_of_group)
        elif not override.is_delete() and selected(override) == ["null"]:
            result.accepted.append(f"~{key}")  # Hydra takes null in files only
        elif not override.is_sweep_override() and isinstance(override.value(), int | float):
            result.accepted.append(f"{key}='{selected(override)[0]}'")  # a name such as nan is a number to Hydra
        else:
            result.accepted.append(("~" if override.is_delete() else "") + word.lstrip("+~"))
        return
    annotation = keys.find(schema, key)
    if renamed := renamed_problem(key, _origin(word)):
        result.problems.append(renamed)
    elif annotation is None:
        result.unknown.append((key, word))
    elif override.is_delete() and annotation is not Any:
        message = "cannot be deleted, as the schema has it"
        result.problems.append(Problem(key, message, f"set it to {keys.describe(annotation)}", origin=_origin(word)))
    elif override.is_delete():
        result.accepted.append(word)
    else:
        may_be_new = annotation is Any or keys.is_open(annotation)
        result.accepted.append(("++" if may_be_new else "") + word.lstrip("+"))


def _wrong_sweep(override: Override, is_group: bool) -> str:
    """Why a sweep has no jobs, or an empty string."""
    if override.is_interval_sweep():
        return "is chosen by name, and an interval has none" if is_group else ""
    if isinstance(override.value(), Glob):
        return "has no option of that pattern" if is_group else "cannot be glob(...), which is for groups of options"
    return "" if any(True for _ in override.sweep_iterator()) else "has no values to sweep over"


def _wrong_option(override: Override, word: str, options: list[str]) -> Problem | None:
    for name in selected(override):
        if name not in options and name not in ("null", "") and not name.startswith("_"):
            listed = ", ".join(options) or "none"
            return Problem(
                override.key_or_group, f"has no option '{name}'", listed, nearest(name, options), _origin(word)
            )
    return None


def selected(override: Override) -> list[str]:
    """Option names that a group override selects; several for a sweep."""
    if override.is_sweep_override():
        return [str(value).strip("'\"") for value in override.sweep_string_iterator()]
    value = override.value()
    if isinstance(value, list):
        return [str(item) for item in value]
    return ["null" if value is None else str(value)]


def intervals(words: Iterable[str]) -> list[Problem]:
    """A problem for each interval among the overrides, which a sweeper that lists all jobs cannot take."""
    found = [(word, OverridesParser.create().parse_override(word)) for word in words if "interval(" in word]
    message = "cannot be an interval, as the sweeper does not choose values"
    allowed = "hydra/sweeper=optuna or another sweeper that does, or values such as 0.001,0.01"
    return [
        Problem(override.key_or_group, message, allowed, origin=_origin(word.lstrip("+")))
        for word, override in found
        if override.is_interval_sweep()
    ]


def swept(words: Iterable[str]) -> list[str]:
    """The keys and groups that have several values."""
    parsed = (OverridesParser.create().parse_override(word) for word in words)
    return [override.key_or_group for override in parsed if override.is_sweep_override()]


def first_of_sweeps(words: Iterable[str]) -> list[str]:
    """The overrides of the first job of a sweep: each with the first of its values."""
    parser = OverridesParser.create()
    firsts = []
    for word in words:
        override = parser.parse_override(word)
        if override.is_sweep_override():
            prefix = word[: word.index("=") + 1]
            value: Any = override.value()
            is_interval = override.is_interval_sweep()
            firsts.append(prefix + (str(value.start) if is_interval else next(override.sweep_string_iterator())))
        else:
            firsts.append(word)
    return firsts


def canonical(words: Iterable[str]) -> list[str]:
    """Overrides without the plus signs: as they are recorded with a run."""
    return [word.lstrip("+") for word in words]


def unknown_key(key: str, word: str, schema: type, groups: Iterable[str], known: Iterable[str]) -> Problem:
    """The problem of a key that nothing knows, with the closest key that exists.

    A key whose last part is the name of exactly one known key is taken for that one (`lr` for `optimizer.lr`).
    """
    pool = sorted({*keys.all_keys(schema), *groups, *known})
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [candidate for candidate in pool if candidate.rsplit(".", 1)[-1] == leaf]
    suggestion = min(same_leaf, key=len) if same_leaf else nearest(key, pool)
    if not suggestion:
        by_leaf = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(pool)}
        suggestion = by_leaf.get(nearest(leaf, by_leaf), "")
    allowed = "a key of the schema (python -m runner show prints them all)"
    return Problem(key, "is not a key", allowed, suggestion, _origin(word))


def _origin(word: str) -> str:
    return f"the override {word}"
