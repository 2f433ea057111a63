"""Measure what training with several processes promises.

python scripts/scale.py equality    # the same losses on 1, 2 and 3 processes, and across a change of their number
python scripts/scale.py matrix      # checkpoints of one process, ddp and fsdp, resumed in each
python scripts/scale.py kills       # killed at random moments, resumed: nothing hangs, nothing is lost
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import scale_equality
import scale_kills
import scale_speed


def options(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for module in (scale_equality, scale_kills, scale_speed):
        module.add_command(commands)
    return parser.parse_args(words)


if __name__ == "__main__":
    asked = options()
    sys.exit(asked.run(asked))
