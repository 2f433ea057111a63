"""The folders that runs and sweeps write into: whether they can be made, and what they hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from runner.base.errors import Problem

_OF_SWEEPS = ("sweep.json", "sweep.jsonl")
_OF_RUNS = ("summary.json", "overrides.yaml")


def holds_run(folder: Path) -> bool:
    """Tell whether a folder is that of a run."""
    return any(os.path.lexists(folder / name) for name in _OF_RUNS)


def holds_sweep(folder: Path) -> bool:
    """Tell whether a folder is that of a sweep."""
    jobs = (job / name for job in folder.glob("*/") for name in _OF_RUNS)
    return any(os.path.lexists(path) for path in (*(folder / name for name in _OF_SWEEPS), *jobs))


def in_sweep(folder: Path) -> bool:
    """Tell whether a folder is that of a job of a sweep, or will be."""
    return (folder.parent / "sweep.jsonl").is_file()


def not_folders(words: Sequence[str]) -> list[Problem]:
    """Folders on the command line that cannot be made, as far as their nearest parent tells; torch is not needed to say so."""
    problems = []
    for key, _, value in (word.partition("=") for word in words):
        if key not in ("hydra.run.dir", "hydra.sweep.dir", "sweep.dir", "output_root"):
            continue
        path = Path(value.strip("'\""))
        there = next(each for each in (path, *path.parents) if os.path.lexists(each))
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            continue
        reason = "permission denied" if there.is_dir() else f"{there} is a file"
        problems.append(Problem(key, f"cannot be {path}: {reason}", "a folder", origin=f"the override {key}={value}"))
    return problems
