"""The tables and sentences of an audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.tracking.formats import amount, number
from runner.tracking.verb_report import Report

_MOST_ROWS = 40


def show_trained(report: Report, record: Mapping[str, Any]) -> None:
    """Show what running two sides showed."""
    report.lines(*(f"note: {note}" for note in record["notes"]))
    difference = record["difference"]
    if difference is None:
        values = f"{record['values']:,} values of each side are the same bits"
        report.line(f"no difference in {amount(record['steps'], 'step')}: {values}")
        return
    step, batch = difference["step"], difference["batch"]
    of_step = f", batch {batch + 1} of the step" if batch else ""
    _show_difference(report, difference, f"step {step}{of_step}, " if step else "before the first step, ")
    _show_counts(report, f"of step {step}" if step else "before the first step", record["differing"])
    report.line(f"likely cause: {record['cause']['text']}")
    if remedy := record["cause"]["remedy"]:
        report.line(f"what helps: {remedy}")


def show_stored(report: Report, record: Mapping[str, Any]) -> None:
    """Show what comparing two checkpoints showed."""
    report.lines(f"a: {record['a']}", f"b: {record['b']}")
    for title in ("config", "versions"):
        if rows := record[title]:
            report.table(title, ["key", "a", "b"], rows[:_MOST_ROWS])
    _show_counts(report, "checkpoint", {part: counts for part, counts in record["parts"].items() if counts["of"]})
    if record["difference"]:
        _show_difference(report, record["difference"])
        report.line(f"likely cause: {record['cause']}")
    if at := record["log"]:
        values = f"a {at['a']!r}, b {at['b']!r}"
        report.line(f"logs differ first at step {at['global_step']}: {at['split']} {at['name']} {values}")
    if record["same"]:
        logs = f", and so are {record['log_lines']} lines of the logs" if record["log_lines"] else ""
        report.line(f"no difference: both checkpoints are the same bits{logs}")


def _show_counts(report: Report, title: str, counts: Mapping[str, Mapping[str, int]]) -> None:
    rows = [[part, str(count["differ"]), str(count["of"])] for part, count in counts.items()]
    report.table(title, ["part", "differ", "of"], rows)


def _show_difference(report: Report, difference: Mapping[str, Any], where: str = "") -> None:
    report.line(f"first difference: {where}{difference['phase']} {difference['name']}")
    a, b = ("not there" if difference[side] is None else difference[side] for side in ("a", "b"))
    rows = [["shape", a if a == b else f"a {a}, b {b}"]] if a or b else []
    if apart := difference["amount"]:
        largest, relative = (
            "not finite" if apart[name] is None else number(apart[name]) for name in ("largest", "relative")
        )
        rows += [
            ["elements that differ", f"{apart['differing']:,} of {apart['elements']:,}"],
            ["largest difference", largest],
            ["largest, relative", relative],
            [f"first, at {apart['place']}", f"a {apart['values'][0]!r}, b {apart['values'][1]!r}"],
        ]
    report.table("", ["what", "value"], rows or [["state", "is not the same"]])
