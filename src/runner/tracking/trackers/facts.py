"""What a tracker's run is called and described by, from the files of a run directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.reading import read_regular, read_summary
from runner.tracking.trackers.spool import Spool

_OF_SWEEPS = ("sweep.jsonl", "multirun.yaml")


@dataclass(frozen=True)
class Facts:
    """The description of a run."""

    name: str  # of the directory; in a sweep, with that of the sweep's folder
    experiment: str  # key `name` of the config
    config: dict[str, Any]  # flat
    tags: dict[str, str]
    words: list[str]  # key `tags`
    notes: str | None
    group: str | None  # folder of the sweep

    @classmethod
    def of(cls, spool: Spool) -> Facts:
        """Read the files of a run."""
        directory, config = spool.directory.absolute(), spool.config()
        sweep = directory.parent if any((directory.parent / name).exists() for name in _OF_SWEEPS) else None
        summary = read_summary(directory) or {}
        tags = {"runner.directory": str(directory), "runner.uid": spool.state["uid"]}
        if summary.get("resumed_from"):
            tags["runner.resumed_from"] = str(summary["resumed_from"])
        if sweep:
            tags["runner.sweep"] = str(sweep)
        if spool.state["superseded"]:
            tags["runner.replaces"] = " ".join(map(str, spool.state["superseded"]))
        commit = _git_commit(directory)
        return cls(
            name=f"{sweep.name}/{directory.name}" if sweep else directory.name,
            experiment=str(config.get("name", "data")),
            config=config,
            tags=tags | ({"mlflow.source.git.commit": commit} if commit else {}),
            words=[str(word) for word in config.get("tags") or []],
            notes=config.get("notes"),
            group=sweep.name if sweep else None,
        )


def _git_commit(directory: Path) -> str | None:
    try:
        environment = json.loads(read_regular(directory / "environment.json"))
        commit = environment["git"]["commit"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return commit if isinstance(commit, str) else None
