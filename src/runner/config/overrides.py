"""The words after a verb: Hydra's flags, and overrides, made canonical and checked against the schema and the groups.

`key=value`, `+key=value` and `++key=value` mean the same for a key that the schema knows, so the plus signs are dropped
before Hydra sees them; a key inside an open section (an argument of a component) may be new, so it is passed as `++`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from runner.base.errors import Problem, UserError, nearest, nearest_path
from runner.config import keys
from runner.config.gone import explained
from runner.config.sources import Sources

_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.mode", "hydra.launcher", "hydra.sweeper", "hydra.searchpath")
_REFUSED_FLAGS = {  # they would bypass the checks of this program
    "--experimental-rerun": "it reads a pickle, which could run anything; use ckpt_path= instead",
    "--config-path": "it would replace the configs of the program; add yours with --config-dir",
    "--package": "it would move all keys; select an option with group=option, such as model=mlp",
}


def parse_flags(argv: Sequence[str], known: Sequence[str] = ()) -> argparse.Namespace:
    """Hydra's flags and the overrides among the words after a verb; `known` lists the keys, for a flag that means one.

    Raises:
        UserError: for a flag that Hydra does not have, or one that is refused.
    """
    parser = get_args_parser()
    parser.allow_abbrev = False
    options = [option for action in parser._actions for option in action.option_strings]

    def refuse(message: str) -> NoReturn:
        raise _wrong_flag(message, argv, options, known)

    parser.error = refuse  # type: ignore[method-assign]
    flags = parser.parse_intermixed_args(list(argv))
    for name, fix in _REFUSED_FLAGS.items():
        if getattr(flags, name.lstrip("-").replace("-", "_")):
            raise UserError(f"{name} is refused: {fix}")
    return flags


def _wrong_flag(complaint: str, argv: Sequence[str], options: Sequence[str], known: Sequence[str]) -> UserError:
    """The mistake behind a complaint of argparse's, with the flag or the override that is meant."""
    wrong = [at for at, word in enumerate(argv) if word.startswith("-") and word.split("=")[0] not in options]
    if not wrong:
        return UserError(complaint, "", "python -m runner VERB --help lists the flags")
    flag, _, value = argv[wrong[0]].partition("=")
    follows = "".join(argv[wrong[0] + 1 : wrong[0] + 2])
    value = value or ("" if "=" in follows or follows.startswith("-") else follows)
    name, meant = flag.lstrip("-").replace("-", "_"), nearest(flag, options, 0.85)
    if not meant and (name in known or len(name) > 1 or keys.key_meant(name)):
        key = name if name in known else keys.closest(name, sorted(known))
        meant = key if "=" in key or not key else f"{key}={value or 'VALUE'}"
    allowed = "--multirun, --config-dir DIR, --config-name NAME, --cfg job, --info, --help; a key has no dashes"
    return UserError(f"there is no flag {flag}", "", allowed, meant)


@dataclass(frozen=True)
class CheckedOverrides:
    """Overrides that passed, in the form that Hydra is given, and the problems of those that did not."""

    accepted: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    known: list[str] = field(default_factory=list)  # keys of the schema, and groups

    def explained(self, composed: Iterable[str] = ()) -> list[Problem]:
        """The problems, keys that nothing knows with the closest one of the schema, or of those that were composed."""
        pool = sorted({*self.known, *composed})
        return [
            explained(replace(each, nearest=keys.closest(each.key, pool))) if each.kind == "key" else each
            for each in self.problems
        ]


def parsed(words: Iterable[str]) -> list[Override]:
    """Overrides as Hydra reads them."""
    found: list[Override] = OverridesParser.create().parse_overrides(list(words))
    return found


