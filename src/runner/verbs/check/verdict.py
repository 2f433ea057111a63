"""What a check is, and what it says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from runner.verbs.check.context import Subject

Status = Literal["pass", "warn", "fail", "skip"]
Lack = Literal["", "time", "images"]


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        status: pass, warn, fail, or skip for a check that does not apply here or could not be run.
        evidence: the numbers; of a skipped check why it was.
        fix: the key to set or what to change; empty where nothing is wrong.
        lack: what a check that applies could not be run for: time or images.
    """

    status: Status
    evidence: str
    fix: str = ""
    lack: Lack = ""


def passed(evidence: str) -> Verdict:
    """Nothing is wrong."""
    return Verdict("pass", evidence)


def warned(evidence: str, fix: str) -> Verdict:
    """Something is unusual, or wrong in most cases."""
    return Verdict("warn", evidence, fix)


def failed(evidence: str, fix: str) -> Verdict:
    """Something is wrong."""
    return Verdict("fail", evidence, fix)


def skipped(reason: str) -> Verdict:
    """The check does not apply."""
    return Verdict("skip", reason)


def out_of_time(evidence: str) -> Verdict:
    """The check applies, but the budget is too short for it."""
    return Verdict("skip", evidence, lack="time")


def too_few(evidence: str) -> Verdict:
    """The check applies, but it saw too few images to say that nothing is wrong."""
    return Verdict("skip", evidence, lack="images")


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what `only` and `skip` know it by.
        group: the file that it is in.
        finds: what it finds, a clause.
        run: makes it.
    """

    name: str
    group: str
    finds: str
    run: Callable[[Subject], Verdict]


def check(run: Callable[[Subject], Verdict]) -> Check:
    """Make a function a check: its name is that of the function, what it finds the first line of the docstring."""
    name, group = run.__name__.replace("_", "-"), run.__module__.rpartition(".")[2]
    return Check(name, group, (inspect.getdoc(run) or "").splitlines()[0].rstrip("."), run)


def listed(names: list[str], most: int = 3) -> str:
    """Names as people list them, the later ones counted."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
