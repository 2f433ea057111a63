"""The results of all checks, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from runner.tracking.console import Console
from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import Result, join_names
from runner.verbs.check.table import Check

_MOST_CLASSES = 12  # that the report lists
_KINDS = {  # status or lack: the words of the summary, and whether it names the checks
    "fail": ("failed", True),
    "warn": ("warned", True),
    "pass": ("passed", False),
    "skip": ("skipped", False),
    "time": ("not run for lack of time", True),
    "images": ("not decided, as too few images were seen", True),
}


@dataclass(frozen=True)
class CompletedCheck:
    """A check, its result, and the seconds that it took."""

    check: Check
    result: Result
    seconds: float


def images_seen(context: CheckContext) -> dict[str, dict[str, Any]]:
    """By split how many `samples` it has, how many were `read`, and how many of these each of the `classes` has.

    Empty if no check needed an image.
    """
    if "unmarked_stats" not in vars(context):
        return {}
    names = dict(enumerate(context.splits.classes))
    found = {}
    for split, stats in context.unmarked_stats.items():
        whole = stats.targets.ndim == 1 and not stats.targets.is_floating_point()
        counts = Counter(stats.targets.tolist()) if whole and names else Counter[int]()
        other = {f"no class {number}": count for number, count in sorted(counts.items()) if number not in names}
        classes = {label: counts[number] for number, label in names.items()} if counts else {}
        found[split] = {"samples": stats.samples, "read": stats.read, "classes": classes | other}
    return found


def _sentence(split: str, samples: int, read: int, classes: dict[str, int]) -> str:
    """What was seen of a split; of many classes, those with the fewest images."""
    line = f"saw {read:,} of {samples:,} images of {split}"
    if not classes:
        return line
    few = len(classes) <= _MOST_CLASSES
    order = classes if few else sorted(classes, key=lambda name: classes[name])
    counts = join_names([f"{name} {classes[name]:,}" for name in order], _MOST_CLASSES)
    return f"{line}: {counts}" if few else f"{line}: fewest {counts}"


def show(console: Console, completed: list[CompletedCheck], seen: dict[str, dict[str, Any]], seconds: float) -> None:
    """Print a table of all results, what was seen of the images, and how many results there are of each kind."""
    rows = []
    for each in completed:
        check, result = each.check, each.result
        rows.append([check.group, check.name, result.status, result.evidence])
        if result.fix:
            rows.append(["", "", "", f"  looks for: {check.finds[0].lower()}{check.finds[1:]}"])
            rows.append(["", "", "", f"  fix: {result.fix}"])
    console.table("", ["group", "check", "result", "evidence"], rows)
    for split, counts_seen in seen.items():
        console.line(_sentence(split, **counts_seen))
    names: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for each in completed:
        names[each.result.lack or each.result.status].append(each.check.name)
    counts = [
        f"{len(found)} {words}" + (f" ({', '.join(found)})" if named else "")
        for (words, named), found in zip(_KINDS.values(), names.values(), strict=True)
        if found
    ]
    more = "; a larger budget_s runs them" if names["time"] or names["images"] else ""
    console.line(f"{', '.join(counts)} in {seconds:.1f} s{more}")


def record(
    completed: list[CompletedCheck], seen: dict[str, dict[str, Any]], bad: bool, seconds: float
) -> dict[str, Any]:
    """The same for programs."""
    return {
        "ok": not bad,
        "counts": dict(Counter(each.result.status for each in completed)),
        "complete": not any(each.result.lack for each in completed),
        "seconds": round(seconds, 3),
        "seen": seen,
        "checks": [
            {"group": each.check.group, "name": each.check.name, "finds": each.check.finds}
            | asdict(each.result)
            | {"seconds": round(each.seconds, 3)}
            for each in completed
        ],
    }
