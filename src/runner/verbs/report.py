"""`report`: any set of runs as a table, a difference, a page, or compared with a baseline."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.base.errors import OK, WORSE, UserError, nearest
from runner.base.secrets import mask_text

_FILES = ("csv", "md", "json", "html", "save_baseline")
_OPTIONS = ("columns", "sort", "seeds", "diff", "against", *_FILES)
_FOLDERS = {"name": "outputs/{}", "output_root": "{}", "ckpt_path": "{}", "sweep.dir": "{}", "data": "outputs/{}"}
"""Keys of other verbs that choose runs, and the folder of these runs."""


def main(argv: Sequence[str]) -> int:
    """Show runs, sweeps and folders (`report outputs/digits`), from their files, also while they run.

    columns=optimizer.lr,test/accuracy        instead of the keys that differ
    sort=test/loss                            smallest first; sort=-test/loss largest first
    seeds=each                                a row for every repetition
    csv=FILE md=FILE json=FILE html=FILE      write the table, or a page with curves; - for standard output
    --json                                    short for json=-
    diff=true                                 two runs: config, environment, metrics, weights
    against=baseline.json|RUN|SWEEP           exit status 4 if something got worse
    tolerance.step=0.1                        allowed change: metric, loss, step, memory, startup
    save_baseline=FILE                        measure these runs for a later against=
    """
    places, options, tolerance = _parse(argv)
    from runner.lab.report.report import report, show
    from runner.tracking.console import Console
    from runner.tracking.formats import clean

    # The libraries that draw and compute are loaded after the words were understood
    found = report(*places, **options, tolerance=tolerance)
    if "-" in options.values():
        # With `-`, standard output is the file, so messages go elsewhere
        for note in found.notes:
            print(f"warning: {clean(mask_text(note))}", file=sys.stderr)
    else:
        show(found, console := Console(None))
        for name in _FILES:
            if name in options:
                console.line(f"wrote {options[name]}")
    return WORSE if found.comparison is not None and found.comparison.worse else OK


def _parse(argv: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, float]]:
    """Places, options and tolerances."""
    places: list[str] = []
    options: dict[str, Any] = {}
    tolerance: dict[str, float] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if key.startswith("tolerance.") and equals:
            try:
                tolerance[key.removeprefix("tolerance.")] = float(value)
            except ValueError:
                raise UserError(key, f"cannot be {value}", "a number, such as 0.1") from None
        elif key in _OPTIONS and equals:
            options[key] = value
        elif word.startswith("-") or (equals and re.fullmatch(r"[\w.]+", key) and not Path(word).exists()):
            if equals and key in _FOLDERS:
                raise UserError("report", f"takes folders, not {key}=", f"report {_FOLDERS[key].format(value)}")
            close = nearest(key.lstrip("-"), [*_OPTIONS, "tolerance.metric"])
            allowed = ", ".join(f"{name}=" for name in (*_OPTIONS, "tolerance.MEASURE"))
            if not close and equals:
                allowed += "; to select runs, use runner.runs().to_pandas().query() in Python"
            raise UserError("report", f"unknown option '{key}'", allowed, close)
        else:
            places.append(word)
    if (diff := options.get("diff")) not in (None, "true", "false"):
        raise UserError("diff", f"cannot be {diff}", "true or false")
    return places, options | {"diff": diff and diff == "true"}, tolerance
