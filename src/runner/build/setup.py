"""What a run is told to do, and where: by the command line, a checkpoint, or the same command given before."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.checkpoint import find
from runner.config.app import Composition
from runner.config.changes import changes_refused
from runner.config.errors import ConfigError, Problem, UserError
from runner.config.output_folders import holds_sweep
from runner.config.reading import read_overrides
from runner.config.resolve import checked, merged
from runner.config.schema.train import Train
from runner.config.secrets import mask_words
from runner.tracking.run_directory import RunDirectory, claim, timestamp, unfinished


@dataclass
class Setup:
    """What a run is told to do.

    Attributes:
        config: the validated config.
        values: the same as plain containers, which go into `config.yaml` and every checkpoint.
        found: the checkpoint to resume from.
        differences: (key, before, after) of what the command line changed in the checkpoint's config.
        again: the directory of a run that `resume=auto` goes on with, or starts anew.
        finished: the same if that run has nothing left to do.
        warnings: what was skipped on the way.
    """

    config: Train
    values: dict[str, Any]
    found: find.LoadedCheckpoint | None = None
    differences: list[tuple[str, str, str]] = field(default_factory=list)
    again: RunDirectory | None = None
    finished: RunDirectory | None = None
    warnings: list[str] = field(default_factory=list)


def settle(composition: Composition) -> Setup:
    """Decide on the config: that of the command line, or of a checkpoint with the command line on top.

    Raises:
        UserError: with everything that is wrong.
    """
    values = composition.values
    ckpt_path, again, warnings = values.get("ckpt_path"), None, list[str]()
    if values.get("resume") == "auto":
        if ckpt_path is not None:
            message = "is auto, which finds the checkpoint by itself, and ckpt_path names one"
            raise ConfigError([Problem("resume", message, "one of them")])
        again, warnings = to_continue(composition)
        if again is not None and (again.read_summary() or {}).get("status") == "finished":
            return Setup(checked(values, composition, Train), values, finished=again)
        if again is not None and (find.named(again.checkpoints, "last") or find.step_files(again.checkpoints)):
            ckpt_path = again.path
    if ckpt_path is None:
        return Setup(checked(values, composition, Train), values, again=again, warnings=warnings)
    found = find.load(str(ckpt_path), Path(str(values["output_root"])) / str(values["name"]), prefer="last")
    merged_values, differences = merged(found.contents["config"], str(found.path), composition)
    if merged_values.get("lr") == "auto":  # the rate was found when the run began, or given
        merged_values["lr"] = None
        differences = [difference for difference in differences if difference[0] != "lr"]
        if again is None:
            kept = merged_values["optimizer"].get("lr")
            found.warnings.append(f"lr=auto has no effect on a run that goes on: it keeps optimizer.lr={kept}")
    config = checked(merged_values, composition, Train, str(found.path))
    refused = changes_refused([key for key, _, _ in differences], found.contents["position"]["batch"] > 0)
    if refused:
        raise ConfigError(refused)
    return Setup(config, merged_values, found, differences, again, warnings=[*warnings, *found.warnings])


def to_continue(composition: Composition) -> tuple[RunDirectory | None, list[str]]:
    """The run that `resume=auto` means, and warnings about others that were skipped.

    It is the run in the folder that Hydra was given, or the newest unfinished one of this command.
    """
    fixed = composition.job_dir or composition.run_dir
    if fixed is not None:
        return (RunDirectory(fixed) if (fixed / "summary.json").is_file() else None), []
    runs = Path(str(composition.values["output_root"])) / str(composition.values["name"])
    return unfinished(runs, composition.words)


def why_occupied(composition: Composition) -> str:
    """Why a run may not write into the folder that Hydra was given, as it is that of another one; else an empty string."""
    fixed, resumes = composition.job_dir or composition.run_dir, composition.values.get("resume") == "auto"
    if fixed is None or not any(os.path.lexists(fixed / name) for name in ("overrides.yaml", "summary.json")):
        return ""
    if not resumes and composition.job_dir is None:
        return ""  # it may be continued by ckpt_path, see `open_directory`
    if not resumes:
        allowed = "another folder, or resume=auto, given from its first start on, to continue it"
        return f"hydra.sweep.dir: {fixed} already holds a run\n    allowed: {allowed}"
    try:
        if read_overrides(fixed) == mask_words(composition.words):  # as they are stored
            return ""
        reason = "holds a run of other settings"
    except (OSError, ValueError) as error:
        reason = f"holds a run whose overrides.yaml cannot be read: {getattr(error, 'strerror', None) or error}"
    return (
        f"resume: is auto, and {fixed} {reason}\n    allowed: its command, another folder, or "
        f"ckpt_path={fixed} hydra.run.dir={fixed} in place of resume=auto, to continue it with other settings"
    )


def open_job(composition: Composition) -> RunDirectory | None:
    """The directory of a job of a sweep, which is the job's own from here on; None for a single run.

    Raises:
        UserError: if it cannot be made, or another process has it.
    """
    if composition.job_dir is None:
        return None
    directory = RunDirectory(composition.job_dir)
    directory.lock()
    if not directory.overrides_file.exists():  # else they are the same, see `why_occupied`
        directory.write_overrides(composition.words)
    return directory


def read_best(directory: RunDirectory) -> float | None:
    """The best value of the monitored metric of a run that has finished."""
    best = (directory.read_summary() or {}).get("best")
    value = best.get("value") if isinstance(best, dict) else None
    return float(value) if isinstance(value, int | float) and abs(value) < 2**63 else None


def open_directory(setup: Setup, composition: Composition) -> RunDirectory:
    """Make the run's directory: a new one, or the one that `hydra.run.dir` names.

    Raises:
        UserError: if it cannot be made, or holds another run.
    """
    if setup.again is not None:
        return setup.again
    path = composition.run_dir
    if path is None:
        return RunDirectory(claim(Path(setup.config.output_root) / setup.config.name, timestamp()))
    if holds_sweep(path):
        raise UserError(f"hydra.run.dir: {path} holds a sweep\n    allowed: another folder")
    if (path / "summary.json").exists() and not is_inside(setup.found, path):
        raise UserError(
            f"hydra.run.dir: {path} already holds a run\n    allowed: another folder, or ckpt_path={path} to continue it there"
        )
    path.mkdir(parents=True, exist_ok=True)
    return RunDirectory(path)


def is_inside(found: find.LoadedCheckpoint | None, path: Path) -> bool:
    """Whether a checkpoint that was found lies in a run's directory."""
    return found is not None and path.resolve() in found.path.resolve().parents
