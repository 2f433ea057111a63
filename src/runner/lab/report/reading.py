"""Runs as their files describe them, also while they run; nothing is written, and torch is not imported."""

from __future__ import annotations

import functools
import glob
import html
import io
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.base.errors import UserError, nearest_path
from runner.base.reading import is_number, open_regular, read_json, read_regular
from runner.config.gone import drop, warning
from runner.config.keys import flatten, key_of
from runner.config.output_folders import holds_run
from runner.config.targets import called
from runner.config.yaml_files import plain
from runner.sweeps.rows import JobRow, Scan, comparable
from runner.tracking.formats import label
from runner.tracking.run_files import parse, read_records

_TAIL = 2**16  # bytes of a metrics file that the speed is taken from
_LARGEST = 2**28  # bytes of a metrics file
_SECTION = re.compile(r"^(?=[^\s#-])", re.MULTILINE)
SPECIAL = ("run", "status", "error", "time_s", "started")
"""Names beside keys and metrics that `columns` and `sort` know."""
MEASURED = ("samples_per_s", "step_ms", "peak_memory_mib", "startup_s", "global_step")
"""Metrics of every run, in samples/s, ms, MiB, s and steps."""


@dataclass(frozen=True)
class Run:
    """One run, as its files describe it.

    Attributes:
        path: the run directory.
        status: `finished`, `failed`, `pruned`, `preempted`, `running`, or `died` if it was killed.
        error: the sentence of a run that failed or died.
        config: the resolved config by dotted key; empty if the run failed before it was written.
        overrides: of the command line.
        summary: the content of `summary.json`.
        repeat: the command that runs it again.
    """

    path: Path
    status: str
    error: str | None = None
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    overrides: tuple[str, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict, repr=False)
    repeat: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """The last two parts of its path."""
        return "/".join(self.path.absolute().parts[-2:])

    @property
    def monitor(self) -> str | None:
        """The metric that the best checkpoint was chosen by."""
        best = self.summary.get("best")
        found = best.get("metric") if isinstance(best, dict) else self.summary.get("monitor")
        return None if found is None else comparable(str(found))

    @property
    def mode(self) -> str:
        """`max` or `min`: which values of the monitored metric are better."""
        best = self.summary.get("best")
        return "min" if isinstance(best, dict) and best.get("mode") == "min" else "max"

    @property
    def choices(self) -> dict[str, str]:
        """The option of each group; those of the run that it resumed, too."""
        return found if isinstance(found := self.summary.get("choices"), dict) else {}

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """Final metrics by name.

        `val/...` are those of the best step (of averaged weights, if they decide which is best), `last/...` of the last evaluation,
        `test/...` of the test. See `MEASURED` for the others.
        """
        found, summary = dict[str, Any](), self.summary
        # The best evaluation gives the metrics that runs are compared by
        best = summary.get("best")
        if isinstance(best, dict) and isinstance(name := best.get("metric"), str):
            found = {f"{name.partition('/')[0]}/loss": best.get("loss")}
            found |= dict.fromkeys((name, str(self.monitor)), best.get("value"))
        for split in ("last", "test"):
            values = summary.get(split)
            found |= {f"{split}/{name}": value for name, value in values.items()} if isinstance(values, dict) else {}
        found |= {name: summary.get(name) for name in ("global_step", "startup_s")}
        return {name: value for name, value in found.items() if is_number(value)}

    @functools.cached_property
    def speed(self) -> dict[str, float]:
        """`samples_per_s` and `step_ms` (medians of the last records of training), `peak_memory_mib` (the largest)."""
        last = map(parse, lines_of(self.path / "metrics.jsonl", _TAIL))
        records = [record for record in last if record is not None and record.get("split") == "train"]
        names = ("samples_per_s", "peak_memory_mib")
        rates, memory = ([record[name] for record in records if is_number(record.get(name))] for name in names)
        found = {"peak_memory_mib": max(memory)} if memory else {}
        if rates and (rate := statistics.median(rates)) > 0:
            found |= {"samples_per_s": rate, "step_ms": 1000 * self.samples_per_step / rate}
        return {name: value for name, value in found.items() if is_number(value)}

    @property
    def samples_per_step(self) -> float:
        """Samples of one optimizer step, over all processes; NaN if the config does not say."""
        parts = map(self.config.get, ("data.batch_size", "accumulate"))
        return math.prod(float(part) if is_number(part) else math.nan for part in parts)

    @functools.cached_property
    def records(self) -> list[dict[str, Any]]:
        """Everything in `metrics.jsonl`: dicts with `global_step`, `epoch`, `split` and the metrics."""
        return read_records(self.path / "metrics.jsonl")

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """The content of `environment.json`."""
        return read_json(self.path / "environment.json") or {}

    def value(self, name: str) -> Any:
        """The value of a config key, a group of options, a metric or one of `SPECIAL`; None if the run has none.

        A group has the name of its option, such as `resnet18_cifar` for `model`, or of the component that replaced it.
        """
        time, started = self.summary.get("wall_s"), self.summary.get("started")
        own = {"run": str(self.path), "status": self.status, "error": self.error, "started": started}
        own["time_s"] = time if is_number(time) else None
        # Names are looked up from the most exact to the most general meaning
        for values in (own, self.config, self.metrics):
            if name in values:
                return values[name]
        if name in MEASURED:
            return self.speed.get(name)
        words = [(key_of(word), word.partition("=")[2]) for word in self.overrides]
        if name in self.choices and f"{name}._target_" not in dict(words):
            return self.choices[name]
        if (target := self.config.get(f"{name}._target_")) is not None:
            return called(str(target), self.config.get(f"{name}.name"))
        # A run that ended before its config was written has only its words
        given = [value for key, value in words if key == name]
        if not given:
            return self.config.get(f"{name}.name")
        try:
            return json.loads(given[-1])
        except (ValueError, RecursionError):
            return given[-1]

    def _repr_html_(self) -> str:
        rows = {"status": self.status, "error": self.error, "time_s": self.summary.get("wall_s"), **self.metrics}
        rows |= {"overrides": " ".join(self.overrides)}
        given = {name: value for name, value in rows.items() if value not in (None, "")}
        texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in given.items()}
        left = "style='text-align:left'"
        cells = "".join(
            f"<tr><th {left}>{html.escape(label(name))}</th><td {left}>{html.escape(text)}</td></tr>"
            for name, text in texts.items()
        )
        return f"<table><caption>{html.escape(str(self.path))}</caption>{cells}</table>"


