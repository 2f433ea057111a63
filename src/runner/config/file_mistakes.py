"""Mistakes in a config file that Hydra would take for something else: found before it reads the file."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml
from hydra.plugins.config_source import ConfigSource
from omegaconf import grammar_parser

from runner.config import keys, yaml_files
from runner.config.errors import Problem, nearest
from runner.config.sources import Sources
from runner.config.yaml_files import place

_GLOBAL = "# @package _global_"


def problems_in_file(path: Path, folder: Path, schema: type, sources: Sources) -> list[Problem]:
    """What is wrong with a file of `folder`, which Hydra is about to read for a config of `schema`.

    Raises:
        ConfigError: if it is not YAML.
        UserError: if it cannot be read.
    """
    stat = path.stat()
    return _problems(
        path, path.relative_to(folder).parent.as_posix(), schema, sources, (stat.st_mtime_ns, stat.st_size)
    )


@functools.lru_cache(maxsize=512)
def _problems(path: Path, group: str, schema: type, sources: Sources, version: tuple[int, int]) -> list[Problem]:
    root = yaml_files.compose(path)
    text = path.read_text(encoding="utf-8")
    group = "" if group == "." else group
    if not text.strip() and _is_global_group(group, sources):
        return [Problem(str(path), "is empty", f"{_GLOBAL}, and keys below it")]
    package, problems = _package(path, text, group, sources)
    if problems or root is None:
        return problems
    if isinstance(root, yaml.SequenceNode):
        return [Problem(place(path, root), "is a list, where keys are expected", "key: value, without a dash")]
    if not isinstance(root, yaml.MappingNode):
        return [_not_a_mapping(path, root, "")]
    return [
        *_twice(path, root),
        *_defaults(path, root, group, sources),
        *(problem for each in yaml_files.walk(root) for problem in _entry(path, package, schema, sources, *each)),
    ]


def _package(path: Path, text: str, group: str, sources: Sources) -> tuple[str | None, list[Problem]]:
    """The key that a file's keys lie under, None if that is not known, and what is wrong with the line that says so."""
    try:
        package = ConfigSource._get_header_dict(text[:512])["package"]
    except ValueError:
        package = "?"
    needs_global = _is_global_group(group, sources)
    if package == "_global_" or (package is None and not needs_global):
        return "" if package or group in ("", "local") else group.replace("/", "."), []
    if package is None:
        reason = "does not begin with the line '# @package _global_'"
        if "@package" in text:
            reason = "has its '# @package' line below others, where it has no effect"
        return None, [Problem(f"{path}:1", f"{reason}, so its keys would lie under '{group}'", f"{_GLOBAL} as line 1")]
    if package.strip("_").lower() in ("global", "?", "") or needs_global:
        line = next((at for at, line in enumerate(text.splitlines(), 1) if "@package" in line), 1)
        return None, [Problem(f"{path}:{line}", "names an unknown package", _GLOBAL)]
    return None, []


def _is_global_group(group: str, sources: Sources) -> bool:
    """Whether the shipped options of a group set keys at the top level, as an experiment does."""
    shipped = next((sources.folders[0] / group).glob("*.yaml"), None) if group else None
    return shipped is not None and _GLOBAL in shipped.read_text(encoding="utf-8", errors="replace")


def _not_a_mapping(path: Path, node: yaml.Node, key: str) -> Problem:
    """The problem of a value where keys are expected: `width:16`, `width = 16`, or something else."""
    text = str(node.value).splitlines()[0] if isinstance(node, yaml.ScalarNode) and node.value else "null"
    if match := re.match(r"([A-Za-z_]\w*)\s*([:=])\s*(\S+)", text):
        fault = "has no space after the colon" if match[2] == ":" else "has = instead of a colon"
        return Problem(place(path, node), f"'{match[0]}' {fault}", f"{match[1]}: {match[3]}")
    subject = f"{key} is " if key else "is "
    return Problem(place(path, node), f"{subject}'{text}', where keys are expected", "key: value, one on each line")


def _twice(path: Path, root: yaml.Node) -> list[Problem]:
    """A problem for each key that a mapping has twice, at any depth."""
    found, seen = [], dict[str, int]()
    for name, key, value in yaml_files.walk(root):
        if key is value:
            continue
        if name in seen:
            first = seen[name]
            found.append(Problem(place(path, key), f"'{name}' is given twice, first in line {first}", "one of the two"))
        seen.setdefault(name, key.start_mark.line + 1)
    return found


