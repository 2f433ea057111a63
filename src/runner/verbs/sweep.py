"""`sweep`: the view of `watch`, once and of one sweep."""

from __future__ import annotations

from collections.abc import Sequence

from runner.verbs.watch import show


def main(argv: Sequence[str]) -> int:
    """Print the table of the sweep in a folder, `sweep DIR`, also while it runs; nothing is written.

    DIR may be a folder above it that holds nothing else. `watch DIR` follows the sweep.
    """
    return show("sweep", argv, live=False)
