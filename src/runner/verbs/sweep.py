"""`sweep`: the table of a sweep, from its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.config.errors import OK, UserError
from runner.config.output_folders import holds_run, holds_sweep
from runner.tracking.formats import amount
from runner.verbs._folders import the_folder

_LISTED = 5  # sweeps in an error, the newest


def main(argv: Sequence[str]) -> int:
    """Print the table of the sweep in a folder, `sweep DIR`, also while it runs; nothing is written.

    DIR may be a folder above it that holds nothing else. With `--follow`, the table is live until nothing runs any more, as
    with `watch DIR`.
    """
    folder = the_folder("sweep", argv, "the folder of a sweep", ["--follow"])
    from runner.sweeps.table import print_best, print_table
    from runner.sweeps.view import look, progress_line
    from runner.tracking.console import Console

    found = look(folder)
    if not found.is_sweep:
        _require_sweep(folder, found.sweeps)
    if "--follow" in argv:
        from runner.verbs.watch import watch

        return watch(folder)
    console = Console(None)
    if not found.done:
        console.line(progress_line(found))
    print_table([seen.row for seen in found.jobs], console)
    print_best(found.folder, console)
    return OK


def _require_sweep(folder: Path, below: Sequence[Path]) -> None:
    """Refuse a folder of several sweeps, of one run, or without any.

    Raises:
        UserError: with the folder that is probably meant.
    """
    if below:
        newest = ", ".join(map(str, [*reversed(below)][:_LISTED]))
        raise UserError("sweep", f"{folder} is the folder of {amount(len(below), 'sweep')} and perhaps of runs", newest)
    if holds_run(folder):
        around = folder.absolute().parent
        told = f"the sweep {around}" if holds_sweep(around) else f"python -m runner report {folder}"
        raise UserError("sweep", f"{folder} is the folder of one run", told)
    if not holds_sweep(folder):
        raise UserError("sweep", f"{folder} holds no sweep", f"python -m runner report {folder}, for runs at any depth")
