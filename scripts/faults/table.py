"""What a section found, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any


@dataclass
class Row:
    """A kind of fault, how often it was injected, and how often the program kept its promise.

    Attributes:
        section: name of the section.
        what: the fault.
        injected: how often.
        kept: how often everything was as promised.
        note: what else people should know.
    """

    section: str
    what: str
    injected: int = 0
    kept: int = 0
    note: str = ""

    def count(self, broken: str, say: Callable[[str], None]) -> None:
        """Count one more; `broken` says what was not as promised, and is empty if all was."""
        self.injected += 1
        self.kept += not broken
        if broken:
            say(f"BROKEN {self.section}, {self.what}: {broken}")

    @property
    def broken(self) -> bool:
        """Whether a promise was broken."""
        return self.kept < self.injected

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "section": self.section,
            "what": self.what,
            "injected": self.injected,
            "kept": self.kept,
            "note": self.note,
        }


@dataclass
class Bench:
    """What a section works with.

    Attributes:
        folder: scratch folder of its own.
        draw: random numbers of its own.
        counts: how many of what, by name, see `COUNTS` in `torture.py`.
        say: takes a line for people.
        launchers: of sweeps.
    """

    folder: Path
    draw: Random
    counts: dict[str, int]
    say: Callable[[str], None] = field(default=print)
    launchers: tuple[str, ...] = ("basic", "pool")


def text_table(rows: Iterable[Row]) -> str:
    """A table for the terminal."""
    cells = [("section", "fault", "injected", "as promised", "note")]
    cells += [(row.section, row.what, str(row.injected), str(row.kept), row.note) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]) for line in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(rows: Iterable[Row]) -> str:
    """A table for the docs."""
    lines = ["| section | fault | injected | as promised |", "|---|---|---|---|"]
    for row in rows:
        what = f"{row.what} ({row.note})" if row.note else row.what
        lines.append(f"| `{row.section}` | {what} | {row.injected} | {row.kept} |")
    return "\n".join(lines)
