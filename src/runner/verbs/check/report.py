"""What the checks found, for people and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from runner.tracking.console import Console
from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import Check, Result, join_names

_MOST = 12  # classes that are join_names


@dataclass(frozen=True)
class CompletedCheck:
    """A check that was made: what it says, and the seconds that it took."""

    check: Check
    verdict: Result
    seconds: float


@dataclass(frozen=True)
class Seen:
    """How much was seen of a split: of how many samples how many were read, and how many of each class."""

    split: str
    samples: int
    read: int
    classes: dict[str, int]

    def told(self) -> str:
        """The same in words; of many classes those that fewest images were seen of."""
        line = f"saw {self.read:,} of {self.samples:,} images of {self.split}"
        if not self.classes:
            return line
        order = sorted(self.classes, key=lambda name: self.classes[name]) if len(self.classes) > _MOST else self.classes
        counts = join_names([f"{name} {self.classes[name]:,}" for name in order], _MOST)
        return f"{line}: {counts}" if len(self.classes) <= _MOST else f"{line}: fewest {counts}"


def rows(results: list[CompletedCheck]) -> list[list[str]]:
    """The lines of the table; what to do about it is below the evidence."""
    lines = []
    for result in results:
        verdict = result.verdict
        lines.append([result.check.group, result.check.name, verdict.status, verdict.evidence])
        if verdict.fix:
            lines.append(["", "", "", f"  looks for: {result.check.finds[0].lower()}{result.check.finds[1:]}"])
            lines.append(["", "", "", f"  fix: {verdict.fix}"])
    return lines


def seen_of(context: CheckContext) -> list[Seen]:
    """What was seen of each split; nothing if no check needed an image."""
    if "seen" not in vars(context):
        return []
    names = dict(enumerate(context.splits.classes))
    found = []
    for name, look in context.unmarked_stats.items():
        whole = look.targets.ndim == 1 and not look.targets.is_floating_point()
        counts = Counter(look.targets.tolist()) if whole and names else Counter[int]()
        other = {f"no class {number}": count for number, count in sorted(counts.items()) if number not in names}
        classes = {label: counts[number] for number, label in names.items()} if counts else {}
        found.append(Seen(name, look.samples, look.read, classes | other))
    return found


def show(console: Console, results: list[CompletedCheck], seen: list[Seen], seconds: float) -> None:
    """Show all results, what was seen of the images, and how many results there are of each kind."""
    console.table("", ["group", "check", "result", "evidence"], rows(results))
    for each in seen:
        console.line(each.told())
    more = "; a larger budget_s runs them" if any(result.verdict.lack for result in results) else ""
    console.line(f"{counted(results)} in {seconds:.1f} s{more}")


def counted(results: list[CompletedCheck]) -> str:
    """How many checks of each kind, in words, and the names of those that did not pass or were not run."""
    kinds: dict[str, tuple[str, bool]] = {
        "fail": ("failed", True),
        "warn": ("warned", True),
        "pass": ("passed", False),
        "skip": ("skipped", False),
        "time": ("not run for lack of time", True),
        "images": ("not decided, as too few images were seen", True),
    }
    names: dict[str, list[str]] = {kind: [] for kind in kinds}
    for result in results:
        names[result.verdict.lack or result.verdict.status].append(result.check.name)
    told = [
        f"{len(found)} {kinds[kind][0]}" + (f" ({', '.join(found)})" if kinds[kind][1] else "")
        for kind, found in names.items()
        if found
    ]
    return ", ".join(told)


def record(results: list[CompletedCheck], seen: list[Seen], bad: bool, seconds: float) -> dict[str, Any]:
    """The same for programs."""
    return {
        "ok": not bad,
        "counts": dict(Counter(result.verdict.status for result in results)),
        "complete": not any(result.verdict.lack for result in results),
        "seconds": round(seconds, 3),
        "seen": {each.split: {"samples": each.samples, "read": each.read, "classes": each.classes} for each in seen},
        "checks": [
            {
                "group": result.check.group,
                "name": result.check.name,
                "finds": result.check.finds,
                "status": result.verdict.status,
                "evidence": result.verdict.evidence,
                "fix": result.verdict.fix,
                "lack": result.verdict.lack,
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }
