"""Decides what a run is asked to do: by the command line, a checkpoint, or the same command given before."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

from runner.base import slurm
from runner.base.durations import seconds
from runner.base.errors import ConfigError, UserError
from runner.base.reading import number_or_none, read_json, read_overrides, read_regular, read_summary
from runner.base.secrets import mask_words
from runner.checkpoint import find
from runner.config.changes import changes_refused, other_run
from runner.config.composition import Composition
from runner.config.gone import words_without
from runner.config.keys import at, key_of, to_plain, within
from runner.config.load import resolve_config, statistics_of_others
from runner.config.output_folders import holds_run
from runner.config.schema.train import Train
from runner.config.stored import resolve_with_checkpoint, settings_changed
from runner.distributed.world import restarted
from runner.run.directory import refuse_special_files
from runner.run.hub import local
from runner.run.run_directory import RunDirectory


def decide(directory: RunDirectory) -> None:
    """Decide on the config: that of the command line, or of a checkpoint with the command line on top."""
    composition = directory.composition
    ckpt_path = composition.values.get("ckpt_path")
    # Look for an earlier run of this command to continue: resume=auto, or a job that the scheduler started again
    if composition.resumes or restarted():
        # A job of a sweep begins with the checkpoint, and resumes from its own.
        if ckpt_path is not None and composition.values.get("resume") == "auto" and composition.job_dir is None:
            raise UserError("resume", "is auto, which finds the checkpoint by itself, and ckpt_path names one")
        again, directory.warnings = to_continue(composition)
        # A finished run is not trained again, and its weights are not read: the caller reports it
        if again is not None and (read_summary(again) or {}).get("status") == "finished":
            directory.config, directory.finished = resolve_config(composition, Train), again
            return
        directory.again = again
        # A run that was killed before its first checkpoint has nothing to resume: it begins again in its directory
        if again is not None and find.resumable(again):
            ckpt_path = again
    if ckpt_path is None:
        directory.config = resolve_config(composition, Train)
        # An earlier run may have had them, and a new one is refused
        if directory.again is None and (problems := statistics_of_others(directory.config, composition)):
            raise ConfigError(problems)
        return
    found = find.load(local(str(ckpt_path), "ckpt_path"), composition.runs, prefer="last", later=True)
    # From here on, a checkpoint is used: its config comes first, and the command line changes it
    config, differences = resolve_with_checkpoint(found.contents["config"], str(found.path), composition, Train)
    # Where a run sends to is for the command line to say.
    gone = [key[:-9] for key, _, now in differences if now == "-" and re.fullmatch(r"logger\.[^.]+\._target_", key)]
    if gone and "logger" not in map(key_of, composition.overrides):
        differences = [each for each in differences if each[0] != "logger" and not within(each[0], gone)]
        left = f"{', '.join(gone[:3])}: not taken from the checkpoint; logger= on the command line sets it"
        directory.warnings.append(left)
    # Some changes would make the state of the checkpoint meaningless; they are refused before anything is built
    if refused := changes_refused([key for key, _, _ in differences], found.contents["position"]["batch"] > 0):
        raise ConfigError(refused)
    directory.config, directory.found, directory.differences = config, found, differences
    if config.budget is not None:  # of which the run has used a part already
        used = number_or_none(at(read_summary(found.path.resolve().parents[1]), "budget_used")) or 0.0
        directory.began -= used * seconds(config.budget)
    directory.warnings += found.warnings


def to_continue(composition: Composition) -> tuple[Path | None, list[str]]:
    """The run that `resume=auto` means, and warnings about others that were skipped.

    It is the run in the folder that Hydra was given, or the newest unfinished one of this command.
    """
    fixed = composition.job_dir or composition.run_dir
    if fixed is not None and (fixed / "summary.json").is_file():
        refuse_special_files(fixed)  # before anything in it is read
        return fixed, []
    if fixed is not None:
        return None, []
    # A requeued job continues what it began itself, as other jobs may have the same command.
    of_job = os.environ["SLURM_JOB_ID"] if slurm.restarted() and not composition.resumes else None
    unlike = _compared_with(composition)

    def same(run: Path) -> bool:
        job = at(read_json(run / "environment.json"), "variables.SLURM_JOB_ID")
        return of_job in (None, job) and not unlike(run)

    return unfinished(composition.runs, same)


def unfinished(runs: Path, same: Callable[[Path], bool]) -> tuple[Path | None, list[str]]:
    """The newest run in `runs` that is the `same` and has not finished, unless a newer one has, and warnings.

    Directories that cannot be read or used are skipped with a warning, because they may belong to someone else.
    """
    skipped, finished = list[str](), list[Path]()  # finished ones are compared only if it matters, as that takes time

    # A run that cannot be read is skipped with a warning, as an older one may be fine
    def fits(run: Path) -> bool:
        try:
            if not same(run):
                return False
            if os.path.lexists(run / "summary.json") and read_summary(run) is None:
                raise ValueError("summary.json cannot be read")
            refuse_special_files(run)
        except (ValueError, UserError) as error:
            skipped.append(f"resume=auto skips {run}: {error}")
            return False
        return True

    # Every run has this file, because it is written first
    for run in sorted((path.parent for path in runs.glob("*/overrides.yaml")), key=find.recency, reverse=True):
        if (read_summary(run) or {}).get("status") == "finished":
            # A finished run that is newer than the unfinished one wins: what was interrupted was done again
            finished.append(run)
        elif fits(run):
            return (None if any(map(fits, finished)) else run), skipped
    return None, skipped


def _compared_with(composition: Composition) -> Callable[[Path], list[str]]:
    """A function that gives the keys in which a run has other settings than a command; ValueError if it cannot be read."""
    config = functools.cache(lambda: resolve_config(composition, Train))

    def unlike(folder: Path) -> list[str]:
        path = folder / "config.yaml"
        try:
            # The config has every setting; a run that was killed before it wrote one has only its overrides
            if os.path.lexists(path):
                return settings_changed(read_regular(path).decode(), str(path), to_plain(config()), composition)
            path = folder / "overrides.yaml"
            # Overrides are stored with secrets masked, so they are compared masked
            words = {*words_without(read_overrides(folder))} ^ {*mask_words(composition.overrides)}
        except (OSError, ValueError, UserError) as error:
            raise ValueError(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        return sorted({key for key in map(key_of, words) if other_run(key) or key == "ckpt_path"})

    return unlike


def why_occupied(composition: Composition) -> UserError | None:
    """The mistake of resuming in the folder of `hydra.run.dir` while it belongs to another run; None for no mistake."""
    fixed = composition.run_dir
    # The settings of a run that resumes a checkpoint are not those of the command
    of_checkpoint = composition.values.get("ckpt_path") is not None
    if fixed is None or not composition.resumes or not holds_run(fixed) or of_checkpoint:
        return None
    try:
        unlike = _compared_with(composition)(fixed)
        reason = f"of other settings ({', '.join(unlike[:5])})" if unlike else ""
    except ValueError as error:
        reason = f"whose {error}"
    other = f", or ckpt_path={fixed} hydra.run.dir={fixed} instead of resume=auto, to continue it with other settings"
    allowed = f"its command, another folder{other if find.resumable(fixed) else ''}"
    return UserError("resume", f"is auto, and {fixed} holds a run {reason}", allowed) if reason else None
