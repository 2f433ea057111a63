"""What the checks found, for people and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from runner.tracking.console import Console
from runner.verbs._check.verdict import Check, Status, Verdict


@dataclass(frozen=True)
class Result:
    """A check that was made: what it says, and the seconds that it took."""

    check: Check
    verdict: Verdict
    seconds: float


def rows(results: list[Result]) -> list[list[str]]:
    """The lines of the table; what to do about it is below the evidence."""
    lines = []
    for result in results:
        verdict = result.verdict
        lines.append([result.check.group, result.check.name, verdict.status, verdict.evidence])
        if verdict.fix:
            lines.append(["", "", "", f"  looks for: {result.check.finds[0].lower()}{result.check.finds[1:]}"])
            lines.append(["", "", "", f"  fix: {verdict.fix}"])
    return lines


def show(console: Console, results: list[Result], seconds: float) -> None:
    """Show all results and how many there are of each kind."""
    console.table("", ["group", "check", "result", "evidence"], rows(results))
    console.line(f"{counted(results)} in {seconds:.1f} s")


def counted(results: list[Result]) -> str:
    """How many checks of each kind, in words, and the names of those that did not pass."""
    words: dict[Status, str] = {"fail": "failed", "warn": "warned", "pass": "passed", "skip": "skipped"}
    names: dict[Status, list[str]] = {status: [] for status in words}
    for result in results:
        names[result.verdict.status].append(result.check.name)
    told = [
        f"{len(found)} {words[status]}" + (f" ({', '.join(found)})" if status in ("fail", "warn") else "")
        for status, found in names.items()
        if found
    ]
    return ", ".join(told)


def record(results: list[Result], bad: bool, seconds: float) -> dict[str, Any]:
    """The same for programs."""
    return {
        "ok": not bad,
        "counts": dict(Counter(result.verdict.status for result in results)),
        "seconds": round(seconds, 3),
        "checks": [
            {
                "group": result.check.group,
                "name": result.check.name,
                "finds": result.check.finds,
                "status": result.verdict.status,
                "evidence": result.verdict.evidence,
                "fix": result.verdict.fix,
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }
