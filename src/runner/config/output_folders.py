"""The folders that runs and sweeps write into: whether they can be made, and whether they are occupied."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from runner.config.errors import Problem
from runner.config.reading import read_regular
from runner.config.secrets import mask_words

_OF_SWEEPS = ("multirun.yaml", "sweep.json", "sweep.jsonl")
_OF_RUNS = ("summary.json", "overrides.yaml")


def holds_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any(os.path.lexists(folder / name) for name in _OF_RUNS)


def holds_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep."""
    jobs = (job / name for job in folder.glob("*/") for name in _OF_RUNS)
    return any(os.path.lexists(path) for path in (*(folder / name for name in _OF_SWEEPS), *jobs))


def why_occupied(folder: Path, words: Iterable[str], resumes: bool) -> Problem | None:
    """A problem if a folder is occupied by another sweep or a run.

    Args:
        folder: the folder of the sweep.
        words: the overrides of the command line, those of `hydra.*` too.
        resumes: whether the jobs have `resume=auto`.
    """
    key, others = "hydra.sweep.dir", "another folder"
    if holds_run(folder):
        return Problem(key, f"cannot be {folder}: it contains a run", others)
    if not holds_sweep(folder):
        return None
    if not resumes:
        allowed = f"{others}, or resume=auto to continue it"
        return Problem(key, f"cannot be {folder}: it contains a sweep", allowed)
    if not os.path.lexists(folder / "multirun.yaml"):
        return None  # not every sweeper writes it; each job looks at its own folder too
    try:
        before = _words_of(folder)
    except (OSError, ValueError) as error:
        return Problem(key, f"cannot be {folder}: its multirun.yaml cannot be read: {error}", others)
    now = _that_matter(mask_words(words))  # as they are stored
    if before == now:
        return None
    unlike = [f"{word} before" for word in before if word not in now]
    unlike += [f"{word} now" for word in now if word not in before]
    message = f"cannot be {folder}: it contains a sweep with other settings ({', '.join(unlike)})"
    return Problem(key, message, f"{others}, or its command")


def _words_of(folder: Path) -> list[str]:
    """The overrides that the sweep in a folder was started with.

    Raises:
        OSError: if its file cannot be read.
        ValueError: if it does not contain them.
    """
    try:
        content = yaml.load(read_regular(folder / "multirun.yaml"), Loader=yaml.BaseLoader)
        overrides = content["hydra"]["overrides"]
        return _that_matter([*overrides["task"], *overrides["hydra"]])
    except (yaml.YAMLError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ValueError("it is not Hydra's") from error


def _that_matter(words: Iterable[str]) -> list[str]:
    """The overrides that determine the jobs; where they run, in which folder, and `resume=auto` do not matter."""
    plain = sorted(str(word).lstrip("+") for word in words if not str(word).startswith("resume="))
    return [word for word in plain if not word.startswith("hydra") or word[5:].startswith((".sweeper", "/sweeper"))]


def not_folders(words: Sequence[str]) -> list[Problem]:
    """Folders on the command line that cannot be made; Hydra makes them before any job starts."""
    problems = []
    for word in words:
        key, _, value = word.partition("=")
        if key in ("hydra.run.dir", "hydra.sweep.dir", "sweep_dir", "output_root"):
            path = Path(value.strip("'\""))
            if reason := _not_makeable(path):
                message, allowed = f"cannot be {path}: {reason}", "a folder, or one that can be made"
                problems.append(Problem(key, message, allowed, origin=f"the override {word}"))
    return problems


def _not_makeable(path: Path) -> str:
    """Why a folder cannot be made, found by making another one in its place; an empty string if it can."""
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
