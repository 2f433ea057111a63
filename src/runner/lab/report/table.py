"""The table of a report: the keys that differ, repetitions folded into mean and spread, the best first."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from runner.base.errors import UserError, nearest
from runner.base.reading import is_number
from runner.config.changes import changes_result
from runner.config.keys import OF_THE_SWEEP, key_of, within
from runner.config.targets import called
from runner.lab.report.reading import MEASURED, SPECIAL, Run, continued_by
from runner.sweeps.rows import WITHOUT_RESULT
from runner.sweeps.table import REPEATS, mean_and_deviation
from runner.tracking.formats import duration, number, plus_minus

_NEVER = ("ckpt_path", "resume", "output_root", "log", "logger", "notes", "dry_run", "json", "hydra", *OF_THE_SWEEP)


@dataclass(frozen=True)
class Spread:
    """A number over repetitions: their mean, sample standard deviation (None for one) and number."""

    mean: float
    std: float | None
    count: int

    def __str__(self) -> str:
        return plus_minus(self.mean, self.std)


@dataclass(frozen=True)
class Row:
    """One line of a table: runs that differ only in seed or fold, and their values by column."""

    runs: tuple[Run, ...]
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the first run, and how many more there are."""
        return self.runs[0].name + (f" and {len(self.runs) - 1} more" if len(self.runs) > 1 else "")

    @property
    def status(self) -> str:
        """`finished`, or how many have which status."""
        counts = Counter(run.status for run in self.runs).most_common()
        return counts[0][0] if len(counts) == 1 else ", ".join(f"{count} {status}" for status, count in counts)

    def is_lost(self) -> bool:
        """True if all of its runs failed, died or were pruned, so that what they reached is no result."""
        return all(run.status in WITHOUT_RESULT for run in self.runs)


@dataclass(frozen=True)
class Table:
    """A table of runs."""

    keys: tuple[str, ...]  # config keys that differ, or those that were asked for
    metrics: tuple[str, ...]  # their names
    rows: tuple[Row, ...]  # the best first
    folded: bool  # whether repetitions are folded
    metric: str | None  # what the rows are sorted by; None if no run has a monitored metric

    @property
    def head(self) -> list[str]:
        """Names of the columns of `cells`."""
        return ["run", "status", *self.metrics, *(key for key in self.keys if key != "run"), "time"]

    def cells(self) -> list[list[str]]:
        """The table as texts."""
        lines = []
        for row in self.rows:
            seconds, values = row.values["time_s"], [text_of(row.values.get(name)) for name in self.head[2:-1]]
            lines.append([row.name, row.status, *values, "-" if seconds is None else duration(seconds.mean)])
        return lines

    def plain(self) -> tuple[list[str], list[list[Any]]]:
        """Head and lines for CSV: full numbers, mean and deviation in separate columns."""
        numbers, wide = dict.fromkeys((*self.metrics, "time_s")), 1 + self.folded
        columns = [column for name in numbers for column in (name, f"{name} std")[:wide]]
        lines = []
        for row in self.rows:
            line: list[Any] = [len(row.runs) if self.folded else str(row.runs[0].path)]
            cells = [row.values.get(key) for key in self.keys]
            line += [json.dumps(cell, default=str) if isinstance(cell, list | dict) else cell for cell in cells]
            for name in numbers:
                value = row.values.get(name)
                line += ((value.mean, value.std) if isinstance(value, Spread) else (value, None))[:wide]
            lines.append([*line, row.status])
        return ["runs" if self.folded else "run", *self.keys, *columns, "status"], lines

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.head)
        rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in self.cells()]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def make_tables(
    runs: Sequence[Run], columns: str | Iterable[str] = (), sort: str | None = None, each: bool = False
) -> tuple[Table, ...]:
    """The table of all runs, and one of each task in the order of `by_task`.

    `columns` and `sort` are those of `runner.report`; with `each`, repetitions have a line each.
    """
    listed = [name.strip() for name in columns.strip("[]").split(",")] if isinstance(columns, str) else columns
    names, given = names_of(runs), tuple(dict.fromkeys(name for name in listed if name))
    for key, name in [("columns", name) for name in given] + [("sort", (sort or "run").lstrip("-"))]:
        if name not in names:
            # `acc` means val/accuracy, which is not the nearest name
            begun = [each for each in sorted(names) if "/" in each and each.rpartition("/")[2].startswith(name.lower())]
            close = min(begun, key=lambda each: not each.startswith("val/"), default="") or nearest(name, names)
            raise UserError(key, f"cannot be {name}: no run has it", "a config key or a metric", close)
    groups = list(by_task(runs).values())
    table = _table(runs, given, sort, each)
    return (table, table) if len(groups) == 1 else (table, *(_table(group, given, sort, each) for group in groups))


