"""The folders that runs and sweeps write into: whether they can be made, and what they hold."""

from __future__ import annotations

import os
import tempfile
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
    """Folders on the command line that cannot be made; Hydra makes them before any job starts."""
    problems = []
    for key, _, value in (word.partition("=") for word in words):
        if key in ("hydra.run.dir", "hydra.sweep.dir", "sweep.dir", "output_root"):
            path = Path(value.strip("'\""))
            if reason := _not_makeable(path):
                message = f"cannot be {path}: {reason}"
                problems.append(Problem(key, message, "a folder", origin=f"the override {key}={value}"))
    return problems


def _not_makeable(path: Path) -> str:
    """The reason why a folder cannot be made, found by making another one in its place; an empty string if it can."""
    try:
        there = next(each for each in (path, *path.parents) if each.exists())
        if not there.is_dir():
            return f"{there} is a file"
        if there == path and not os.access(path, os.W_OK | os.X_OK):
            return "permission denied"
        if there != path:
            Path(tempfile.mkdtemp(prefix=".runner_", dir=there)).rmdir()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""
