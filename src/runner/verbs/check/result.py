"""What a check reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "skip"]
Lack = Literal["", "time", "images"]


@dataclass(frozen=True)
class Result:
    """What a check reports.

    Attributes:
        status: pass, warn, fail, or skip if the check does not apply or could not run.
        evidence: the measured numbers; for a skipped check the reason.
        fix: the key to set or the code to change; empty if nothing is wrong.
        lack: what a check that applies ran short of: time or images.
    """

    status: Status
    evidence: str
    fix: str = ""
    lack: Lack = ""


class NotApplicable(Exception):
    """Raised by a check, or by what it needs, to skip it with a reason."""


def passed(evidence: str) -> Result:
    """Nothing is wrong."""
    return Result("pass", evidence)


def warned(evidence: str, fix: str) -> Result:
    """Something is unusual, or wrong in most cases."""
    return Result("warn", evidence, fix)


def failed(evidence: str, fix: str) -> Result:
    """Something is wrong."""
    return Result("fail", evidence, fix)


def graded(evidence: str, fix: str, *, fail: bool = False, warn: bool = False) -> Result:
    """Failed, warned or passed, whichever applies first."""
    return Result("fail" if fail else "warn" if warn else "pass", evidence, fix if fail or warn else "")


def skipped(reason: str) -> Result:
    """The check does not apply."""
    return Result("skip", reason)


def out_of_time(evidence: str) -> Result:
    """The check applies, but the time budget is too short for it."""
    return Result("skip", evidence, lack="time")


def join_names(names: list[str], most: int = 3) -> str:
    """The first names separated by commas, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
