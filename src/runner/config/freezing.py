"""Parses `freeze` and `unfreeze_at`: what is frozen, and until when."""

from __future__ import annotations

import re
from dataclasses import dataclass

ALL_BUT_HEAD = "all-but-head"
MOMENT = "a number of optimizer steps such as 100, or of epochs such as 2ep, from 1 on"
_MOMENT = re.compile(r"([1-9]\d*)(ep)?")


@dataclass(frozen=True)
class Entry:
    """Modules and parameters that are frozen together; with neither a number of steps nor of epochs, permanently."""

    pattern: str  # of their names, or `all-but-head`
    steps: int | None  # of the optimizer
    epochs: int | None


def entries(freeze: str | list[str] | None, unfreeze_at: str | int | None) -> list[Entry]:
    """The entries that `freeze` lists; `unfreeze_at` applies to entries without their own moment, such as the one in `stem@2ep`.

    Raises:
        ValueError: if something is not a moment, or there is no pattern before it; the message says what.
    """
    words = [freeze] if isinstance(freeze, str) else freeze or []
    found = []
    for word in words:
        pattern, at, own = word.partition("@")
        if not pattern or (at and not own):
            raise ValueError(f"'{word}' is not a pattern, or a pattern with @ and a moment")
        found.append(Entry(pattern, *moment(own if at else unfreeze_at)))
    return found


def moment(text: str | int | None) -> tuple[int | None, int | None]:
    """Steps and epochs of `100`, `2ep` or null; one of them is None, or both.

    Raises:
        ValueError: if it is none of these.
    """
    if text is None:
        return None, None
    matched = _MOMENT.fullmatch(str(text))
    if matched is None:
        raise ValueError(f"'{text}' is not {MOMENT}")
    number = int(matched[1])
    return (None, number) if matched[2] else (number, None)
