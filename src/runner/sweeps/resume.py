"""A sweep that continues: which folder it has, and what each of its jobs finds in the ledger before it imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from runner.config.app import Composition, current
from runner.config.errors import PREEMPTED, ConfigError, Problem, UserError
from runner.config.keys import within
from runner.config.output_folders import holds_run, holds_sweep
from runner.config.secrets import mask_words
from runner.config.stored import differences
from runner.sweeps.ledger import ENDED, NAME, Entry, Ledger, Plan, Records, identity, outcome
from runner.sweeps.table import command_alone
from runner.tracking.formats import number
from runner.tracking.run_directory import hold

_ENDING_S = 60.0
_held: dict[Path, int] = {}
"""Locks on the folders of this process's sweeps."""


def to_continue(root: Path, plan: Plan) -> Path | None:
    """The folder that the sweep gets: the one that is named, that of the newest sweep of the same command, or None for a new one.

    Raises:
        UserError: for a folder that holds something else.
        ConfigError: for a sweep of another base config under `sweep_dir=`, with the differences.
    """
    named, new = plan.values.get("sweep_dir"), _is_true(plan, "new_sweep")
    if named is not None and (plan.given or new):
        raise UserError(
            "sweep_dir", f"is {named}, and {'hydra.sweep.dir' if plan.given else 'new_sweep'} is given too", "one"
        )
    if plan.given is not None:
        return plan.given
    if named is not None:
        folder = Path(str(named))
        records = Ledger(folder).read()
        if records.launches:
            if found := _base_changed(records, plan):
                message = "is a sweep with another base config: "
                message += ", ".join(f"{key} was {before}, now {after}" for key, before, after in found)
                raise ConfigError([Problem("sweep_dir", message, "its values, or another folder")])
        elif holds_run(folder) or holds_sweep(folder):
            kind = "a run" if holds_run(folder) else "a sweep without sweep.jsonl"
            raise UserError("sweep_dir", f"cannot be {folder}: it holds {kind}", "another folder")
        return folder
    if new or (plan.jobs is None and not plan.searches):
        return None  # a sweeper that chooses values does not say whether anything is left
    same = [(records.launches[0]["time"], path.parent) for path, records in _sweeps(root) if _is_same(records, plan)]
    return max(same)[1] if same else None


def _sweeps(root: Path) -> Iterator[tuple[Path, Records]]:
    for path in root.glob(f"*/{NAME}"):
        records = Ledger(path.parent).read()
        if records.launches:
            yield path, records


def _is_same(records: Records, plan: Plan) -> bool:
    return records.launches[-1]["swept"] == list(plan.swept) and not _base_changed(records, plan)


def _base_changed(records: Records, plan: Plan) -> list[tuple[str, str, str]]:
    """Keys whose values differ, except where a sweep has several."""
    swept = [key.replace("/", ".") for launch in records.launches for key in launch["swept"]] + list(plan.swept)
    now = json.loads(json.dumps(plan.base(), default=str))
    return [found for found in differences(records.launches[-1]["base"], now) if not within(found[0], swept)]


