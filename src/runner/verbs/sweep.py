"""`sweep`: the table of a sweep, from its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.config.errors import OK, UserError
from runner.config.output_folders import holds_sweep


def main(argv: Sequence[str]) -> int:
    """Print the table of the sweep in a folder, `sweep DIR`, also while it runs; nothing is written."""
    folder = Path(argv[0]) if len(argv) == 1 else None
    if folder is None or not holds_sweep(folder):
        problem = f"needs the folder of a sweep, got {' '.join(argv) or 'nothing'}"
        raise UserError("sweep", problem, "python -m runner sweep outputs/digits/sweeps/2026-11-20_11-45-53")
    from runner.sweeps.table import print_best, print_table, summarise
    from runner.tracking.console import Console

    print_table(summarise(folder, write=False), console := Console(None))
    print_best(folder, console)
    return OK
