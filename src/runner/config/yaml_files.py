"""YAML files with the lines that their keys stand on, and what is wrong with one that cannot be read, in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from runner.config.errors import ConfigError, Problem, UserError
from runner.config.reading import read_regular

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN = "tag:yaml.org,2002:"
_QUOTES = "quotes around the text"


def compose(path: Path) -> yaml.Node | None:
    """The nodes of a YAML file, each with its position; None for a file without any.

    Raises:
        ConfigError: if it is not YAML, with the line, the column, and what to change.
        UserError: if it cannot be read.
    """
    text = _text(path)
    try:
        node: Any = yaml.compose(text, Loader=_LOADER)
    except (yaml.YAMLError, RecursionError):
        try:  # again in Python, whose messages are more exact
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, int(error.position)) + 1
            message = f"has the character {chr(int(error.character))!r}, which YAML does not allow"
            raise ConfigError([Problem(f"{path}:{line}", message, "the line without it")]) from error
        except yaml.MarkedYAMLError as error:
            raise ConfigError([_syntax(path, text, error)]) from error
        except RecursionError as error:
            raise ConfigError([Problem(str(path), "is nested too deeply", "fewer levels")]) from error
    return node  # type: ignore[no-any-return]


def _text(path: Path) -> str:
    """The text of a file; the byte order mark and other encodings are refused."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise UserError(f"cannot read the config file {path}: {error.strerror or error}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or data[1:2] == b"\0":
        raise ConfigError([Problem(str(path), "is saved as UTF-16", "the file saved as UTF-8")])
    if data.startswith(b"\xef\xbb\xbf"):
        message = "begins with a byte order mark (BOM), which hides what the first line says"
        raise ConfigError([Problem(f"{path}:1", message, "the file saved as UTF-8 without a BOM")])
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = "has a character that is not UTF-8"
        raise ConfigError([Problem(f"{path}:{line}:{column}", message, "the file saved as UTF-8")]) from error


def _syntax(path: Path, text: str, error: yaml.MarkedYAMLError) -> Problem:
    """What is meant by an error of PyYAML's."""
    lines = [*text.splitlines(), ""]
    mark, start = error.problem_mark or error.context_mark, error.context_mark
    assert mark is not None
    said = str(error.problem)
    line = lines[min(mark.line, len(lines) - 1)]
    message, allowed = f"is not YAML: {said}", _QUOTES
    if "\\t" in said or "\t" in line[: len(line) - len(line.lstrip())]:
        message, allowed = "begins with a tab", "spaces: YAML does not take tabs"
    elif "quoted scalar" in str(error.context) and start is not None:
        mark, message, allowed = start, "has a quote that is not closed", "the same quote at the end of the text"
    elif "flow" in str(error.context) and start is not None:
        sign = lines[start.line][start.column : start.column + 1]
        mark, message = start, f"has a {sign} that is not closed"
        allowed = f"{ {'[': ']', '{': '}'}.get(sign, sign) } at the end, with commas between the items"
    elif said.startswith("found undefined alias"):
        name = said.split("'")[1]
        message, allowed = (
            f"uses the anchor *{name}, which is not defined",
            f"&{name} at an earlier value, or {_QUOTES}",
        )
    elif "cannot start any token" in said or "directive" in str(error.context):
        message = f"begins a value with {line[mark.column : mark.column + 1] or '%'}, which is reserved in YAML"
        message = "begins with %, which is reserved in YAML" if line.startswith("%") else message
    elif "another document" in said:
        message, allowed = "begins a second document", "the file without ---"
    elif match := _without_space(lines, mark.line):
        number, key, value = match
        at = f"{path}:{number + 1}:{lines[number].index(key) + 1}"
        return Problem(at, f"'{key}:{value}' has no space after the colon", f"{key}: {value}")
    elif "mapping values are not allowed" in said and ": " in line.partition(": ")[2]:
        message = f"has a second colon in '{line.strip()}'"
    elif said in ("mapping values are not allowed here", "could not find expected ':'") or "<block end>" in said:
        message, allowed = "is indented differently from the lines it belongs to", "the same number of spaces"
        if "could not find" in said or (":" not in line and not line.lstrip().startswith("-")):
            message, allowed = f"'{line.strip()}' is not 'key: value'", "a colon and a space after the key"
    return Problem(f"{path}:{mark.line + 1}:{mark.column + 1}", message, allowed)


def _without_space(lines: list[str], last: int) -> tuple[int, str, str] | None:
    """The nearest line up to `last` that lacks a space after its colon, as (its index, key, value)."""
    for number in range(min(last, len(lines) - 1), max(last - 2, -1), -1):
        if match := re.fullmatch(r"\s*([A-Za-z_]\w*):([\w.'\"\[{][^#]*?)\s*(#.*)?", lines[number]):
            return number, match[1], match[2]
    return None


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


def place(path: Path, node: yaml.Node) -> str:
    """Where a node stands, as `file:line:column`."""
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def is_text(node: yaml.Node) -> bool:
    """Whether a node is text, and not a number, null, true, a mapping or a list."""
    return isinstance(node, yaml.ScalarNode) and node.tag == _PLAIN + "str"


def is_plain(node: yaml.Node) -> bool:
    """Whether a node has no tag that would build an object of Python's."""
    names = ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
    return str(node.tag).removeprefix(_PLAIN) in names
