"""Runs from their files: `report` compares any set of them, `watch` follows them, `sweep` shows the table of a sweep."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.base.errors import OK, WORSE, UserError, nearest, nearest_path
from runner.base.secrets import mask_text
from runner.config.output_folders import holds_sweep
from runner.verbs._table import split_words

_FILES = ("csv", "md", "json", "html", "save_baseline")
_OPTIONS = ("columns", "sort", "seeds", "diff", "against", *_FILES)
_FOLDERS = {"name": "outputs/{}", "output_root": "{}", "ckpt_path": "{}", "sweep.dir": "{}", "data": "outputs/{}"}
"""Keys of other verbs that choose runs, and the folder of these runs."""
_MEANT = "the folder of a run, of a sweep, or of several"
_MOST_ROWS = 20
_LISTED = 5  # sweeps in an error, the newest


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


def watch(argv: Sequence[str]) -> int:
    """Show what runs in a folder until nothing does any more: `watch DIR`, where DIR is a run, a sweep or a folder of runs.

    On a terminal this is a live table, elsewhere lines. Ctrl-C ends it, and leaves the runs alone. Everything comes from the
    files, so that the runs may be those of another terminal or of another machine whose folder is mounted here.
    """
    return _show("watch", argv)


def sweep(argv: Sequence[str]) -> int:
    """Print the table of the sweep in a folder, `sweep DIR`, also while it runs; nothing is written.

    DIR may be a folder above it that holds nothing else. `watch DIR` follows the sweep.
    """
    return _show("sweep", argv)


def _show(verb: str, argv: Sequence[str]) -> int:
    """Show the table of a folder, `sweep` only that of one sweep; `watch` follows first what runs there."""
    words, _ = split_words(verb, argv, {})
    if len(words) != 1:
        raise UserError(verb, f"needs {_MEANT}, got {' '.join(words) or 'nothing'}", f"python -m runner {verb} DIR")
    if not (folder := Path(words[0])).is_dir():
        problem = f"{folder} is a file, not {_MEANT}" if folder.exists() else f"there is no {folder}"
        raise UserError(verb, problem, _MEANT, nearest_path(folder))
    from runner.sweeps.table import follow, look, print_best, print_table, progress_line
    from runner.tracking.console import Console

    view, console = look(folder), Console(None)
    # sweep shows one sweep, and watch any folder
    several = view.folder not in view.sweeps
    if verb == "sweep" and several and (view.sweeps or not holds_sweep(folder)):
        newest = ", ".join(map(str, [*reversed(view.sweeps)][:_LISTED]))
        others = newest or f"its folder, or python -m runner report {folder}, for runs at any depth"
        raise UserError("sweep", f"{folder} is not the folder of one sweep", others)
    if verb == "watch" and not view.rows:
        raise UserError("watch", f"there is no run in {folder}", _MEANT)
    # After the live view, the final state stays on the screen
    if verb == "watch" and not view.done:
        follow(folder, console)
        view = look(folder)
    for note in view.notes:
        console.warn(note)
    listed = len(view.rows) <= _MOST_ROWS or not several
    if not view.done or not listed:
        console.line(progress_line(view))
    if listed:
        print_table(view.rows, console)
        print_best(view.folder, console)
    return OK