def begin(folder: Path, plan: Plan) -> None:
    """Lock the folder of a sweep while this process lives or begins another one, and record the launch.

    Raises:
        UserError: another process runs this sweep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while _held:
        os.close(_held.popitem()[1])
    lock = _lock(folder)
    if lock is not None:
        _held[folder] = lock
    ledger = Ledger(folder)
    known = ledger.read().jobs
    _wait_for(known.values())
    if known and plan.jobs is not None:
        done = [job for job in plan.jobs if job in known and outcome(known[job].folder).status == "finished"]
        left = "new_sweep=true starts another sweep" if len(done) == len(plan.jobs) else "the others follow"
        print(f"{folder}: {len(done)} of {len(plan.jobs)} jobs have finished already; {left}", flush=True)
    jobs = None if plan.jobs is None else {job: mask_words(words) for job, words in plan.jobs.items()}
    wanted = {"retry": plan.values["retry"], "retries": int(plan.values["retries"])}
    wanted["fail_fast"] = _is_true(plan, "fail_fast")
    ledger.append("launch", swept=list(plan.swept), base=plan.base(), jobs=jobs, flags=list(plan.flags), **wanted)


def refuse_held(folder: Path) -> None:
    """Refuse the folder of a sweep that another process runs, with how to show it and how to end it."""
    if folder.is_dir() and (lock := _lock(folder)) is not None:
        os.close(lock)


def _lock(folder: Path) -> int | None:
    try:
        return hold(folder)
    except UserError as error:
        runs = f"{str(error).partition(';')[0].replace('written', 'run')}: python -m runner sweep {folder} shows it"
        raise UserError("sweep_dir", runs, "wait for it, end it with kill, or new_sweep=true for another one") from None


def _wait_for(jobs: Iterable[Entry]) -> None:
    """Wait for processes of jobs that outlive a killed launch: they are saving, and end.

    Raises:
        UserError: for one that does not end.
    """
    until, said = time.monotonic() + _ENDING_S, False
    for folder in [job.folder for job in jobs if job.status not in ENDED and (job.folder / ".lock").exists()]:
        while True:
            try:
                lock = hold(folder)
                break
            except UserError as error:
                if time.monotonic() > until:
                    raise UserError(
                        "sweep_dir", f"still has a job that runs: {error}", "wait for it, or kill it"
                    ) from None
                if not said:
                    print(f"{folder} is left by a launch that was killed: waiting until it has saved", flush=True)
                said = True
                time.sleep(0.1)
        if lock is not None:
            os.close(lock)


def _is_true(plan: Plan, key: str) -> bool:
    """Whether a key is true; quotes make a text of it, which the types accept."""
    return str(plan.values.get(key)).lower() == "true"


def run_or_skip(cfg: Any, run: Callable[[Any], float | None]) -> float | None:
    """Run a job unless the ledger of its sweep says that it does not have to; returns the value that sweepers optimise.

    `cfg` is the config that Hydra composed for a job, or a composition whose `job_dir` lies in the folder of the sweep.
    """
    composition = cfg if isinstance(cfg, Composition) else current(cfg)
    if composition.job_dir is None:
        return run(composition)
    folder = composition.job_dir.parent.absolute()
    if not isinstance(cfg, Composition):
        from hydra.core.hydra_config import HydraConfig

        folder = Path(str(HydraConfig.get().sweep.dir)).absolute()
    ledger = Ledger(folder)
    launches = ledger.read().launches
    if not launches:
        return run(composition)
    made = composition.job_dir
    swept = launches[-1]["swept"]
    job = ledger.start(identity(composition.values, composition.overrides, swept), composition.overrides, made)
    if job.folder.resolve() != made.resolve() or job.skipped or job.pending:
        with contextlib.suppress(OSError):
            made.rmdir()  # Hydra makes a folder before it asks
    if job.skipped is not None:
        told = f", {job.skipped.metric} {number(job.skipped.value)}" if job.skipped.metric else ""
        print(f"skipped: {job.folder} has {job.skipped.status} already{told}", flush=True)
        return job.skipped.value
    if job.pending is not None:
        print(f"pending: {job.pending.folder} failed, and fail_fast=true", flush=True)
        return None
    while True:
        try:
            value = run(dataclasses.replace(composition, job_dir=job.folder, continues=job.continues))
        except SystemExit as stop:
            if stop.code == PREEMPTED:
                job.record()
            raise
        if not job.record():
            if (found := outcome(job.folder)).status == "failed":
                repeat = command_alone(job.words, launches[-1].get("flags") or [])
                print(f"failed: {found.sentence}\n    log: {job.folder / 'run.log'}\n    again: {repeat}", flush=True)
            return value
        print(f"again: {job.folder} failed, and retries={ledger.read().launches[-1]['retries']}", flush=True)
        job = dataclasses.replace(job, continues=True)
