"""Runs that have no result, as people have beside those that finished."""

from __future__ import annotations

import json
from pathlib import Path

from runner import compose
from runner.config import stored

STARTED = "2026-01-01T00:00:00+00:00"


def lay_down(runs: Path) -> None:
    """Runs in a folder of one name: pruned, failed, killed, killed before the first file of a result, and an empty folder."""
    config = stored.dump(compose("debug=smoke"))
    best = {"metric": "val/accuracy", "mode": "max", "value": 0.9, "global_step": 2, "loss": 0.3}
    summaries = {
        "pruned": {"status": "pruned", "error": None, "pruned": "as the median", "best": best, "global_step": 2},
        "failed": {"status": "failed", "error": "RuntimeError: a bug", "best": best, "global_step": 2},
        "failed_early": {"status": "failed", "error": "there is no such file"},
        "killed": {"status": "running", "error": None, "best": None, "last": {}, "global_step": 0},
        "killed_early": None,
    }
    for number, (name, summary) in enumerate(summaries.items()):
        folder = runs / f"2026-01-01_00-00-0{number}"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "overrides.yaml").write_text("- debug=smoke\n", encoding="utf-8")
        if not name.endswith("early"):
            (folder / "config.yaml").write_text(config, encoding="utf-8")
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(summary | {"started": STARTED}), encoding="utf-8")
    (runs / "2026-01-01_00-00-09").mkdir()
