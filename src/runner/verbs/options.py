"""`list`, `show` and `copy`: options, their files and their keys with comments; `env`. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from runner.base.errors import UserError, nearest
from runner.base.files import make_folder, write_atomically, writing
from runner.config.sources import Option, Sources, text_of
from runner.verbs._table import VERBS, sources_and_words, split_words


class Commented(NamedTuple):
    """A key in a YAML file."""

    key: str  # dotted, with the group in front
    value: str  # as it is written; empty for a section
    comment: str
    option: str  # `group=option`, or the name of a primary config


def list_options(argv: Sequence[str]) -> int:
    """Print all groups with their options, or only the groups named."""
    sources, words = sources_and_words("list", argv)
    for group in words or sources.groups():
        options = _options("list", group, sources)
        print(group)
        width = max((len(option.name) for option in options), default=0)
        for option in options:
            print(f"  {option.name:<{width}}  {option.description}".rstrip())
    return 0


def copy(argv: Sequence[str]) -> int:
    """Copy an option to your config folder: `copy model=vit_tiny my_conf`.

    The copy is named `my_vit_tiny`, or as `--name NAME` says: of two files with one name, the shipped one is read.
    """
    words, flags = split_words("copy", argv, {"--name": "NAME", "--config-dir": "DIR"})
    given = dict(flags)
    sources = Sources([Path(given["--config-dir"])] if "--config-dir" in given else [])
    if len(words) != 2 or "=" not in words[0]:
        raise UserError("copy", "needs an option and a folder", "copy model=vit_tiny my_conf")
    group, _, name = words[0].partition("=")
    option, new = option_named("copy", group, name, sources), given.get("--name", f"my_{name}")
    path = Path(words[1]) / group / f"{new}.yaml"
    # Two options of one name would hide each other
    if path.exists() or sources.option(group, new) is not None:
        problem = f"{path} exists already" if path.exists() else f"{group} has an option '{new}' already"
        raise UserError("copy", problem, "another name, with --name NAME")
    # The header of the file shows how the option is selected, so it gets the new name
    text = text_of(option.path).replace(f"{group}={name}", f"{group}={new}")
    with writing(path, "copy", "another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
    has_schema = group in sources.groups()
    write_atomically(path, (with_modeline(group, text) if has_schema else text).encode())
    if has_schema:
        print(f"for completion in editors: python -m runner show --schema {words[1]}")
    print(f"change {path}, then: python -m runner train --config-dir {words[1]} {group}={new}")
    print(path)
    return 0


def with_modeline(group: str, text: str) -> str:
    """The text of an option's file with a line that names its schema for editors, which `show --schema FOLDER` writes."""
    line = f"# yaml-language-server: $schema={'../' * (group.count('/') + 1)}.schema/{group}.json\n"
    # Hydra looks for its package in the lines above any other comment
    first, _, rest = text.partition("\n")
    return f"{first}\n{line}{rest}" if first.startswith("# @") else line + text


def show(argv: Sequence[str]) -> int:
    """Print the files of options (`group=option` or `group/option`), the lines of a key (`optimizer.lr`), or all top-level keys.

    With `--schema`, print the JSON schema of a primary config (`train` if none is named) or of the files of a group (`model`), or
    write those of all groups into a folder of options, where the files that `copy` and `new` write look for them.
    """
    if "--schema" in argv:
        return _show_schemas([word for word in argv if word != "--schema"])
    sources, words = sources_and_words("show", argv)
    known = [f"data={option.name}" for option in sources.options("data")]
    if any(word.startswith("data=") and word not in known for word in words):
        from runner.config.data_path import written_out  # imports Hydra

        words, found = written_out(words, sources)
        print(f"# {found}\n\n" * bool(found), end="")
        words = [word for word in words if not (found and word.startswith("data."))]
    for word in words or ["train"]:
        if files := _files(word, sources):
            for path in files:
                print(f"# {path}")
                print(text_of(path).rstrip(), end="\n\n")
        else:
            print("\n".join(_explained(word, sources)), end="\n\n")
    return 0


def _show_schemas(argv: Sequence[str]) -> int:
    sources, words = sources_and_words("show", argv)
    name, *others = words or ["train"]
    if others:
        raise UserError("show", f"--schema is for one config, group or folder, and not for {' '.join(words)}", name)
    folder = Path(name) if name not in (*VERBS, *sources.groups()) and Path(name).is_dir() else None
    if folder is not None:
        sources = Sources([*sources.extra, folder])
    elif not (name in VERBS and VERBS[name].takes_config):
        _options("show", name, sources)
    from runner.verbs._schema import json_schemas  # imports torch

    comments = {(each.option, each.key): each.comment for each in _commented(sources)}
    with contextlib.redirect_stdout(sys.stderr):  # what modules of a user's own print
        schemas = json_schemas([name] if folder is None else sources.groups(), sources, comments)
    if folder is None:
        print(json.dumps(schemas[name], indent=1))
        return 0
    for group, schema in schemas.items():
        path = folder / ".schema" / f"{group}.json"
        make_folder(path.parent)
        write_atomically(path, json.dumps(schema).encode())
        print(path)
    return 0