def check_overrides(words: Sequence[str], schema: type, sources: Sources, multirun: bool) -> CheckedOverrides:
    """Check each override by itself; a wrong one never hides the others."""
    groups = {group: [option.name for option in sources.options(group)] for group in sources.groups()}
    result = CheckedOverrides(known=[*keys.all_keys(schema), *groups])
    # Users type paths as other programs take them, without a key; these are the keys of the verb that take paths
    paths = [key for key in ("ckpt_path", "input") if keys.find(schema, key) and key not in map(keys.key_of, words)]
    for number, word in enumerate(words):
        override = None
        with contextlib.suppress(HydraException):
            [override] = parsed([word])
        if paths and "=" not in word and ("/" in word or word.endswith(".safetensors") or Path(word).is_dir()):
            result.problems.append(Problem(word, "is a path without a key", f"{paths.pop(0)}={word}"))
            continue
        if override is None or not override.key_or_group:
            result.problems.append(_not_an_override(word, words[number + 1 :]))
            continue
        key, bare, deletes = override.key_or_group, word.lstrip("+~"), override.is_delete()
        value: Any = override.value()
        if problem := _problem(override, word, keys.find(schema, key), groups.get(key), multirun):
            result.problems.append(replace(problem, origin=f"the override {word}"))
            continue
        if key in groups and not isinstance(value, dict):
            if isinstance(value, Glob):
                # Spelled out, as Hydra would also take parts of options, whose names begin with `_`
                names = value.filter(groups[key])
                bare = f"{key}={','.join(name if name.isidentifier() else repr(name) for name in names)}"
            elif isinstance(value, int | float) and not deletes:  # a name such as nan is a number to Hydra
                bare = f"{key}='{value}'"
            elif value in (None, [None], "null", ["null"]) and not deletes:  # Hydra takes null in files only
                bare, deletes = key, True
            word = f"{'~' * deletes}{bare}"
        elif not (deletes or keys.is_of_hydra(key)):
            # New keys are allowed where the schema is open, such as arguments of a custom class
            annotation = keys.find(schema, key)
            word = f"{'++' * (annotation is Any or keys.is_open(annotation))}{bare}"
        result.accepted.append(word)
    return result


def _not_an_override(word: str, following: Sequence[str]) -> Problem:
    """The problem of a word that Hydra cannot read."""
    if "=" in word:
        allowed = "no spaces around = and commas, and quotes around special characters: "
        return Problem(word, "has a value that cannot be read", f"{allowed}'{word.partition('=')[0]}=\"...\"'")
    # The usual form of other programs is a key, then its value
    value = following[0] if following and "=" not in following[0] else "VALUE"
    is_name = re.fullmatch(r"[A-Za-z_][\w./-]*", word)
    example = f"; such as {keys.key_meant(word) or word}={value}" if is_name else ""
    return Problem(word, "is not an override", f"key=value, group=option, ~key{example}")


