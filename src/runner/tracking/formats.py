"""Formats of numbers, times and metrics, shared by console, plots and sweep table."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence

Line = list[tuple[str, str]]
"""Texts with their styles."""

HARDWARE_METRICS = ("data_wait", "peak_memory_mib", "device_busy", "device_memory_mib", "device_power_w", "mfu")
"""Training metrics about the machine, shown last and not drawn as learning curves."""

WEIGHTS_STEP = "weights_step"
"""Beside the metrics of the test: the step of the weights that were tested, those of the best checkpoint if there is one."""

STATE_COLOURS = {
    "running": "cyan",
    "failed": "bold red",
    "died": "bold red",
    "preempted": "yellow",
    "finished": "green",
}
"""Styles of the states of a run, for tables."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what makes spreadsheets take the text of a cell for a formula
_LONGEST_CELL = 1000  # characters; the whole column is padded to its longest cell
_SHARES = {"data_wait", "device_busy", "mfu"}
_UNITS = {"ms": "ms", "s": "s", "bytes": "bytes", "mib": "MiB", "gib": "GiB", "percent": "%", "w": "W"}
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# Those of bidirectional text show what follows them in another order: a command would read as a different one.
_BIDIRECTIONAL = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = {code: None for code in (*range(32), *range(127, 160), *_BIDIRECTIONAL) if code != 10} | {9: "    "}


def number(value: float | None) -> str:
    """Four significant digits; integers whole; `nan` for None, as JSON stores NaN."""
    if value is None:
        return "nan"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def plus_minus(mean: float, deviation: float | None) -> str:
    """A mean with its standard deviation, two digits of it or all before the point; the mean alone for one value."""
    if deviation is None:
        return number(mean)
    return f"{number(mean)} ± {deviation:{'.0f' if 100 <= deviation < 1e5 else '.2g'}}"


def amount(count: int, noun: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def digits(value: float) -> str:
    """Six significant digits, which tell evaluations of large splits apart: 0.18559986352920532 is `0.1856`."""
    return f"{value:.6g}"


def compact(value: float) -> str:
    """Three significant digits with k, M, G or T: 12345 is `12.3k`."""
    if not math.isfinite(value):
        return str(value)
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # By three digits, because 999.6 would round to "1000".
        if abs(value) >= 0.9995 * limit:
            scaled = value / limit
            return f"{scaled:.{2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0}f}{suffix}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """`0:12`, `1:02:03` or `2d 3:04:05`; `?` if not known."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def metric(name: str, value: float | None) -> str:
    """One metric with its name or unit: `loss 0.412`, `12.3k samples/s`, `memory 712 MiB`, `data wait 3%`."""
    if name.endswith("_per_s"):
        return f"{compact(math.nan if value is None else value)} {label(name)}"
    if name in HARDWARE_METRICS and value is not None:
        words = name.removeprefix("peak_").replace("_", " ")
        if name in _SHARES:
            return f"{words} {percent(value)}"
        words, _, unit = words.rpartition(" ")
        return f"{words} {value:,.0f} {_UNITS[unit]}"
    if name == WEIGHTS_STEP and value is not None:
        return f"weights of step {value:.0f}"
    return f"{name} {number(value)}"


def percent(share: float) -> str:
    """A share as two digits of percent: 0.0312 is `3.1%`, 0.312 is `31%`."""
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def in_order(names: Iterable[str]) -> list[str]:
    """Names of metrics in reading order: the loss, others as they come, the learning rate, throughput, hardware."""

    ranks = {WEIGHTS_STEP: 0, "loss": 1, "lr": 3, **dict.fromkeys(HARDWARE_METRICS, 5)}
    return sorted(names, key=lambda name: ranks.get(name, 4 if name.endswith("_per_s") else 2))


def label(name: str) -> str:
    """A metric's name in words with its unit: `step_ms` is `step (ms)`, `samples_per_s` is `samples/s`."""
    stem, _, unit = name.rpartition("_")
    if name == "lr":
        return "learning rate"
    if name.endswith("_per_s"):
        return name.removesuffix("_per_s").replace("_", " ") + "/s"
    return f"{stem.replace('_', ' ')} ({_UNITS[unit]})" if stem and unit in _UNITS else name.replace("_", " ")


def clean(text: str) -> str:
    """`text` without colour codes, control and bidirectional characters, except line ends; tabs become spaces."""
    return _ESCAPES.sub("", text).translate(_CONTROLS)


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """`text` in lines of at most `width` characters, broken between words; those after the first begin with `indent`.

    A longer word, such as a path, stays whole. None for any width.
    """
    if width is None or len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A plain table as lines: two spaces between columns, numbers aligned right, dashes below the headers."""
    columns, *cells = [[" ".join(clean(cell).split())[:_LONGEST_CELL] for cell in row] for row in (columns, *rows)]
    widths = column_widths(columns, cells)
    right = [{is_number(row[i]) for row in cells if row[i] != "-"} == {True} for i in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *cells]
    padded = ([p.rjust(w) if r else p.ljust(w) for p, w, r in zip(line, widths, right, strict=False)] for line in lines)
    return ["  ".join(line).rstrip() for line in padded]


def column_widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column of a table, in characters."""
    return [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]


def markdown_text(text: str) -> str:
    """A text as one line of Markdown that is shown as it is: no control characters, HTML, links or columns."""
    return " ".join(clean(text).split()).replace("<", "&lt;").replace("](", "]\\(").replace("|", "\\|")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of Markdown."""
    return [f"| {' | '.join(map(markdown_text, line))} |" for line in (head, ["---"] * len(head), *rows)]


def harmless(cell: object) -> object:
    """A cell for CSV: a text that a spreadsheet would take for a formula (CWE-1236) begins with an apostrophe."""
    text = isinstance(cell, str) and cell.startswith(_FORMULA) and cell != "-" and not is_number(cell)
    return f"'{cell}" if text else cell


def csv_text(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as CSV, without control characters and formulas."""
    text = io.StringIO()
    cells = [[clean(cell) if isinstance(cell, str) else cell for cell in row] for row in (head, *rows)]
    csv.writer(text, lineterminator="\n").writerows([harmless(cell) for cell in row] for row in cells)
    return text.getvalue()


def is_number(text: str) -> bool:
    """True for a text that reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