def find_runs(places: Iterable[str | Path], key: str = "report") -> tuple[list[Run], list[str]]:
    """The runs in folders and patterns, in order, each once; and what was noticed.

    Places are run directories, folders that hold some at any depth, files in run directories, or glob patterns. Raises a
    `UserError` about `key` if one does not exist, or none holds a run.
    """
    # One scan for all places, so that a run that several of them hold counts once.
    scan = Scan()
    given = [str(place) for place in places]
    for place in given:
        names = [place] if Path(place).exists() else sorted(glob.glob(place, recursive=True))  # noqa: PTH207  pathlib's takes no absolute patterns
        if not names:
            allowed = "run directories, folders that hold some, or patterns"
            raise UserError(key, f"there is no {place}", allowed, nearest_path(Path(place)))
        # A pattern may match files of a run, which stand for the run
        for path in map(Path, names):
            if path.is_dir() or holds_run(path.parent):
                scan.add(path if path.is_dir() else path.parent)
    runs = [_run(row) for row in scan.rows if row.status != "pending"]
    was = {key: value for run in runs for key, value in drop(run.config).items()}
    scan.notes += warning(", ".join(given), scan.was | was)
    if not runs:
        raise UserError(key, f"{', '.join(given)} holds no run", "such as outputs/digits, or 'outputs/**'")
    pending = Counter(row.folder for row in scan.rows if row.status == "pending")
    for sweep, count in pending.items():
        scan.notes.append(f"{sweep}: {count} of {len(scan.sweeps[sweep].planned)} jobs have not started")
    for run in runs:
        if run.status == "finished":
            # A finished run has all files, so a missing one is worth a note
            there = {"config.yaml": bool(run.config), "metrics.jsonl": (run.path / "metrics.jsonl").is_file()}
            what = "is missing or damaged, so the report lacks what it holds"
            scan.notes += [f"{run.path}: {name} {what}" for name, kept in there.items() if not kept]
    return runs, scan.notes


def _run(row: JobRow) -> Run:
    best = {"metric": row.metric, "mode": row.mode, "value": row.value}
    return Run(
        path=row.folder,
        status=row.status,
        error=row.error,
        config=_config(row.folder / "config.yaml"),
        overrides=row.overrides,
        summary=row.summary or ({"best": best} if row.metric else {}),
        repeat=row.repeat or "",
    )


def _config(path: Path) -> dict[str, Any]:
    """The config of a run by dotted key; empty if it cannot be read."""
    try:
        # Runs share most of their sections, and reading YAML is what takes the time
        sections = [_section(section) for section in _SECTION.split(read_regular(path).decode())]
        return {key: value for section in sections for key, value in section.items()}
    except (OSError, ValueError, UserError):
        return {}


@functools.lru_cache(maxsize=10_000)
def _section(text: str) -> dict[str, Any]:
    """One top-level key of a config file."""
    content = plain(text, "config.yaml")
    return flatten(content) if isinstance(content, dict) else {}


def lines_of(path: Path, last: int = _LARGEST) -> list[bytes]:
    """The complete lines in the last bytes of a metrics file; none if it cannot be read."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - last))
            return file.read(last).split(b"\n")[int(size > last) : -1]
    except OSError:
        return []


def continued_by(runs: Iterable[Run]) -> dict[Path, Path]:
    """For each run that another one in a different directory resumed from: that other one."""
    by_path = {run.path.absolute(): run for run in runs}
    found: dict[Path, Path] = {}
    for path, run in by_path.items():
        if isinstance(before := run.summary.get("resumed_from"), str):
            parents = Path(before).absolute().parents
            if first := next((by_path[each].path for each in parents if each in by_path and each != path), None):
                found[first] = run.path
    return found
