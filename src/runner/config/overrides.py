"""The words after the verb: parsed, made canonical, and checked against the schema and the groups.

`key=value`, `+key=value` and `++key=value` mean the same for a key that the schema knows, so the plus signs are dropped
before Hydra sees them; a key inside an open section (an argument of a component) may be new, so it is passed as `++`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from runner.base.errors import Problem, nearest
from runner.config import keys
from runner.config.gone import explained
from runner.config.sources import Sources
from runner.config.synonyms import by_class, key_meant, value_meant

_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.mode", "hydra.launcher", "hydra.sweeper", "hydra.searchpath")


@dataclass(frozen=True)
class CheckedOverrides:
    """Overrides that passed, in the form that Hydra is given, and the problems of those that did not."""

    accepted: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    """Key and override, to be reported once the known keys can be listed."""


def parsed(words: Iterable[str]) -> list[Override]:
    """Overrides as Hydra reads them."""
    found: list[Override] = OverridesParser.create().parse_overrides(list(words))
    return found


def check_overrides(words: Sequence[str], schema: type, sources: Sources, multirun: bool) -> CheckedOverrides:
    """Check each override by itself; a wrong one never hides the others."""
    groups = {group: [option.name for option in sources.options(group)] for group in sources.groups()}
    result = CheckedOverrides()
    # A path without a key is a common slip; its keys are those of the verb that take paths
    paths = [key for key in ("ckpt_path", "input") if keys.find(schema, key) and key not in map(keys.key_of, words)]
    readable, problems = not_overrides(words, _is_readable, paths)
    result.problems.extend(problems)
    for word in readable:
        [override] = parsed([word])
        checked = _checked(override, word, schema, groups, multirun=multirun)
        if checked is None:
            result.unknown.append((override.key_or_group, word))
        elif isinstance(checked, Problem):
            result.problems.append(replace(checked, origin=f"the override {word}"))
        else:
            result.accepted.append(checked)
    return result


def _is_readable(word: str) -> bool:
    try:
        return bool(parsed([word])[0].key_or_group)
    except HydraException:
        return False


def _checked(
    override: Override, word: str, schema: type, groups: dict[str, list[str]], *, multirun: bool
) -> str | Problem | None:
    """The override for Hydra, or its problem; None for a key that nothing knows."""
    key, options = override.key_or_group, groups.get(override.key_or_group)
    value: Any = override.value()
    # Keys of Hydra are its own to check
    if key.startswith(("hydra/", "hydra.")):
        return word
    # A comma means a sweep to Hydra, so without --multirun the user means a list or text
    if override.is_sweep_override() and not multirun:
        text = word.partition("=")[2]
        allowed = f"one value, a list in brackets: '{key}=[{text}]', or quotes around text: '{key}=\"{text}\"'"
        if options is not None:
            several = f", or several: '{key}=[{text}]'" if key in ("callbacks", "logger") else ""
            allowed = f"one option{several}"
        return Problem(key, "has several values, which needs the flag --multirun", allowed)
    if isinstance(value, Glob) and (names := value.filter(options or [])):
        # Spelled out here, as Hydra would also take parts of options, whose names begin with `_`.
        word = f"{key}={','.join(name if name.isidentifier() else repr(name) for name in names)}"
        [override] = parsed([word])
    if override.is_sweep_override() and (reason := _wrong_sweep(override, options is not None)):
        return Problem(key, reason, ", ".join(options or []) or "values such as 1,2 or range(3)")
    # A group takes names of options, everything else takes values
    if options is not None and not isinstance(value, dict):
        return _checked_group(override, word, options)
    annotation = keys.find(schema, key)
    if annotation is None:
        return None
    if override.is_delete() and annotation is not Any:
        return Problem(key, "cannot be deleted: it is part of the schema", f"set it to {keys.describe(annotation)}")
    if override.is_delete():
        return word
    # New keys are allowed where the schema is open, such as arguments of a custom class
    may_be_new = annotation is Any or keys.is_open(annotation)
    return ("++" if may_be_new else "") + word.lstrip("+")


def _checked_group(override: Override, word: str, options: list[str]) -> str | Problem:
    """The choice of an option for Hydra, or its problem."""
    key = override.key_or_group
    if override.is_delete():
        return "~" + word.lstrip("+~")
    names = selected(override)
    for name in names:
        if name not in options and name not in ("null", "") and not name.startswith("_"):
            return explained(_no_option(key, name, options), name)
    # Selecting none and others at once contradicts itself
    if "none" in names and len(names) > 1 and not override.is_sweep_override():
        others = ",".join(name for name in names if name != "none")
        return Problem(key, "cannot be none and others at once", f"{key}=none, or {key}=[{others}]")
    if names == ["null"]:
        return f"~{key}"  # Hydra takes null in files only
    if isinstance(override.value(), int | float):
        return f"{key}='{names[0]}'"  # a name such as nan is a number to Hydra
    return word.lstrip("+")


def _no_option(group: str, name: str, options: list[str]) -> Problem:
    """The problem of an option that there is not, with what is meant by it."""
    message, allowed = f"has no option '{name}'", ", ".join(options) or "none"
    bare = name.replace("\\", "/").rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
    meant = value_meant(group, name) or nearest(bare, options)
    if (words := by_class(group, name)) and not (meant and group == "model"):
        allowed = f"{allowed}; {words} for a class"
    if group == "data" and ("/" in name or Path(name).is_dir()):
        return Problem(group, message, allowed, f"data=image_folder data.root={name}")
    return Problem(group, message, allowed, meant)


def _wrong_sweep(override: Override, is_group: bool) -> str:
    """The reason why a sweep has no jobs, or an empty string."""
    if override.is_interval_sweep():
        return "is chosen by name, and an interval has none" if is_group else ""
    if isinstance(override.value(), Glob):
        return "has no option of that pattern" if is_group else "cannot be glob(...), which is for groups of options"
    return "" if any(True for _ in override.sweep_iterator()) else "has no values to sweep over"


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
    message = "cannot be an interval, as the sweeper does not choose values"
    allowed = "sweep=optuna with search.KEY={log: [1e-4, 1e-1]}, a sweeper that does, or values such as 0.001,0.01"
    return [
        Problem(override.key_or_group, message, allowed, origin=f"the override {str(override.input_line).lstrip('+')}")
        for override in parsed(words)
        if override.is_interval_sweep()
    ]


def swept(words: Iterable[str]) -> list[str]:
    """The keys and groups that have several values."""
    return [override.key_or_group for override in parsed(words) if override.is_sweep_override()]


def first_of_sweeps(words: Iterable[str]) -> list[str]:
    """The overrides of the first job of a sweep: each with the first of its values."""
    firsts = []
    for override in parsed(words):
        word = str(override.input_line)
        if override.is_sweep_override():
            value: Any = override.value()
            first = str(value.start) if override.is_interval_sweep() else next(override.sweep_string_iterator())
            word = word[: word.index("=") + 1] + first
        firsts.append(word)
    return firsts


def without_effect(words: Iterable[str]) -> list[Problem]:
    """Problems of overrides of `hydra.*` that do nothing, as this program starts its jobs itself."""
    found = [keys.key_of(word).replace("/", ".") for word in words if keys.is_of_hydra(word)]
    allowed = f"without it; of Hydra's keys, these have one: {', '.join(_HYDRA_KEYS)}"
    idle = [key for key in found if key != "hydra" and not keys.within(key, _HYDRA_KEYS)]
    return [Problem(key, "has no effect", allowed) for key in idle]


def canonical(words: Iterable[str]) -> list[str]:
    """Overrides without the plus signs: as they are recorded with a run."""
    return [word.lstrip("+") for word in words]


def unknown_key(key: str, word: str, schema: type, groups: Iterable[str], known: Iterable[str]) -> Problem:
    """The problem of a key that nothing knows, with the closest key that exists.

    A key whose last part is the name of exactly one known key is taken for that one (`lr` for `optimizer.lr`).
    """
    close = keys.closest(key, sorted({*keys.all_keys(schema), *groups, *known}))
    return explained(Problem(key, "is not a key", keys.ANY_KEY, close, f"the override {word}"))


_NAME = re.compile(r"[A-Za-z_][\w./-]*")


def not_overrides(
    words: Sequence[str], reads: Callable[[str], bool], paths: Sequence[str] = ()
) -> tuple[list[str], list[Problem]]:
    """Split words into those that Hydra reads and the problems of the others.

    Args:
        words: the words after the verb, without flags.
        reads: tells whether Hydra reads a word as an override.
        paths: the keys that are meant by words that are paths, in this order.
    """
    good, problems, open_ = list[str](), list[Problem](), [*paths]
    for number, word in enumerate(words):
        # Users type paths as other programs take them
        if open_ and "=" not in word and ("/" in word or word.endswith(".safetensors") or Path(word).is_dir()):
            problems.append(Problem(word, "is a path without a key", f"{open_.pop(0)}={word}"))
        elif reads(word):
            good.append(word)
        elif "=" in word:
            allowed = "no spaces around = and commas, and quotes around special characters: "
            problems.append(
                Problem(word, "has a value that cannot be read", f"{allowed}'{word.partition('=')[0]}=\"...\"'")
            )
        else:
            # The usual form of other programs is a key, then its value
            value = words[number + 1] if number + 1 < len(words) and "=" not in words[number + 1] else "VALUE"
            example = f"; such as {key_meant(word) or word}={value}" if _NAME.fullmatch(word) else ""
            problems.append(Problem(word, "is not an override", f"key=value, group=option, ~key{example}"))
    return good, problems


def flag_meant(flag: str, value: str, known: Iterable[str], options: Sequence[str]) -> str:
    """The flag or override that is meant by a flag that there is not; an empty string if neither comes close.

    Args:
        flag: as it was given, without its value.
        value: what followed it, or an empty string.
        known: the keys and groups.
        options: the flags that there are.
    """
    name, pool = flag.lstrip("-").replace("-", "_"), sorted(known)
    if close := nearest(flag, options, 0.85):
        return close
    key = name if name in pool else keys.closest(name, pool) if len(name) > 1 or key_meant(name) else ""
    return key if "=" in key or not key else f"{key}={value or 'VALUE'}"
