"""What a check is, and what it says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from runner.verbs.check.context import CheckContext

Status = Literal["pass", "warn", "fail", "skip"]
Lack = Literal["", "time", "images"]


@dataclass(frozen=True)
class Result:
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


def passed(evidence: str) -> Result:
    """Nothing is wrong."""
    return Result("pass", evidence)


def warned(evidence: str, fix: str) -> Result:
    """Something is unusual, or wrong in most cases."""
    return Result("warn", evidence, fix)


def failed(evidence: str, fix: str) -> Result:
    """Something is wrong."""
    return Result("fail", evidence, fix)


def skipped(reason: str) -> Result:
    """The check does not apply."""
    return Result("skip", reason)


def out_of_time(evidence: str) -> Result:
    """The check applies, but the budget is too short for it."""
    return Result("skip", evidence, lack="time")


def too_few(evidence: str) -> Result:
    """The check applies, but it saw too few images to say that nothing is wrong."""
    return Result("skip", evidence, lack="images")


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
    run: Callable[[CheckContext], Result]


def check(run: Callable[[CheckContext], Result]) -> Check:
    """Make a function a check: its name is that of the function, what it finds the first line of the docstring."""
    name, group = run.__name__.replace("_", "-"), run.__module__.rpartition(".")[2]
    return Check(name, group, (inspect.getdoc(run) or "").splitlines()[0].rstrip("."), run)


def join_names(names: list[str], most: int = 3) -> str:
    """Names as people list them, the later ones counted."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