def env(argv: Sequence[str]) -> int:
    """Print the environment as a table, or as JSON with `--json`, which stands for `json=true`."""
    if wrong := [word for word in argv if word != "json=true"]:
        raise UserError("env", f"unknown argument '{wrong[0]}'", "--json")
    from runner.tracking.environment import environment, lines

    found = environment()
    if argv:
        print(json.dumps(found, indent=2))
        return 0
    rows = lines(found)
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    return 0


def _files(word: str, sources: Sources) -> list[Path]:
    """The files of the options that a word names; none for a key."""
    primary = sources.primary(word)
    if primary is not None:
        return [primary]
    group, _, name = word.replace("=", "/").rpartition("/")
    if not group:
        return [option.path for option in sources.options(name)] if name in sources.groups() else []
    return files_of(option_named("show", group, name, sources))


def _options(verb: str, group: str, sources: Sources) -> list[Option]:
    """The options of a group; raises `UserError` if there is no such group."""
    if group not in (groups := sources.groups()):
        raise UserError(verb, f"there is no group '{group}'", ", ".join(groups), nearest(group, groups))
    return sources.options(group)


def option_named(verb: str, group: str, name: str, sources: Sources) -> Option:
    """The option `name` of a group; raises `UserError` if there is none."""
    option = sources.option(group, name)
    if option is None:
        names = [known.name for known in _options(verb, group, sources)]
        raise UserError(verb, f"{group} has no option '{name}'", ", ".join(names), nearest(name, names))
    return option


def files_of(option: Option) -> list[Path]:
    """The file of an option, and the file that it shares with others of its group."""
    base = option.path.with_name("_base.yaml")
    uses_base = base.is_file() and "_base" in text_of(option.path)
    return [option.path, base] if uses_base else [option.path]


def _explained(key: str, sources: Sources) -> list[str]:
    """The lines of the files that give a key, or keys inside it, with comments; then its values; `UserError` if there is none."""
    from runner.config import keys
    from runner.config.schema import VERBS as SCHEMAS

    known = list(_commented(sources))
    places = [place for place in known if place.value and keys.within(place.key, [key])]
    kinds = [keys.describe(kind) for schema in SCHEMAS.values() if (kind := keys.find(schema, key)) is not None]
    if not places:
        close = keys.closest(key, [*dict.fromkeys(place.key for place in known), *sources.groups()])
        allowed = "group=option, a group, or a key (python -m runner show prints the top-level keys)"
        raise UserError("show", f"there is no group and no key '{key}'", allowed, close)
    width = max(len(place.option) for place in places)
    lines = [f"{place.option:<{width}}  {place.key}: {place.value}  # {place.comment}" for place in places]
    return [key, *lines, *(f"values: {kind}" for kind in kinds[:1] if kind != "any value")]


def _commented(sources: Sources) -> Iterator[Commented]:
    """Every key of the primary configs and of the options, with the comment beside it."""
    for verb in ("train", *(verb.name for verb in VERBS.values() if verb.takes_config and verb.name != "train")):
        if path := sources.primary(verb):
            yield from _read(path, "", verb)
    for group in sources.groups():
        shared = dict[Path, str]()  # files that several options share, once
        for option in sources.options(group):
            own, *base = files_of(option)
            section = "" if option.is_global else f"{group.replace('/', '.')}."
            yield from _read(own, section, f"{group}={option.name}")
            shared |= dict.fromkeys(base, section)
        for path, section in shared.items():
            yield from _read(path, section, group)


def _read(path: Path, section: str, option: str) -> Iterator[Commented]:
    from runner.config.yaml_files import compose, walk  # imports PyYAML, which `list` does without

    lines, last = text_of(path).splitlines(), -1
    for name, key, value in walk(compose(path)):
        # Items of lists have no comment, nor have keys that share the line of another.
        if key is not value and key.start_mark.line != last and name.split(".")[0] not in ("defaults", "hydra"):
            last = key.start_mark.line
            given, _, comment = lines[last][key.end_mark.column + 1 :].partition("#")
            yield Commented(section + name, given.strip(), comment.strip(), option)
