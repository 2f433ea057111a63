"""YAML files: with the lines that their keys stand on, and untrusted text as plain containers."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from runner.base.errors import ConfigError, Problem, UserError, first_line
from runner.config.sources import text_of

_LONGEST = 2**18  # characters; configs have about six thousand, and reading takes a second for each such length
_TAGS = [f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")]
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def compose(path: Path) -> yaml.Node | None:
    """The nodes of a YAML file, each with its position; None for a file without any.

    Raises:
        ConfigError: if it is not YAML, see `refusing`.
        UserError: if it cannot be read.
    """
    text = text_of(path)
    with refusing(path):
        node: yaml.Node | None = yaml.compose(text, Loader=_LOADER)
    return node


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Give what PyYAML says of a file as a problem.

    Raises:
        ConfigError: with the line and the column.
    """
    try:
        yield
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        said = ", ".join(getattr(error, name, None) or "" for name in ("context", "problem")).strip(", ")
        message = f"is not YAML: {said or first_line(error)}"
        raise ConfigError([Problem(at, message)]) from error


def walk(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Every (dotted key, node of the key, node of the value) of nested mappings; items of lists by number, with themselves."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}.{key.value}" if prefix else str(key.value)
            yield name, key, value
            yield from walk(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield f"{prefix}.{number}", item, item
            yield from walk(item, f"{prefix}.{number}")


def line_of(path: Path, key: str) -> int | None:
    """The line, from 1, on which a file gives a dotted key; None if it does not."""
    try:
        return next((at.start_mark.line + 1 for name, at, _ in walk(compose(path)) if name == key), None)
    except UserError:
        return None


def inherited_by(path: Path) -> list[str]:
    """The names in the defaults list of a file that can be read: options of its own group that it inherits keys from."""
    found = [node.value for name, _, node in walk(compose(path)) if re.fullmatch(r"defaults\.\d+", name)]
    return [name for name in found if isinstance(name, str) and name != "_self_"]


class _PlainLoader(yaml.SafeLoader):
    """Reads texts, numbers, lists and mappings with text as keys; refuses what would take much time or memory."""

    yaml_constructors = {  # noqa: RUF012  as PyYAML has it
        None: yaml.SafeLoader.yaml_constructors[None],
        **{tag: yaml.SafeLoader.yaml_constructors[tag] for tag in _TAGS},
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # A few lines of aliases of aliases stand for more values than fit into memory.
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has YAML aliases")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} has a key that is not text")
        return super().construct_mapping(node, deep)


@functools.lru_cache(maxsize=8)
def plain(text: str, where: str) -> Any:
    """YAML text as plain containers, which nobody may change.

    Raises:
        UserError: if it is not YAML, is long, or asks for objects.
    """
    # A config is short; longer text is an attempt to exhaust memory
    if len(text) > _LONGEST:
        raise UserError(f"{where}: its config is not plain YAML: it has over {_LONGEST:,} characters")
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except Exception as error:  # the reader raises whatever a value's text makes Python raise
        raise UserError(f"{where}: its config is not plain YAML: {first_line(error)}") from error
