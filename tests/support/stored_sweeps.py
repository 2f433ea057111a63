"""Files of sweeps as jobs leave them, and a terminal that keeps what it is given."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console as RichConsole

from runner.sweeps.ledger import Ledger
from runner.sweeps.rows import JobRow
from runner.sweeps.table import live_table, look, print_table
from runner.tracking.console import Console

LAUNCH: dict[str, Any] = {"swept": ["seed"], "base": {}, "flags": [], "retry": "failed"}


def make_job(folder: Path, words: list[str], value: float | None = 0.75, mode: str = "max", **summary: Any) -> Path:
    """The folder of a job with these overrides, which has finished with a value unless `summary` says otherwise."""
    folder.mkdir(parents=True)
    (folder / "overrides.yaml").write_text(yaml.safe_dump(words))
    metric = "val/accuracy" if mode == "max" else "val/loss"
    best = {"metric": metric, "mode": mode, "value": value, "global_step": 5}
    found = {"status": "finished", "error": None, "best": best, "wall_s": 61} | summary
    (folder / "summary.json").write_text(json.dumps(found))
    return folder


def make_ledger(folder: Path, planned: list[list[str]] | None, events: list[dict[str, Any]], **more: Any) -> None:
    """The ledger of a launch with these jobs, or of a search, and lines with the events of jobs 0, 1, ... in their order."""
    jobs = None if planned is None else {str(number): words for number, words in enumerate(planned)}
    Ledger(folder).append("launch", **LAUNCH | {"swept": ["optimizer.lr", "seed"], "jobs": jobs} | more)
    for number, event in enumerate(events):
        Ledger(folder).append(**{"job": str(number), "folder": str(number)} | event)


class FakeTerminal(io.StringIO):
    """A terminal whose text can be read."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def table_text(rows: list[JobRow]) -> str:
    """What a pipe gets at the end of a sweep."""
    stream = io.StringIO()
    failed = any(row.status in ("failed", "died") for row in rows)
    assert print_table(rows, Console(None, stream=stream)) == failed
    return stream.getvalue()


def live_text(folder: Path, columns: int, rows: int = 26) -> list[str]:
    """The lines of the live table of a folder on a terminal of that size."""
    stream = io.StringIO()
    RichConsole(file=stream, width=columns).print(live_table(look(folder), columns, rows))
    return [line.rstrip() for line in stream.getvalue().splitlines()]
