"""Dotted keys: those of the schema and their values, those of other programs, and what lies under one in nested values."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from runner.base.errors import nearest
from runner.config.schema.sections import HasTarget
from runner.config.schema.train import Search, Train

T = TypeVar("T", bound=Train)

_ALIKE = 0.72  # how much alike two keys are spelled; below, guesses were wrong
_TOO_GENERAL = ("trainer", "training", "run", "main", "hparams", "params")  # sections of other programs
OF_THE_SWEEP = ("sweep", "search")
"""Keys about a sweep as a whole, which its jobs do not get."""
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}  # by attributes of annotated_types
_TABLE = Path(__file__).with_name("synonyms.txt").read_text(encoding="utf-8").splitlines()[1:]
MEANINGS = {name: meaning for meaning, _, names in (line.partition(": ") for line in _TABLE) for name in names.split()}
"""The meaning here of each name of other programs, for messages only: a key, `key=value`, or several words."""


@functools.cache
def hints(section: type) -> dict[str, Any]:
    """Keys of a dataclass with their full annotations: its fields' names, without the `_` that avoids Python's keywords."""
    return {name.removesuffix("_"): kind for name, kind in get_type_hints(section, include_extras=True).items()}


def members(annotation: Any) -> list[Any]:
    """The alternatives of a union, unions inside it flattened; any other annotation alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for member in get_args(annotation) for inner in members(member)]
    return [annotation]


def bare(annotation: Any) -> Any:
    """An annotation without the constraints around it."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def is_node(annotation: Any) -> bool:
    """Tell whether values of this annotation are components: mappings with `_target_`."""
    return any(isinstance(mark, HasTarget) for mark in getattr(annotation, "__metadata__", ()))


def component_inside(annotation: Any) -> Any:
    """The annotation of the components in a list or mapping of them; None for any other annotation."""
    insides = (get_args(bare(member)) for member in members(annotation))
    return next((inside[-1] for inside in insides if inside and is_node(inside[-1])), None)


def is_open(annotation: Any) -> bool:
    """Tell whether a value of this annotation holds keys that the schema does not list (components)."""
    return any(get_origin(bare(member)) in (dict, list) for member in members(annotation))


def find(section: type, key: str) -> Any:
    """The annotation of a dotted key; `Any` inside an open section; None for a key that does not exist."""
    annotation: Any = section
    for part in key.split("."):
        if dataclasses.is_dataclass(annotation):
            # What is not a setting of a search is a key that it varies, which the search itself looks at.
            annotation = hints(annotation).get(part, Any if annotation is Search else None)  # type: ignore[arg-type]
            if annotation is None:
                return None
        elif annotation is Any or is_open(annotation):
            annotation = Any
        else:
            return None
    return annotation


def all_keys(section: type, prefix: str = "") -> list[str]:
    """Dotted names of every field, sections included."""
    keys = []
    for name, annotation in hints(section).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(annotation):
            keys += all_keys(annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
    return keys


def within(path: str, prefixes: Iterable[str]) -> bool:
    """Tell whether a dotted path is one of the prefixes, or inside one."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)


def key_of(word: str) -> str:
    """The key or group that an override is about."""
    return word.partition("=")[0].lstrip("+~")


def says(key: str, words: Iterable[str]) -> bool:
    """Tell whether a command line names a key, or one inside it."""
    return any(within(key_of(word), [key]) for word in words)


def is_of_hydra(word: str) -> bool:
    """Tell whether an override is about Hydra itself, such as `+hydra.launcher.threads=1` and `hydra/launcher=pool`."""
    return key_of(word).startswith(("hydra/", "hydra."))


def closest(key: str, pool: Sequence[str]) -> str:
    """The key of `pool` that is meant by a wrong one, or the words that set it; empty if none comes close.

    It has the same last part, is what another program calls so, or is spelled much like it.
    """
    # The same last part is the best hint: users often forget the section
    by_leaf = {candidate.rpartition(".")[2]: candidate for candidate in reversed(pool)}
    leaf = key.rpartition(".")[2]
    same_leaf = [candidate for candidate in pool if candidate.rpartition(".")[2] == leaf]
    return (
        min(same_leaf, key=len, default="")
        or next((each for each in pool if each == f"{key}s"), "")
        or key_meant(key)
        or nearest(key, pool, _ALIKE)
        or ("" if leaf in _TOO_GENERAL else by_leaf.get(nearest(leaf, by_leaf, _ALIKE), ""))
    )


def _plain(word: str) -> str:
    """A name in the spelling of the table: `--Learning-Rate` as `learning_rate`."""
    return word.lstrip("-+~").replace("-", "_").lower()


