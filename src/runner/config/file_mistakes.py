"""Mistakes in a config file that Hydra would take for something else: found before it reads the file."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import yaml

from runner.base.errors import Problem, nearest
from runner.config import yaml_files
from runner.config.sources import Sources, text_of
from runner.config.yaml_files import place

_GLOBAL = "# @package _global_"


def problems_in_file(path: Path, folder: Path, sources: Sources) -> list[Problem]:
    """The mistakes in a file of `folder`, which Hydra is about to read.

    Raises:
        ConfigError: if it is not YAML.
        UserError: if it cannot be read.
    """
    stat = path.stat()
    return _problems(path, path.relative_to(folder).parent.as_posix(), sources, (stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=512)
def _problems(path: Path, group: str, sources: Sources, version: tuple[int, int]) -> list[Problem]:
    root = yaml_files.compose(path)
    # A file that forgets its package line would set keys below its group, without an error
    shipped = next((sources.folders[0] / group).glob("*.yaml"), path)
    if _GLOBAL in text_of(shipped) and _GLOBAL not in text_of(path):
        return [Problem(f"{path}:1", f"has no '{_GLOBAL}', so its keys lie under '{group}'", f"{_GLOBAL} as line 1")]
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        return [Problem(place(path, root), "is not a mapping", "key: value, one on each line, without a dash")]
    found, seen = [], dict[str, int]()
    # YAML keeps the last of two equal keys and says nothing
    for name, key, value in yaml_files.walk(root):
        if key is value:  # an item of a list
            continue
        if name in seen:
            message = f"'{name}' is given twice, first in line {seen[name]}"
            found.append(Problem(place(path, key), message, "one of the two"))
        seen.setdefault(name, key.start_mark.line + 1)
        last = str(key.value)
        # A misspelt _target_ would become an ordinary argument
        if last.strip("_") == "target" and last != "_target_" and (last != "target" or "." in str(value.value)):
            message = f"'{last}' is not a key of a component"
            found.append(Problem(place(path, key), message, f"_target_: {value.value}", "_target_"))
        if name == "defaults":
            found += _defaults(path, value, group, sources)
    return found


def _defaults(path: Path, node: yaml.Node, group: str, sources: Sources) -> Iterator[Problem]:
    """The mistakes in the defaults list of a file of a group."""
    if not isinstance(node, yaml.SequenceNode):
        example = "a list, such as\n        defaults:\n          - override /model: mlp"
        yield Problem(
            place(path, node), "defaults is not a list: each line needs a dash and a space before it", example
        )
        return
    for item in node.value:
        plain = isinstance(item, yaml.ScalarNode) and item.value != "_self_" and not set("/@ ") & set(item.value)
        if plain and group in sources.groups():
            yield from _options(path, group, item, sources)
        for key, value in item.value if isinstance(item, yaml.MappingNode) else ():
            *words, named = str(key.value).split() or [""]
            absolute = named.startswith("/") or group == "."
            full = named.strip("/") if absolute else f"{group}/{named}"
            # Hydra checks these itself
            if "optional" in words or "@" in named or full.startswith("hydra/"):
                continue
            if full not in sources.groups():
                close = f"/{named}" if named in sources.groups() else nearest(full, sources.groups())
                yield Problem(place(path, key), f"there is no group '{full}'", ", ".join(sources.groups()), close)
            elif absolute and group in sources.groups() and "override" not in words:
                fix = f"override {key.value}: {value.value}"
                yield Problem(place(path, key), f"'{key.value}' is chosen already", fix)
            else:
                yield from _options(path, full, value, sources)


def _options(path: Path, group: str, value: yaml.Node, sources: Sources) -> Iterator[Problem]:
    """A problem for each option of a group that does not exist."""
    names = [option.name for option in sources.options(group)]
    for node in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        name = str(node.value)
        if not node.tag.endswith("null") and "${" not in name and sources.option(group, name) is None:
            yield Problem(place(path, node), f"{group} has no option '{name}'", ", ".join(names), nearest(name, names))
