"""A check and its result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Run = TypeVar("Run", bound=Callable[[Any], Any])

GROUPS = ("data", "labels", "samples", "batches", "baselines", "outputs", "model", "loss", "step", "settings")
"""In the order in which they run."""


@dataclass(frozen=True)
class Result:
    """The result of a check."""

    status: Literal["pass", "warn", "fail", "skip"]  # skip: the check does not apply or could not run
    evidence: str  # the measured numbers; for a skipped check the reason
    fix: str = ""  # the key to set or the code to change; empty if nothing is wrong


@dataclass(frozen=True)
class Check:
    """One check."""

    group: str  # in `only` and `skip` it stands for all its checks
    run: Callable[[Any], Result]  # with a `CheckContext`
    any_task: bool = False  # whether it takes samples of any kind, and tasks that compute their own steps

    @property
    def name(self) -> str:
        """The name for `only` and `skip`: that of the function."""
        return self.run.__name__.replace("_", "-")

    @property
    def finds(self) -> str:
        """The fault that the check finds: the first line of the docstring."""
        return (inspect.getdoc(self.run) or "").splitlines()[0].rstrip(".")


REGISTERED: list[Check] = []
"""The checks of all modules that have been imported."""


def check(group: str, *, any_task: bool = False) -> Callable[[Run], Run]:
    """Register a function as a check of one of `GROUPS`; for `any_task` see `Check`."""

    def register(run: Run) -> Run:
        REGISTERED.append(Check(group, run, any_task))
        return run

    return register


class NotApplicable(Exception):
    """Raised by a check, or by what it needs, to skip it with a reason."""


def need(condition: object, reason: str) -> None:
    """Skip the check with a reason unless the condition holds."""
    if not condition:
        raise NotApplicable(reason)


passed = functools.partial(Result, "pass")  # with evidence; nothing is wrong
warned = functools.partial(Result, "warn")  # with evidence and a fix; something is unusual, or wrong in most cases
failed = functools.partial(Result, "fail")  # with evidence and a fix; something is wrong


def graded(evidence: str, fix: str, *, fail: bool = False, warn: bool = False) -> Result:
    """Failed, warned or passed, whichever applies first."""
    return Result("fail" if fail else "warn" if warn else "pass", evidence, fix if fail or warn else "")


def none_of(names: Sequence[str], what: str, fix: str, otherwise: str, *, warn: bool = False) -> Result:
    """Passed if there are no names; else failed, or warned: their number, what is wrong with them, and the first of them."""
    evidence = f"{len(names)} {what}: {join_names(names)}" if names else otherwise
    return graded(evidence, fix, fail=bool(names) and not warn, warn=bool(names))


def join_names(names: Sequence[object], most: int = 3) -> str:
    """The first names separated by commas, and the number of the others."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")