def _problem(
    override: Override, word: str, annotation: Any, options: list[str] | None, multirun: bool
) -> Problem | None:
    """The problem of an override that Hydra can read, if any; `options` are those of its key if that is a group."""
    key, several = override.key_or_group, override.is_sweep_override()
    value: Any = override.value()
    if keys.is_of_hydra(key):  # which are its own to check
        return None
    # A comma means a sweep to Hydra, so without --multirun the user means a list or text
    if several and not multirun:
        text = word.partition("=")[2]
        allowed = f"one value, a list in brackets: '{key}=[{text}]', or quotes around text: '{key}=\"{text}\"'"
        if options is not None:
            allowed = f"one option{f', or several: {key}=[{text}]' * (key in ('callbacks', 'logger'))}"
        return Problem(key, "has several values, which needs the flag --multirun", allowed)
    if several and (reason := _wrong_sweep(override, options)):
        allowed = "values such as 1,2 or range(3), or sweep=optuna with search.KEY={log: [1e-4, 1e-1]}"
        return Problem(key, reason, ", ".join(options or []) or allowed)
    if (place := override.package) is not None and override.is_add():
        allowed = f"'+{place}={{_target_: ..., ...}}', or an option file with {value}@NAME among its defaults"
        return Problem(key, f"has options that cannot be added at {place} on the command line", allowed)
    # A group takes names of options, everything else takes values
    if options is None or isinstance(value, dict):
        if annotation is None:
            return Problem(key, "is not a key", keys.ANY_KEY, kind="key")
        if override.is_delete() and annotation is not Any:
            allowed = f"set it to {keys.describe(annotation)}"
            return Problem(key, "cannot be deleted: it is part of the schema", allowed)
        if override.is_delete() and (listed := key.rpartition("."))[2].isdigit():
            return Problem(key, "cannot be deleted: it is an item of a list", f"the whole list: {listed[0]}=[...]")
        return None
    if override.is_delete() or isinstance(value, Glob):
        return None
    given = override.sweep_iterator() if several else value if isinstance(value, list) else [value]
    names = ["null" if each is None else str(getattr(each, "text", each)) for each in given]  # a quoted one has a text
    for name in names:
        known = name in ("null", "", *options) or name.startswith("_")
        if not (known or (key == "data" and is_path(name))):
            return explained(_no_option(key, name, options), name)
    # Selecting none and others at once contradicts itself
    if "none" in names and len(names) > 1 and not several:
        others = ",".join(name for name in names if name != "none")
        return Problem(key, "cannot be none and others at once", f"{key}=none, or {key}=[{others}]")
    return None


def is_path(name: str) -> bool:
    """Tell whether a value of `data=` that is not an option, or a part of one, is an existing file or folder."""
    path = os.path.expanduser(name)  # noqa: PTH111  Path.exists raises for a long text
    return os.path.exists(path) and not name.startswith("_")  # noqa: PTH110


def _no_option(group: str, name: str, options: list[str]) -> Problem:
    """The problem of an option that there is not, with what is meant by it."""
    message, allowed = f"has no option '{name}'", ", ".join(options) or "none"
    bare = name.replace("\\", "/").rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
    meant = keys.value_meant(group, name) or nearest(bare, options)
    if (words := keys.by_class(group, name)) and not (meant and group == "model"):
        allowed = f"{allowed}; {words} for a class"
    if group == "data" and "/" in name:
        message, meant = f"{message}, and there is no such file or folder", meant or nearest_path(Path(name))
    return Problem(group, message, allowed, meant)


def _wrong_sweep(override: Override, options: list[str] | None) -> str:
    """The reason why a sweep over a key, or the options of a group, has no jobs, or an empty string."""
    is_group = options is not None
    value: Any = override.value()
    if override.is_interval_sweep():
        return "is chosen by name, and an interval has none" if is_group else "cannot be an interval"
    if isinstance(value, Glob):
        if value.filter(options or []):
            return ""
        return "has no option of that pattern" if is_group else "cannot be glob(...), which is for groups of options"
    return "" if any(True for _ in override.sweep_iterator()) else "has no values to sweep over"


def swept(words: Iterable[str]) -> list[str]:
    """The keys and groups that have several values."""
    return [override.key_or_group for override in parsed(words) if override.is_sweep_override()]


def first_of_sweeps(words: Iterable[str]) -> list[str]:
    """The overrides of the first job of a sweep: each with the first of its values."""
    firsts = []
    for override in parsed(words):
        word = str(override.input_line)
        if override.is_sweep_override():
            word = word[: word.index("=") + 1] + next(override.sweep_string_iterator())
        firsts.append(word)
    return firsts


def without_effect(words: Iterable[str]) -> list[Problem]:
    """Problems of overrides of `hydra.*` that do nothing, as this program starts its jobs itself."""
    found = [keys.key_of(word).replace("/", ".") for word in words if keys.is_of_hydra(word)]
    allowed = f"without it; of Hydra's keys, these have one: {', '.join(_HYDRA_KEYS)}"
    return [Problem(key, "has no effect", allowed) for key in found if not keys.within(key, _HYDRA_KEYS)]
