"""`watch`: a run, a sweep or a folder of runs from its files, live; `sweep` shows the same once, of one sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.base.errors import OK, UserError, nearest_path
from runner.config.output_folders import holds_sweep
from runner.verbs._folders import split_words

_MEANT = "the folder of a run, of a sweep, or of several"
_MOST_ROWS = 20
_LISTED = 5  # sweeps in an error, the newest


def watch(argv: Sequence[str]) -> int:
    """Show what runs in a folder until nothing does any more: `watch DIR`, where DIR is a run, a sweep or a folder of runs.

    On a terminal this is a live table, elsewhere lines. Ctrl-C ends it, and leaves the runs alone. Everything comes from the
    files, so that the runs may be those of another terminal or of another machine whose folder is mounted here.
    """
    return _show("watch", argv, live=True)


def sweep(argv: Sequence[str]) -> int:
    """Print the table of the sweep in a folder, `sweep DIR`, also while it runs; nothing is written.

    DIR may be a folder above it that holds nothing else. `watch DIR` follows the sweep.
    """
    return _show("sweep", argv, live=False)


def _show(verb: str, argv: Sequence[str], live: bool) -> int:
    """Show the table of a folder, of `sweep` only that of one sweep; if it is `live`, follow first what runs there."""
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
    if live and not view.done:
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
