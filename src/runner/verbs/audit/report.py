"""What an audit found, for people and for programs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner.config.validate import shown
from runner.tracking.console import Console
from runner.tracking.formats import number
from runner.verbs.audit.record import Difference, Entry, amount
from runner.verbs.audit.stored import Compared, cause_of

if TYPE_CHECKING:
    from runner.verbs.audit.run import AuditResult

_MOST_ROWS = 40


def settings_text(varied: Mapping[str, tuple[Any, Any]]) -> str:
    """What the sides are, in a few words."""
    if not varied:
        return "twice the same"
    sides = [" ".join(f"{key}={shown(pair[side])}" for key, pair in varied.items()) for side in (0, 1)]
    return f"a: {sides[0]}  b: {sides[1]}"


def counted(entries: Sequence[Entry], differing: Sequence[Difference]) -> dict[str, tuple[int, int]]:
    """For each phase how many entries differ, and of how many, in the order of the phases."""
    all_of = Counter(entry.phase for entry in entries)
    unlike = Counter(difference.entry.phase for difference in differing)
    return {phase: (unlike[phase], max(all_of[phase], unlike[phase])) for phase in dict.fromkeys([*all_of, *unlike])}


def show_result(console: Console, found: AuditResult) -> None:
    """Show what running two sides showed."""
    for note in found.notes:
        console.line(f"note: {note}")
    if found.difference is None or found.cause is None:
        plural = "" if found.steps == 1 else "s"
        console.line(
            f"no difference in {found.steps} step{plural}: {found.tensors:,} values of each side are the same bits"
        )
        return
    console.line(f"first difference: {_where(found.step, found.difference.entry)}")
    console.table("", ["what", "value"], _rows(found.difference))
    rows = [[phase, str(unlike), str(of)] for phase, (unlike, of) in found.alike.items()]
    console.table(f"of step {found.step}" if found.step else "before the first step", ["part", "differ", "of"], rows)
    console.line(f"likely cause: {found.cause.text}")
    if found.cause.remedy:
        console.line(f"what helps: {found.cause.remedy}")


def _where(step: int, entry: Entry) -> str:
    batch = f", batch {entry.batch + 1} of the step" if entry.batch else ""
    when = f"step {step}{batch}" if step else "before the first step"
    return f"{when}, {entry.phase} {entry.name}"


def _rows(difference: Difference) -> list[list[str]]:
    kinds = [side.kind if side else "not there" for side in (difference.a, difference.b)]
    rows = [["shape", kinds[0] if kinds[0] == kinds[1] else f"a {kinds[0]}, b {kinds[1]}"]] if any(kinds) else []
    apart = amount(difference)
    if apart is None:
        return rows or [["state", "is not the same"]]
    place = "[" + ", ".join(map(str, apart.place)) + "]"
    return [
        *rows,
        ["elements that differ", f"{apart.differing:,} of {apart.elements:,}"],
        ["largest difference", number(apart.largest) if apart.largest is not None else "not finite"],
        ["largest, relative", number(apart.relative) if apart.relative is not None else "not finite"],
        [f"first, at {place}", f"a {apart.values[0]!r}, b {apart.values[1]!r}"],
    ]


def result_record(found: AuditResult) -> dict[str, Any]:
    """The same for programs."""
    return {
        "same": found.difference is None,
        "steps": found.steps,
        "values": found.tensors,
        "vary": {key: list(pair) for key, pair in found.varied.items()},
        "notes": found.notes,
        "difference": _record(found.difference) | {"step": found.step} if found.difference else None,
        "cause": found.cause._asdict() if found.cause else None,
        "differing": {phase: {"differ": unlike, "of": of} for phase, (unlike, of) in found.alike.items()},
    }


def _record(difference: Difference) -> dict[str, Any]:
    entry, apart = difference.entry, amount(difference)
    return {
        "phase": entry.phase,
        "name": entry.name,
        "batch": entry.batch,
        "a": difference.a.kind if difference.a else None,
        "b": difference.b.kind if difference.b else None,
        "amount": dataclasses.asdict(apart) if apart else None,
    }


def show_stored(console: Console, compared: Compared) -> None:
    """Show what comparing two checkpoints showed."""
    for warning in compared.warnings:
        console.warn(warning)
    console.line(f"a: {compared.paths[0]}\nb: {compared.paths[1]}")
    for title, rows in (("config", compared.settings), ("versions", compared.versions)):
        if rows:
            console.table(title, ["key", "a", "b"], [list(row) for row in rows[:_MOST_ROWS]])
    counts = [[part, str(unlike), str(of)] for part, (unlike, of) in compared.counts.items() if of]
    console.table("checkpoint", ["part", "differ", "of"], counts)
    if compared.found:
        first = compared.found[0]
        console.line(f"first difference: {first.entry.phase} {first.entry.name}")
        console.table("", ["what", "value"], _rows(first))
        console.line(f"likely cause: {cause_of(first, compared.settings)}")
    if compared.logged is not None:
        at = compared.logged
        console.line(
            f"logs differ first at step {at['global_step']}: {at['split']} {at['name']} a {at['a']!r}, b {at['b']!r}"
        )
    if compared.same:
        logs = f", and so are {compared.lines} lines of the logs" if compared.lines else ""
        console.line(f"no difference: both checkpoints are the same bits{logs}")


def stored_record(compared: Compared) -> dict[str, Any]:
    """The same for programs."""
    first = compared.found[0] if compared.found else None
    return {
        "same": compared.same,
        "a": compared.paths[0],
        "b": compared.paths[1],
        "parts": {part: {"differ": unlike, "of": of} for part, (unlike, of) in compared.counts.items()},
        "difference": _record(first) if first else None,
        "cause": cause_of(first, compared.settings) if first else None,
        "config": [list(row) for row in compared.settings],
        "versions": [list(row) for row in compared.versions],
        "log": compared.logged,
        "log_lines": compared.lines,
    }
