"""Finds the file that `ckpt_path=` means, or another one when it is damaged."""

from __future__ import annotations

import copy
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from runner.base.errors import UserError, nearest_path
from runner.base.reading import modified, read_summary, start_time
from runner.checkpoint.file import DamagedCheckpoint, Parts, read
from runner.config.gone import drop, warning
from runner.config.yaml_files import plain

SUFFIX = ".safetensors"
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was read, where it lies, and what was passed over on the way to it."""

    path: Path
    contents: dict[str, Any]
    warnings: list[str]


def beside(path: Path, key: str = "ckpt_path") -> str:
    """Whether a checkpoint is the best or the last one of its run, and where the other one is; empty without another."""
    other = {"best": "last", "last": "best"}.get(path.stem, path.stem)
    try:
        step, there = (
            read(path.with_name(f"{stem}{SUFFIX}"), lambda _: ())["position"]["global_step"]
            for stem in (path.stem, other)
        )
    except UserError:  # there is none, or it is damaged, and nobody asked for it
        return ""
    where = f"{key}={path.with_name(f'{other}{SUFFIX}')}"
    return "" if there == step else f"{path.stem}, step {step} ({other}: step {there}, {where})"


def load(
    ckpt_path: str, runs: Path, prefer: str, key: str = "ckpt_path", *, parts: Parts | None = None, later: bool = False
) -> LoadedCheckpoint:
    """Read the checkpoint that `ckpt_path` names; where `last` is damaged, the newest one of the same run that is not.

    Args:
        ckpt_path: a file, a run directory, `last` for the newest run in `runs`, or `best` for its best checkpoint.
        runs: folder with the runs of one name.
        prefer: `last` or `best`: which one a run stands for.
        key: the key of the config that names it, for messages.
        parts, later: what is needed, and when, see `runner.checkpoint.file.read`.

    Raises:
        UserError: if nothing is there, or nothing valid.
    """
    # Words find the run by time; a path may name a file, a run directory, or a folder of checkpoints
    run = newest_run(runs, key) if ckpt_path in ("last", "best") else Path(ckpt_path)
    if run.is_file():
        return _first_whole([run], key, parts, later, single=True)
    if not run.is_dir():
        special = run.exists() or run.is_symlink()
        problem, near = (f"{run} is not a regular file", "") if special else (f"there is no {run}", nearest_path(run))
        raise UserError(key, problem, "a checkpoint file, a run directory, last or best", near)
    # Checkpoints may have been moved out of their run directory
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if "best" in (ckpt_path, prefer) and (best := named(folder, "best")):
        return _first_whole([best], key, parts, later, single=True)
    # Whoever asks for the best one by name does not want another; a verb that only prefers it gets the last
    if ckpt_path == "best":
        raise UserError(key, f"{run} has no best checkpoint", f"{key}=last")
    if not (paths := _newest(folder)):
        raise UserError(key, f"{folder} has no checkpoint (last or step_* with {SUFFIX})")
    return _first_whole(paths, key, parts, later)


def newest_run(runs: Path, key: str = "ckpt_path") -> Path:
    """The run directory of the newest run that has a checkpoint: the one that was started last, see `start_time`.

    Runs for debugging and trials of searches, whose summary has `not_last`, do not count. Raises `UserError` if no run in
    `runs` has one.
    """
    patterns = (f"{runs_of}/checkpoints/last{SUFFIX}" for runs_of in ("*", "sweeps/*/*"))
    found = [path for pattern in patterns for path in runs.glob(pattern) if path.is_file()]
    # The message names runs that exist, because a wrong name or output_root is the usual cause
    if not found:
        begun = max(runs.glob("*/overrides.yaml"), key=lambda path: modified(path) or _LONG_AGO, default=None)
        none = f"no run with a checkpoint in {runs}" + (f": the newest, {begun.parent}, has none yet" if begun else "")
        beside = runs.parent.glob(f"*/*/checkpoints/last{SUFFIX}")
        others = sorted({path.parts[len(runs.parent.parts)] for path in beside})
        hint = f", or name={others[0]} (there are runs of {', '.join(others[:8])})" if others and not begun else ""
        raise UserError(key, none, f"a checkpoint file or a run directory{hint}")

    newest_first = sorted((path.parents[1] for path in found), key=recency, reverse=True)
    for run in newest_first:
        if not (read_summary(run) or {}).get("not_last"):
            return run
    reason = (read_summary(newest_first[0]) or {}).get("not_last")
    problem = (
        f"each run with a checkpoint in {runs} is for debugging or a trial: the newest, {newest_first[0]}, has {reason}"
    )
    raise UserError(key, problem, f"{key}={newest_first[0]}, or another run")


def recency(run: Path) -> tuple[datetime, datetime, list[int]]:
    """Larger for a run that started later; with equal times, for one saved later, or with larger numbers in its name."""
    # Times of files change when runs are copied, so the recorded start counts first
    saved = modified(run / "checkpoints" / f"last{SUFFIX}") or modified(run / "overrides.yaml") or _LONG_AGO
    return start_time(run) or saved, saved, [int(part) for part in re.findall(r"\d{1,18}", run.name)]


def named(folder: Path, stem: str) -> Path | None:
    """The checkpoint of a name such as `last` in a folder; None without."""
    return path if (path := folder / f"{stem}{SUFFIX}").is_file() else None


def step_files(folder: Path) -> list[Path]:
    """Checkpoints of single steps in a folder, newest step first."""
    return sorted(folder.glob(f"step_*{SUFFIX}"), reverse=True)


def resumable(run: Path) -> bool:
    """Whether a run directory has a checkpoint."""
    return bool(_newest(run / "checkpoints"))


def _newest(folder: Path) -> list[Path]:
    """The checkpoints of a run but its best one, newest first."""
    return [*filter(None, [named(folder, "last")]), *filter(Path.is_file, step_files(folder))]


def _first_whole(
    paths: list[Path], key: str, parts: Parts | None, later: bool, single: bool = False
) -> LoadedCheckpoint:
    """The first checkpoint that is not damaged; a `single` one is not replaced, and the error names one beside it."""
    damaged = list[UserError]()
    if single:
        paths = [*paths, *(path for path in _newest(paths[0].parent) if not path.samefile(paths[0]))]
    for path in paths:
        try:
            # What is recommended is read whole
            contents = read(path, None if damaged and single else parts, later)
        except UserError as error:
            # A file of a newer version is not damaged, and no older one is taken instead
            if not (isinstance(error, DamagedCheckpoint) or (single and damaged)):
                raise
            damaged.append(error)
            continue
        if single and damaged:
            problem, allowed = damaged[0].problems[0], f"the newest valid one beside it: {key}={path}"
            raise DamagedCheckpoint(problem.key, problem.message, allowed)
        was = drop(copy.deepcopy(plain(contents["config"], str(path))))
        return LoadedCheckpoint(path, contents, [*map(str, damaged), *warning(str(path), was)])
    if single:
        raise damaged[0]
    raise DamagedCheckpoint(f"{key}: no checkpoint of this run is whole:\n    " + "\n    ".join(map(str, damaged)))
