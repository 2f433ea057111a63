"""`sweep`: the table of a sweep, from its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.config.errors import OK, UserError
from runner.config.output_folders import holds_sweep


def main(argv: Sequence[str]) -> int:
    """Print the table of the sweep in a folder, `sweep DIR`, also while it runs; nothing is written.

    With `--follow`, the table is live until nothing runs any more, as with `watch DIR`.
    """
    words = [word for word in argv if word != "--follow"]
    folder = Path(words[0]) if len(words) == 1 else None
    if folder is None or not holds_sweep(folder):
        problem = f"needs the folder of a sweep, got {' '.join(argv) or 'nothing'}"
        raise UserError("sweep", problem, "python -m runner sweep outputs/digits/sweeps/2026-11-20_11-45-53")
    if len(words) < len(argv):
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
