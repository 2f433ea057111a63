"""Show the environment: versions, devices and settings that a run depends on."""

from __future__ import annotations

import json
from collections.abc import Sequence

from runner.config.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Print the environment as a table, or as JSON with `--json`."""
    if any(word != "--json" for word in argv):
        raise UserError(f"env: unknown argument '{argv[0]}'\n    allowed: --json")
    from runner.tracking.environment import environment, lines

    found = environment()
    if "--json" in argv:
        print(json.dumps(found, indent=2))
        return 0
    rows = lines(found)
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    return 0