def _entry(
    path: Path, package: str | None, schema: type, sources: Sources, name: str, key: yaml.Node, value: yaml.Node
) -> Iterator[Problem]:
    """What is wrong with one key and its value."""
    if name.split(".")[0] in ("defaults", "hydra"):
        return
    last, at = str(key.value), place(path, key)
    if not yaml_files.is_plain(value):
        yield Problem(
            place(path, value), f"has the tag {value.tag.replace('tag:yaml.org,2002:', '!!')}", "a plain value"
        )
    if isinstance(value, yaml.ScalarNode) and "${" in value.value:
        try:
            grammar_parser.parse(value.value)
        except Exception as error:
            message = f"'{value.value}' is not an interpolation: {str(error).splitlines()[0]}"
            yield Problem(place(path, value), message, "${key}, or \\${ for the text itself")
    if key is value:
        return
    if key.tag.endswith(":null"):
        yield Problem(at, f"'{last or 'null'}' is not a valid YAML key", "a key, or quotes around it")
    if last.strip("_") == "target" and last != "_target_" and (last != "target" or "." in str(value.value)):
        yield Problem(at, f"'{last}' is not a key of a component", f"_target_: {value.value}", "_target_")
    if package is None:
        return
    dotted = f"{package}.{name}" if package else name
    if "." in last and keys.find(schema, dotted) is not None and not dotted.startswith("search."):
        inner = "".join(f"\n{'  ' * depth}{part}:" for depth, part in enumerate(last.split(".")))
        yield Problem(
            at, f"'{last}' is one key to YAML, not {last.count('.') + 1}", f"nested keys, {' '.join(inner.split())} ..."
        )
    elif ("=" in last or ":" in last) and keys.find(schema, last.split("=")[0].split(":")[0].strip()) is not None:
        yield _not_a_mapping(path, key, "")
    elif _holds_keys(schema, dotted) and not isinstance(value, yaml.MappingNode):
        yield from _no_section(path, dotted, value, sources, at)


def _holds_keys(schema: type, key: str) -> bool:
    """Whether every value of a dotted key is a mapping, maybe null apart."""
    members = [member for member in keys.members(keys.find(schema, key)) if member is not type(None)]
    return bool(members) and all(
        dataclasses.is_dataclass(each) or get_origin(keys.bare(each)) is dict for each in members
    )


def _no_section(path: Path, key: str, value: yaml.Node, sources: Sources, at: str) -> Iterator[Problem]:
    """What is wrong with a value where a section or a component is meant."""
    group = key.replace(".", "/")
    if isinstance(value, yaml.SequenceNode):
        yield Problem(place(path, value), f"{key} is a list, where keys are expected", "key: value, without a dash")
    elif not yaml_files.is_text(value) or value.value.startswith("${") or value.value == "???":
        return  # null, or a number that the types refuse
    elif group in sources.groups() and ":" not in value.value and "=" not in value.value:
        names = [option.name for option in sources.options(group)]
        close = value.value if value.value in names else nearest(value.value, names) or "OPTION"
        message = f"'{key}: {value.value}' gives a value, and an option of a group is chosen in the defaults list"
        yield Problem(at, message, f"defaults: [override /{group}: {close}]")
    else:
        yield _not_a_mapping(path, value, key)


def _defaults(path: Path, root: yaml.MappingNode, group: str, sources: Sources) -> Iterator[Problem]:
    """What is wrong with the defaults list of a file."""
    found = [value for key, value in root.value if key.value == "defaults"]
    example = "a list, such as\n        defaults:\n          - override /model: mlp"
    for node in found:
        if not isinstance(node, yaml.SequenceNode):
            message = "defaults is not a list: each line needs a dash and a space before it"
            yield Problem(place(path, node), message, example)
            continue
        for item in node.value:
            if isinstance(item, yaml.MappingNode) and len(item.value) == 1:
                [(key, value)] = item.value
                yield from _default(path, key, value, group, sources)
            elif not yaml_files.is_text(item):
                message = "an item of defaults has to be one option, such as 'override /model: mlp'"
                yield Problem(place(path, item), message, "a dash before each option")
            elif item.value.strip("/").startswith("override"):
                message = f"'{item.value}' has no space after the colon"
                yield Problem(place(path, item), message, item.value.replace(":", ": "))
            elif item.value != "_self_" and not set("@ $:") & set(item.value):
                full = item.value.strip("/") if item.value.startswith("/") or not group else f"{group}/{item.value}"
                own, _, name = full.rpartition("/")
                if own in sources.groups():
                    yield from _options(path, own, yaml.ScalarNode(item.tag, name, item.start_mark), sources)


def _default(path: Path, key: yaml.Node, value: yaml.Node, group: str, sources: Sources) -> Iterator[Problem]:
    """What is wrong with one choice of an option in a defaults list."""
    words = str(key.value).split()
    overrides, optional = "override" in words[:-1], "optional" in words[:-1]
    named = words[-1].split("@")[0]
    full = named.strip("/") if named.startswith("/") or not group else f"{group}/{named}"
    groups = sources.groups()
    if full.startswith("hydra/") or optional or "@" in words[-1]:
        return
    if full not in groups:
        if named in groups:
            fix = f"override /{named}: {value.value}"
            yield Problem(place(path, key), f"'{key.value}' refers to the group {full}, which does not exist", fix)
            return
        close = nearest(named.strip("/"), groups)
        yield Problem(place(path, key), f"there is no group '{named.strip('/')}'", ", ".join(groups), close)
        return
    if not overrides and path.parent.name in groups and named.startswith("/"):
        yield Problem(place(path, key), f"'{key.value}' is chosen already", f"override {key.value}: {value.value}")
        return
    yield from _options(path, full, value, sources)


def _options(path: Path, group: str, value: yaml.Node, sources: Sources) -> Iterator[Problem]:
    """A problem for each option of a group that does not exist."""
    names = [option.name for option in sources.options(group)]
    chosen: Sequence[Any] = value.value if isinstance(value, yaml.SequenceNode) else [value]
    for node in chosen:
        name = str(node.value).removesuffix(".yaml")
        if node.tag.endswith("null") or "${" in name or sources.option(group, name):
            continue
        yield Problem(place(path, node), f"{group} has no option '{name}'", ", ".join(names), nearest(name, names))
