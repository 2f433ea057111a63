"""The directory of a run: where it is, what the run is asked to do, and what is kept of it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import os
import pdb
import shutil
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import runner
from runner.base.durations import seconds
from runner.base.errors import FAILED, OK, PREEMPTED, USAGE, DataFailed, DiskFull, UserError, explain
from runner.base.files import make_folder, write_atomically, write_json, writing
from runner.base.reading import number_or_none, read_summary
from runner.base.secrets import mask_text, mask_words
from runner.checkpoint.find import LoadedCheckpoint, resumable
from runner.checkpoint.weights import weights_sha256
from runner.config.composition import Composition
from runner.config.keys import at
from runner.config.output_folders import holds_sweep, in_sweep
from runner.config.schema.train import Train
from runner.engine.errors import BadMetric
from runner.engine.loop import Loop
from runner.engine.state import TrainState
from runner.run.directory import claim, hold, refuse_special_files
from runner.runtime.hardware_metrics import core_wait, waited_for_core
from runner.tracking.console import Console
from runner.tracking.environment import environment
from runner.tracking.plots import learning_curves


class RunDirectory:
    """Where a run is, what it is asked to do, what is written about it, and how it ended.

    It begins without a folder, so that whatever goes wrong can be told. `runner.run.setup.decide` says what the run is asked
    to do, and `open` takes a folder, which no other process writes into until `close`.
    """

    config: Train  # set by `decide`
    path: Path  # set by `open`, or by `reserve`

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.found: LoadedCheckpoint | None = None  # the checkpoint to resume from
        self.differences: list[tuple[str, str, str]] = []  # (key, before, after) on the command line
        self.warnings: list[str] = []  # runs and checkpoints that were skipped
        self.again: Path | None = None  # the directory of the run that `resume=auto` resumes, or starts again
        self.finished: Path | None = None  # the same if that run has finished
        self.is_open = False
        self.console = Console(None)
        self.summary: dict[str, Any] = {"status": "running", "error": None}  # what `summary.json` contains
        self.exit_code = OK
        self.error: BaseException | None = None  # what ended the run early
        self.ending = contextlib.ExitStack()  # closed once the summary says how the run ended; the lock goes last
        self._to_debug: BaseException | None = None
        self._is_new = False  # whether the directory had no content when the run opened it
        self._new_folders: list[Path] = []  # that hold the directory, and did not exist before
        self._mistaken = False  # whether a mistake of the user's ended the run
        self._began = time.perf_counter()
        self._training_since: tuple[float, float | None] | None = None
        # Seconds since 1970; the imports of a command count too, but not the earlier jobs of a sweep
        self.began = (None if composition.job_dir else runner.began) or time.time()

    @classmethod
    def of_rank(cls, job: Job, found: LoadedCheckpoint | None, rank: int, scratch: Path) -> RunDirectory:
        """The directory on a rank of a run whose launcher has opened it.

        Rank 0 writes into it. Any other writes what nobody needs into `scratch`, and its messages into its own log.
        """
        directory = cls(job.composition)
        directory.config, directory.found = job.config, found
        directory.differences, directory.warnings, directory.began = job.differences, job.warnings, job.began
        directory._use(job.path if rank == 0 else scratch)
        # All ranks read the same checkpoints
        directory.checkpoints = job.path / "checkpoints"
        log = directory.log_file if rank == 0 else job.path / "logs" / f"rank_{rank}.log"
        make_folder(log.parent)
        # One progress display is enough: the other ranks write to their own log
        directory._open_console(log, None if rank == 0 else io.StringIO())
        return directory

    def job(self) -> Job:
        """What every rank of the run gets."""
        found = self.found.path if self.found else None
        return Job(self.composition, self.config, self.differences, self.warnings, self.path, found, self.began)

    def _use(self, path: Path) -> None:
        self.path, self.checkpoints, self.plots = path, path / "checkpoints", path / "plots"
        self.log_file = path / "run.log"  # what the console showed, with times
        self.metrics_file = path / "metrics.jsonl"
        for folder in (self.checkpoints, self.plots):
            make_folder(folder)

    def _take(self, path: Path) -> None:
        """Use a directory that no other process writes into from now on, until this one ends, however it ends; raises as `hold`."""
        # Before anything is written, as a link would lead the first write elsewhere
        refuse_special_files(path)
        self._use(path)
        lock = hold(path)
        self.is_open = True
        if lock is None:
            return
        self.ending.callback(os.close, lock)
        # Temporary files of a killed process; the lock excludes that another one uses them.
        for folder in (path, self.plots, self.checkpoints, path / "samples", path / "pictures"):
            for leftover in folder.glob(".*.tmp"):
                with contextlib.suppress(OSError):
                    leftover.unlink()

    def _open_console(self, log: Path, stream: io.StringIO | None = None) -> None:
        progress = self.config.log.progress
        self.console = Console(log, None if progress == "auto" else progress, stream)
        self.ending.callback(self.console.close)

    def reserve(self) -> None:
        """Open the directory of a job of a sweep, before anything can go wrong in the job."""
        if self.composition.job_dir is not None:
            self._take(self.composition.job_dir)
            # Where overrides are there already, they are the same: of a job that continues
            if not (self.path / "overrides.yaml").exists():
                self._write_overrides()

    def open(self) -> None:
        """Open the run's directory: a new one, the one of the run to continue, or the one that `hydra.run.dir` names."""
        if not self.is_open:
            path = self.again or self._new_directory()
            # A directory is removed after a user's mistake only if nothing was in it before
            self._is_new = all(each.name == ".lock" or each.is_dir() for each in path.rglob("*"))
            self._take(path)
        if self.again is not None and not self.continued:
            # A run that starts again writes them again; before the console opens run.log, or it would report a deletion by others
            others = [*self.path.glob("metrics_*.csv"), *self.path.glob("tensorboard/*")]
            for path in (self.metrics_file, self.log_file, *others):
                with writing(path):
                    path.unlink(missing_ok=True)
        self._open_console(self.log_file)

    def _new_directory(self) -> Path:
        path = self.composition.run_dir
        if path is None:
            root = Path(self.config.output_root)
            self._new_folders = [folder for folder in (root / self.config.name, root) if not folder.exists()]
            reason = self._not_last(root)
            kind = "_debug" if reason.startswith("debug=") else "_limited" * bool(reason)
            return claim(root / self.config.name, kind)
        # A run in a sweep's folder would mix with the jobs of its ledger
        if holds_sweep(path):
            raise UserError("hydra.run.dir", f"{path} holds a sweep", "another folder")
        # The results of an earlier run must not be overwritten, except by the run that resumes it
        if (path / "summary.json").exists() and not self._resumes_from(path):
            other = f"ckpt_path={path} to continue it" if resumable(path) else "resume=auto to start it again"
            raise UserError("hydra.run.dir", f"{path} already holds a run", f"another folder, or {other} there")
        self._new_folders = [folder for folder in path.parents if not folder.exists()]
        make_folder(path)
        return path

    def _resumes_from(self, path: Path) -> bool:
        return self.found is not None and path.resolve() in self.found.path.resolve().parents

    @property
    def continued(self) -> bool:
        """Whether the run continues in the directory of the checkpoint that it resumes from."""
        return self._resumes_from(self.checkpoints.parent)

    def leave(self) -> float | None:
        """Report a run that `resume=auto` found finished, leave it as it is, and return its best monitored value."""
        assert self.finished is not None
        print(f"{self.finished} has finished already", flush=True)
        self.ending.close()
        self.is_open = False
        return number_or_none(at(read_summary(self.finished), "best.value"))

    def _not_last(self, folder: Path) -> str:
        """Why `ckpt_path=last` does not mean this run: it is for debugging, or a trial of a search; empty if it does."""
        limits = [f"limit.{key}={value}" for key, value in vars(self.config.limit).items() if value is not None]
        debug = [f"debug={name}"] if (name := self.composition.given_choices.get("debug")) else []
        trial = at(self.composition.values, "search.sampler") is not None and in_sweep(folder)
        return ", ".join([*debug, *limits, *(["values of a search"] if trial else [])])

    def begin(self) -> None:
        """Write overrides, environment, and a summary that says when the run started and from what."""
        config, found = self.config, self.found
        self.summary["started"] = datetime.now(UTC).isoformat(timespec="microseconds")
        self.summary["resumed_from"] = str(found.path) if found else None
        self.summary |= {name: value for name in ("tags", "notes") if (value := getattr(config, name))}
        # A resumed run loads nothing from `init_from`: the earlier summary knows where its weights once came from
        before = read_summary(found.path.parents[1]) if found and found.path.parent.name == "checkpoints" else None
        self.summary |= {"init_from": before["init_from"]} if before and "init_from" in before else {}
        # The config of a resumed run is the stored one, which the defaults of this command do not describe.
        kept = at(before, "choices") if found else self.composition.group_choices
        self.summary["choices"] = (kept if isinstance(kept, dict) else {}) | self.composition.given_choices
        self.summary |= {"not_last": reason} if (reason := self._not_last(self.path)) else {}
        # Overrides come first: a summary without them belongs to an unknown command.
        self._write_overrides()
        self.write_summary(self.summary)
        write_json(self.path / "environment.json", environment())

    def _write_overrides(self) -> None:
        """Store the overrides of the command line as a YAML list, secrets masked."""
        text = yaml.safe_dump(mask_words(self.composition.overrides), allow_unicode=True, width=1_000_000)
        write_atomically(self.path / "overrides.yaml", text.encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Store status and final metrics, and how much of a budget was used."""
        if budget := getattr(getattr(self, "config", None), "budget", None):
            used = (time.time() - self.began) / seconds(budget)
            summary = summary | {"budget": budget, "budget_used": round(used, 4)}
        write_json(self.path / "summary.json", summary)

    def note_startup(self) -> None:
        """Note how long it took from the start of the run to its first step, in seconds."""
        self.summary["startup_s"] = round(time.perf_counter() - self._began, 3)
        self._training_since = time.perf_counter(), waited_for_core()

    def note_waiting(self) -> None:
        """Note the share of the time of training in which other programs had the core that this one was ready to use."""
        if self._training_since is not None and (share := core_wait(self._training_since)) is not None:
            self.summary["cpu_wait"] = share

    def update(self, state: TrainState, monitor: str) -> dict[str, Any]:
        """Bring the summary up to date, and return it."""
        self.summary |= {
            "best": dataclasses.asdict(state.best) if state.best else None,
            "last": {name.removeprefix("val/"): value for name, value in state.last_metrics.items()},
            "monitor": monitor or None,
            "global_step": state.position.global_step,
        }
        return self.summary

    def note_trained(self, loop: Loop) -> None:
        """Note how training ended, and the digest of the weights."""
        if loop.stop_reason:
            self.console.line(f"stopped early: {loop.stop_reason}")
        if loop.pruned:
            self.summary["pruned"] = loop.stop_reason
        self.update(loop.state, loop.monitor[0])
        self.summary["weights_sha256"] = weights_sha256(loop.state.model.state_dict())

    def draw_curves(self, wanted: bool) -> None:
        """Draw the metrics over the steps into `plots/curves.png`, or remove those of an earlier part of the run."""
        picture = self.plots / "curves.png"
        try:
            if wanted:
                learning_curves(self.metrics_file, picture)
            else:
                picture.unlink(missing_ok=True)
        except Exception as error:  # a picture must not cost a finished run
            self.console.warn(f"no learning curves were drawn: {error}")

    def fail(self, error: BaseException) -> None:
        """Record why the run ended early, and report it."""
        self.error = error
        # Status and sentence come first, as the rest depends on what kind of end this is
        self.exit_code, sentence, text = explain(error)
        preempted = self.exit_code == PREEMPTED
        self.summary |= {"status": "preempted" if preempted else "failed", "error": mask_text(sentence)}
        saved = self.is_open and resumable(self.checkpoints.parent)
        way = f"ckpt_path={self.path}" if saved else ""
        # A preempted run did nothing wrong, so it gets a warning and the way to resume, not an error
        if preempted:
            repeat = "nothing was saved yet: repeat the same command"
            self.console.warn(f"{text}; {f'resume with {way}' if way else repeat}")
            return
        self.complain(text + (f"\n    to resume: {way}" if way and isinstance(error, DataFailed) else ""))
        is_mistake = isinstance(error, UserError | BadMetric)
        # The screen shows a short error; run.log gets the whole traceback for those who need it
        if self.is_open and self.exit_code == FAILED and not is_mistake and "Traceback" not in text:
            Console(self.log_file, stream=io.StringIO()).line("".join(traceback.format_exception(error)).rstrip())
        # A mistake before the first step leaves nothing worth keeping, see `close`
        self._mistaken = (self.exit_code == USAGE or isinstance(error, DiskFull)) and "global_step" not in self.summary
        unexpected = error.__cause__ is not None if is_mistake else not isinstance(error, SystemExit)
        # The debugger is for unexpected errors: the message of a mistake already says where it is
        if self.composition.values.get("post_mortem") is True and unexpected:
            self._to_debug = error
        if is_mistake and os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exception(error)

    def record(self) -> dict[str, Any]:
        """What `summary.json` says, and the directory, which is None where the run left none."""
        path = self.path if self.is_open else self.finished
        summary = read_summary(path) if path else None
        return (summary or self.summary) | {"directory": str(path) if path else None}

    def complain(self, text: str) -> None:
        """Report an error on standard error, and in the log if there is one."""
        log = self.log_file if self.is_open else None
        Console(log, progress=False, stream=sys.stderr).error(text)

    def close(self) -> None:
        """Write the summary, and let other processes use the directory."""
        self.console.stop()
        if not self.is_open:
            return
        self.summary["wall_s"] = round(time.perf_counter() - self._began, 3)
        # A full disk must not hide the first error: the exit code stays, and the failure to write is reported
        try:
            self.write_summary(self.summary)
        except UserError as error:
            self.exit_code = self.exit_code or FAILED
            self.complain(str(error))
        # Before the lock is gone: another process may resume as soon as it is
        self.ending.close()
        if self._is_new and self._mistaken and not (self.path / "config.yaml").exists():
            # The config is written once everything is built: nothing was trained, and the message has been shown.
            shutil.rmtree(self.path, ignore_errors=True)
            for folder in self._new_folders:
                with contextlib.suppress(OSError):  # others may have begun to use it
                    folder.rmdir()
            self.is_open = False

    def finish(self) -> None:
        """Open the debugger if that was asked for, print the directory, and end the process unless the run succeeded."""
        if self._to_debug is not None:
            post_mortem(self._to_debug)
        if self.is_open:
            print(self.path, flush=True)
        if self.exit_code != OK:
            raise SystemExit(self.exit_code)


class Job(NamedTuple):
    """What every rank of a run gets, pickled: nothing is composed or looked for again."""

    composition: Composition
    config: Train
    differences: list[tuple[str, str, str]]
    warnings: list[str]
    path: Path  # of the directory
    checkpoint: Path | None  # to resume from, which each rank reads itself
    began: float  # see `RunDirectory`


def post_mortem(error: BaseException) -> None:
    """Open the debugger in the frame that raised an exception, or what caused it; returns when it is left.

    Only the main process of a run has a terminal to talk to: in any other, and in all ranks but the first, nothing happens.
    """
    if multiprocessing.parent_process() is not None or os.environ.get("RANK", "0") != "0":
        return
    while error.__cause__ is not None:  # errors of user code are wrapped in ours
        error = error.__cause__
    print(f"post_mortem: {type(error).__name__}: {error} (q to quit, h for help)", file=sys.stdout, flush=True)
    tracer = sys.gettrace()  # of a debugger or a measurement of coverage, which goes on afterwards
    try:
        pdb.post_mortem(error.__traceback__)
    finally:
        sys.settrace(tracer)
    print(flush=True)  # lines that are not typed leave the prompt without an end