def key_meant(key: str) -> str:
    """The meaning of a dotted key that other programs have, whole or by its last part; an empty string if nothing is known."""
    word = _plain(key)
    return MEANINGS.get(word) or MEANINGS.get(word.rpartition(".")[2], "")


def value_meant(key: str, value: object) -> str:
    """The value of a key or option of a group that is meant by one of other programs, maybe with keys after it; or nothing."""
    meaning = MEANINGS.get(f"{key}={_plain(str(value))}", "").removeprefix(f"{key}=")
    return f"ckpt_path={value}" if not meaning and key == "resume" else meaning


def by_class(group: str, name: str) -> str:
    """The words that choose a class where an option of a group is expected: one of a library by its name, or any by its path."""
    if "." in name and all(part.isidentifier() for part in name.split(".")) and not name.endswith((".yaml", ".yml")):
        words = f"{group}._target_={name}"
        return f"'~{group}' '+{words}'" if group in ("callbacks", "logger") else words
    if name[:1].islower() and group != "model":
        return ""
    ways = {
        "model": f"model=torchvision model.name={_plain(name)}",
        "scheduler": f"scheduler=torch scheduler.name={name}",
        "optimizer": f"optimizer._target_=torch.optim.{name}",
        "loss": f"loss._target_=torch.nn.{name}",
    }
    return ways.get(group, "")


ANY_KEY = "a key of the schema (python -m runner show prints them all)"


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested mapping with their leaf values; empty mappings count as leaves."""
    if isinstance(values, dict) and (values or not prefix):
        leaves: dict[str, Any] = {}
        for name, value in values.items():
            leaves |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
        return leaves
    return {prefix: values}


def at(values: Any, key: str) -> Any:
    """The value under a dotted key of nested mappings and lists; `...` if there is none."""
    for part in key.split("."):
        if isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        elif isinstance(values, dict) and part in values:
            values = values[part]
        else:
            return ...
    return values


def put(values: Any, key: str, value: Any) -> None:
    """Set a dotted key of nested mappings and lists, or delete it if the value is `...`; what is in the way becomes a mapping."""
    part, _, rest = key.partition(".")
    place, inner = int(part) if isinstance(values, list) else part, at(values, part)
    if rest:
        if not isinstance(inner, dict) and at(inner, rest.partition(".")[0]) is ...:
            inner = values[place] = {}
        put(inner, rest, value)
    elif value is not ...:
        values[place] = value
    elif inner is not ...:
        del values[place]


def to_plain(config: Train) -> dict[str, Any]:
    """The config as a new tree of plain containers, keys as in YAML, in the order of the schema."""
    # `async_` is the field of the key `async`.
    return dataclasses.asdict(
        config, dict_factory=lambda pairs: {name.removesuffix("_"): value for name, value in pairs}
    )


def with_changes(config: T, changes: Mapping[str, Any]) -> T:
    """The config with other values under dotted keys, such as `{"optimizer.lr": 0.1}`; the values are not validated."""
    for key, value in changes.items():
        config = _with(config, key, copy.deepcopy(value))
    return config


def _with(section: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    inside = section if isinstance(section, dict) else vars(section)
    changed = {name: _with(inside[name], rest, value) if rest else value}
    return section | changed if isinstance(section, dict) else dataclasses.replace(section, **changed)


def walk(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of nested mappings and lists, outer ones first; items of lists by number."""
    yield prefix, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from walk(inner, f"{prefix}.{name}" if prefix else str(name))


def describe(annotation: Any) -> str:
    """The values that an annotation admits, in words, such as `a whole number of at least 1, or null`."""
    words: list[str] = []
    for member in members(annotation):
        words += _words(member)
    words.sort(key=lambda word: word == "null")
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _words(member: Any) -> list[str]:
    inner, *limits = get_args(member) if get_origin(member) is Annotated else (member,)
    if is_node(member):
        return ["a mapping with _target_"]
    if get_origin(inner) is Literal:
        return [str(choice) for choice in get_args(inner)]
    if inner is bool:
        return ["true", "false"]
    if dataclasses.is_dataclass(inner):
        return ["a mapping of " + ", ".join(hints(inner))]  # type: ignore[arg-type]
    if get_origin(inner) is tuple and ... not in get_args(inner):
        return [f"a list of {len(get_args(inner))}: {', '.join(map(describe, get_args(inner)))}"]
    if get_origin(inner) in (list, tuple):
        return [f"a list, each item {describe(get_args(inner)[0])}"]
    if get_origin(inner) is dict:
        return [f"a mapping of names, each to {describe(get_args(inner)[1])}"]
    bounds = [
        f"{words} {getattr(limit, name)}" for limit in limits for name, words in _BOUNDS.items() if hasattr(limit, name)
    ]
    names = {int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return [" ".join([names.get(inner, "any value"), " and ".join(bounds)]).rstrip()]
