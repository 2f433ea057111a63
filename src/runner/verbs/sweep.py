"""`sweep`: the table of a sweep, from its files."""

from __future__ import annotations

from collections.abc import Sequence

from runner.config.errors import OK, UserError
from runner.config.output_folders import holds_run, holds_sweep
from runner.verbs._folders import the_folder


def main(argv: Sequence[str]) -> int:
    """Print the table of the sweep in a folder, `sweep DIR`, also while it runs; nothing is written.

    With `--follow`, the table is live until nothing runs any more, as with `watch DIR`.
    """
    folder = the_folder("sweep", argv, "the folder of a sweep", ["--follow"])
    if not holds_sweep(folder):
        if holds_run(folder):
            around = folder.absolute().parent
            told = f"the sweep {around}" if holds_sweep(around) else f"python -m runner report {folder}"
            raise UserError("sweep", f"{folder} is the folder of one run", told)
        raise UserError("sweep", f"{folder} holds no sweep", f"python -m runner report {folder}, for runs at any depth")
    if "--follow" in argv:
        from runner.verbs.watch import watch

        return watch(folder)
    from runner.sweeps.table import print_best, print_table, summarise
    from runner.sweeps.view import look, progress_line
    from runner.tracking.console import Console

    console, found = Console(None), look(folder)
    if not found.done:
        console.line(progress_line(found))
    print_table(summarise(folder, write=False), console)
    print_best(folder, console)
    return OK
