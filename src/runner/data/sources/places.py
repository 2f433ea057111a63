"""Where reading data fails: in a file, or in a part of it. One sentence for all formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from PIL import UnidentifiedImageError

from runner.base.errors import UserError

T = TypeVar("T")


class Place:
    """Errors in the block become a `UserError` that names what is read, but `MemoryError` and those that are one already.

    Args:
        name: what is read, such as a file.
        key, allowed: see `UserError`.
    """

    def __init__(self, name: object, key: str = "", allowed: str = "") -> None:
        self.name, self.part, self.key, self.allowed = name, "", key, allowed

    def each(self, section: str, entries: Iterable[T]) -> Iterator[T]:
        """The entries of a list; errors name the last one that was given."""
        for number, entry in enumerate(entries):
            self.part = f"{section}[{number}] of "
            yield entry
        self.part = ""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        # Readers of untrusted files raise a dozen types, SyntaxError among them
        if isinstance(error, Exception) and not isinstance(error, UserError | MemoryError):
            problem = f"cannot read {self.part}{self.name}: {reason_of(error)}"
            raise UserError(self.key, problem, self.allowed) from error


def reason_of(error: Exception) -> str:
    """What is wrong with what was read, in one line and without the names of Python's objects."""
    text = (getattr(error, "strerror", None) or "").lower() or str(error)
    if isinstance(error, KeyError):
        text = f"there is no {error}"
    elif isinstance(error, RecursionError):
        text = "it is nested too deeply"
    elif isinstance(error, UnidentifiedImageError):
        text = "its content is not an image of a known type"
    elif isinstance(error, UnicodeDecodeError):
        text = "it is not UTF-8 text"
    elif isinstance(error, json.JSONDecodeError):
        text = f"it is not JSON, or cut short: {error}"
    return " ".join(text.split()) or type(error).__name__
