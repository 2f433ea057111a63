"""`watch`: follow a run, a sweep or a folder of runs from its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.config.errors import OK, UserError
from runner.verbs._folders import the_folder

_MEANT = "the folder of a run, of a sweep, or of several"

_MOST_ROWS = 20


def main(argv: Sequence[str]) -> int:
    """Show what runs in a folder until nothing does any more: `watch DIR`, where DIR is a run, a sweep or a folder of runs.

    On a terminal this is a live table, elsewhere lines. Ctrl-C ends it, and leaves the runs alone. Everything comes from the
    files, so that the runs may be those of another terminal or of another machine whose folder is mounted here.
    """
    return watch(the_folder("watch", argv, _MEANT))


def watch(folder: Path) -> int:
    """Follow a folder, and show at the end what is there.

    Raises:
        UserError: there is no run.
    """
    from runner.sweeps.follow import follow
    from runner.sweeps.table import print_table
    from runner.sweeps.view import look, progress_line
    from runner.tracking.console import Console

    if not (found := look(folder)).jobs:
        raise UserError("watch", f"there is no run in {folder}", _MEANT)
    console = Console(None)
    if not found.done:
        follow(folder, console)
    view = look(folder)
    if view.is_sweep or len(view.jobs) <= _MOST_ROWS:
        print_table([seen.row for seen in view.jobs], console)
    else:
        console.line(progress_line(view))
    return OK
