"""The words after a verb: Hydra's flags, and overrides, made canonical and checked against the schema and the groups.

`key=value`, `+key=value` and `++key=value` mean the same for a key that the schema knows, so the plus signs are dropped
before Hydra sees them; a key inside an open section (an argument of a component) may be new, so it is passed as `++`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from runner.base.errors import Problem, UserError, nearest
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
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            flags = parser.parse_intermixed_args(list(argv))
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        options = [option for action in parser._actions for option in action.option_strings]
        raise _wrong_flag(complaint.getvalue(), argv, options, known) from None
    for name, fix in _REFUSED_FLAGS.items():
        if getattr(flags, name.lstrip("-").replace("-", "_")):
            raise UserError(f"{name} is refused: {fix}")
    return flags


def _wrong_flag(complaint: str, argv: Sequence[str], options: Sequence[str], known: Sequence[str]) -> UserError:
    """The mistake behind a complaint of argparse's, with the flag or the override that is meant."""
    wrong = [at for at, word in enumerate(argv) if word.startswith("-") and word.split("=")[0] not in options]
    if not wrong:
        reason = complaint.strip().splitlines()[-1].partition("error: ")[2]
        return UserError(reason, "", "python -m runner VERB --help lists the flags")
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
    unknown: list[tuple[str, str]] = field(default_factory=list)  # key and override
    known: list[str] = field(default_factory=list)  # keys of the schema, and groups

    def unknown_keys(self, composed: Iterable[str] = ()) -> list[Problem]:
        """The problems of keys that nothing knows, each with the closest key of the schema, or of those that were composed."""
        pool = sorted({*self.known, *composed})
        close = {key: keys.closest(key, pool) for key, _ in self.unknown}
        return [
            explained(Problem(key, "is not a key", keys.ANY_KEY, close[key], f"the override {word}"))
            for key, word in self.unknown
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
        elif override is None or not override.key_or_group:
            result.problems.append(_not_an_override(word, words[number + 1 :]))
        elif (checked := _checked(override, word, schema, groups, multirun=multirun)) is None:
            result.unknown.append((override.key_or_group, word))
        elif isinstance(checked, Problem):
            result.problems.append(replace(checked, origin=f"the override {word}"))
        else:
            result.accepted.append(checked)
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
        allowed = "values such as 1,2 or range(3), or sweep=optuna with search.KEY={log: [1e-4, 1e-1]}"
        return Problem(key, reason, ", ".join(options or []) or allowed)
    # A group takes names of options, everything else takes values
    if options is not None and not isinstance(value, dict):
        return _checked_group(override, word, options)
    annotation = keys.find(schema, key)
    if annotation is None:
        return None
    if override.is_delete():
        why = "cannot be deleted: it is part of the schema"
        return word if annotation is Any else Problem(key, why, f"set it to {keys.describe(annotation)}")
    # New keys are allowed where the schema is open, such as arguments of a custom class
    may_be_new = annotation is Any or keys.is_open(annotation)
    return ("++" if may_be_new else "") + word.lstrip("+")


def _checked_group(override: Override, word: str, options: list[str]) -> str | Problem:
    """The choice of an option for Hydra, or its problem."""
    key, value = override.key_or_group, override.value()
    if override.is_delete():
        return "~" + word.lstrip("+~")
    if override.is_sweep_override():
        names = [str(each).strip("'\"") for each in override.sweep_string_iterator()]
    else:
        names = ["null" if each is None else str(each) for each in (value if isinstance(value, list) else [value])]
    for name in names:
        if name not in options and name not in ("null", "") and not name.startswith("_"):
            return explained(_no_option(key, name, options), name)
    # Selecting none and others at once contradicts itself
    if "none" in names and len(names) > 1 and not override.is_sweep_override():
        others = ",".join(name for name in names if name != "none")
        return Problem(key, "cannot be none and others at once", f"{key}=none, or {key}=[{others}]")
    if names == ["null"]:
        return f"~{key}"  # Hydra takes null in files only
    if isinstance(value, int | float):
        return f"{key}='{names[0]}'"  # a name such as nan is a number to Hydra
    return word.lstrip("+")


def _no_option(group: str, name: str, options: list[str]) -> Problem:
    """The problem of an option that there is not, with what is meant by it."""
    message, allowed = f"has no option '{name}'", ", ".join(options) or "none"
    bare = name.replace("\\", "/").rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
    meant = keys.value_meant(group, name) or nearest(bare, options)
    if (words := keys.by_class(group, name)) and not (meant and group == "model"):
        allowed = f"{allowed}; {words} for a class"
    if group == "data" and ("/" in name or Path(name).is_dir()):
        meant = f"data=image_folder data.root={name}"
    return Problem(group, message, allowed, meant)


def _wrong_sweep(override: Override, is_group: bool) -> str:
    """The reason why a sweep has no jobs, or an empty string."""
    if override.is_interval_sweep():
        return "is chosen by name, and an interval has none" if is_group else "cannot be an interval"
    if isinstance(override.value(), Glob):
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
    idle = [key for key in found if key != "hydra" and not keys.within(key, _HYDRA_KEYS)]
    return [Problem(key, "has no effect", allowed) for key in idle]
