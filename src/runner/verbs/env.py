"""`env`: versions, devices and settings that a run depends on."""

from __future__ import annotations

import json
from collections.abc import Sequence

from runner.base.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Print the environment as a table, or as JSON with `--json`, which stands for `json=true`."""
    if wrong := [word for word in argv if word != "json=true"]:
        raise UserError("env", f"unknown argument '{wrong[0]}'", "--json")
    from runner.tracking.environment import environment, lines

    found = environment()
    if argv:
        print(json.dumps(found, indent=2))
        return 0
    rows = lines(found)
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    return 0