def by_task(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each task; one that ended before its task was known is among those of the most frequent one."""
    tasks = Counter(str(task) for run in runs if (task := run.value("task")))
    common = tasks.most_common(1)[0][0] if tasks else ""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(str(run.value("task") or common), []).append(run)
    return groups


def _table(runs: Sequence[Run], given: Sequence[str], sort: str | None, each: bool) -> Table:
    metric, mode = monitored(runs)
    differing = differing_keys(runs)
    known = {name for run in runs for name in run.metrics} | set(MEASURED) | {"time_s"}
    metrics = tuple(name for name in given if name in known)
    if not given:
        best = dict.fromkeys((metric, *(run.monitor for run in runs)))
        tests = (f"test/{name.partition('/')[2]}" for name in best if name)
        metrics = tuple(name for name in (*best, *tests) if name in known)
    # The first column and the last ones are always there.
    own = {"status", *(["run"] if each else [])}
    keys = tuple(name for name in given if name in names_of(runs) - known - own) if given else tuple(differing)
    settings = [key for key in differing if key not in REPEATS]
    if not each and not given:
        keys = tuple(key for key in keys if key not in REPEATS)
    by = sort.lstrip("-") if sort else metric or ""
    wanted = {*keys, *metrics, "time_s", *([by] if by else [])}
    repeated = [[run] for run in runs] if each else repetitions(runs, settings).values()
    rows = [_row(together, wanted, known) for together in repeated]

    # Two stable sorts: by value, and then what has no result to the end, whichever direction is asked for.
    def order(row: Row) -> tuple[bool, float, str]:
        """Numbers in front of texts, from the smallest to the largest."""
        value = row.values.get(by)
        value = value.mean if isinstance(value, Spread) else value
        return (False, value, "") if is_number(value) else (True, 0.0, str(value))

    rows.sort(key=order, reverse=sort.startswith("-") if sort else mode == "max")
    rows.sort(key=lambda row: (row.values.get(by) is None, by == metric and row.is_lost()))
    return Table(keys, metrics, tuple(rows), not each and any(len(row.runs) > 1 for row in rows), by or None)


def monitored(runs: Iterable[Run]) -> tuple[str | None, str]:
    """The metric that most of the runs monitor, None if none has one, and whether the `max` or the `min` of it is best."""
    found = Counter((run.monitor, run.mode) for run in runs if run.monitor in run.metrics)
    return found.most_common(1)[0][0] if found else (None, "max")


def names_of(runs: Iterable[Run]) -> set[str]:
    """The names that `columns` and `sort` know."""
    names = {*SPECIAL, *MEASURED}
    for run in runs:
        names |= run.config.keys() | run.metrics.keys() | run.choices.keys() | {key_of(word) for word in run.overrides}
        names |= {key.removesuffix("._target_") for key in run.config if key.endswith("._target_")}
    return names


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """The keys in which runs differ: those of the command lines, then others that do not follow from one of them.

    A key that a preset sets along with others, such as `model.width` of `model=small_cnn`, is not listed beside the preset.
    """
    shown: dict[str, list[str | None]] = {}
    presets: list[list[str | None]] = []
    every = dict.fromkeys(key for run in runs for key in run.config)
    words = [{key_of(word) for word in run.overrides} for run in runs]
    given = dict.fromkeys(key_of(word) for run in runs for word in run.overrides)
    groups = dict.fromkeys(name for run in runs for name in run.choices if "@" not in name)
    # Words of the command lines come first: other options and keys that follow from one of them are not listed beside it.
    for name in [*given, *groups, *sorted(every, key=lambda key: not key.endswith("._target_"))]:
        key = name.removesuffix("._target_")
        if key in shown or within(key, _NEVER) or not (name in given or changes_result(name)):
            continue
        # Of a run without a config, nothing is known but its overrides.
        known = [
            (bool(run.config) or key in own or key in run.choices)
            # Runs of one budget differ in the number of steps, which was measured and not set
            and not (key == "max_steps" and run.config.get("budget") and key not in own)
            for run, own in zip(runs, words, strict=True)
        ]
        values = [_text(run.value(key)) if is_known else None for run, is_known in zip(runs, known, strict=True)]
        if len({*values} - {None}) < 2 or (name not in given and any(_follows(values, preset) for preset in presets)):
            continue
        shown[key] = values
        if key not in every:
            presets.append(values)
    # A run's folder mostly begins with its name, which tells least about a difference
    return sorted(shown, key=lambda key: key == "name")


def _follows(values: list[str | None], other: list[str | None]) -> bool:
    pairs = {pair for pair in zip(other, values, strict=True) if None not in pair}
    return len(pairs) == len({one for one, _ in pairs})


def repetitions(runs: Sequence[Run], settings: Sequence[str]) -> dict[str, list[Run]]:
    """Runs by their settings as JSON; one that was continued in another directory counts there."""
    continued = continued_by(runs)
    together: dict[str, list[Run]] = {}
    for run in runs:
        if run.path not in continued:
            together.setdefault(_text({key: run.value(key) for key in settings}), []).append(run)
    return together


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _row(runs: list[Run], wanted: Iterable[str], metrics: set[str]) -> Row:
    values: dict[str, Any] = {}
    for name in wanted:
        if name in metrics:
            # What a run reached before it failed is no result, unless there is no other.
            finished = [run for run in runs if run.status == "finished"] or runs
            numbers = [value for run in finished if is_number(value := run.value(name))]
            values[name] = Spread(*mean_and_deviation(numbers), len(numbers)) if numbers else None
        else:
            different = list({_text(value): value for value in (run.value(name) for run in runs)}.values())
            values[name] = different[0] if len(different) == 1 else different
    return Row(tuple(runs), values)


def text_of(value: Any) -> str:
    """A value as a cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, dict):
        name = called(str(value["_target_"]), value.get("name")) if "_target_" in value else ""
        parts = ", ".join(f"{key}={text_of(each)}" for key, each in value.items() if key != "_target_")
        return f"{name}({parts})" if parts or not name else name
    return str(value)


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys that have another value, with both values; None for one that is not there."""
    return [(key, first.get(key), second.get(key)) for key in first | second if first.get(key) != second.get(key)]
