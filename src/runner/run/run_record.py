"""What is kept of a run: its directory with overrides, environment, config, log, metrics and summary."""

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
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.base.errors import FAILED, OK, PREEMPTED, USAGE, DataFailed, DiskFull, UserError, explain, whole
from runner.base.files import make_folder, write_json
from runner.base.reading import number_or_none, read_summary
from runner.checkpoint.find import resumable
from runner.checkpoint.weights import weights_sha256
from runner.config.composition import Composition
from runner.config.keys import at
from runner.config.output_folders import holds_sweep, in_sweep
from runner.engine.errors import BadMetric
from runner.engine.loop import Loop
from runner.engine.state import TrainState
from runner.run.directory import RunDirectory, claim, timestamp
from runner.run.setup import Setup, is_inside
from runner.runtime.core_wait import core_wait, waited_for_core
from runner.tracking.console import Console
from runner.tracking.environment import environment
from runner.tracking.plots import learning_curves


class RunRecord:
    """The directory of a run, what is written into it, and how the run ended."""

    setup: Setup  # set by `open`

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self.console = Console(None)
        self.summary: dict[str, Any] = {"status": "running", "error": None}  # what `summary.json` contains
        self.exit_code = OK
        self._directory: RunDirectory | None = None
        self.error: BaseException | None = None  # what ended the run early
        self.left: Path | None = None  # directory of the run that had finished before
        self.endings: list[Callable[[], None]] = []  # called once the summary says how the run ended
        self._to_debug: BaseException | None = None
        self._is_new = False  # whether the directory had no content when the run opened it
        self._new_folders: list[Path] = []  # that hold the directory, and did not exist before
        self._mistaken = False  # whether a mistake of the user's ended the run
        self._began = time.perf_counter()
        self._training_since: tuple[float, float | None] | None = None

    @property
    def directory(self) -> RunDirectory:
        """The directory, once it is open."""
        assert self._directory is not None, "the run directory is opened first"
        return self._directory

    @property
    def continued(self) -> bool:
        """Whether the run continues in the directory of the checkpoint that it resumes from."""
        return is_inside(self.setup.found, self.directory.checkpoints.parent)

    @classmethod
    def of_rank(cls, composition: Composition, setup: Setup, path: Path, rank: int, scratch: Path) -> RunRecord:
        """The record on a rank of a run whose launcher has opened the directory.

        Rank 0 writes into it. Any other writes what nobody needs into `scratch`, and its messages into its own log.
        """
        record = cls(composition)
        record.setup = setup
        directory = RunDirectory(path if rank == 0 else scratch)
        # All ranks read the same checkpoints
        directory.checkpoints = path / "checkpoints"
        log = directory.log_file if rank == 0 else path / "logs" / f"rank_{rank}.log"
        make_folder(log.parent)
        progress = setup.config.log.progress
        # One progress display is enough: the other ranks write to their own log
        nowhere = None if rank == 0 else io.StringIO()
        record.console = Console(log, None if progress == "auto" else progress, nowhere)
        record._directory = directory
        return record

    def reserve(self) -> None:
        """Open the directory of a job of a sweep, before anything can go wrong in the job."""
        if self.composition.job_dir is None:
            return
        directory = RunDirectory(self.composition.job_dir)
        directory.lock()
        self._directory = directory
        # Where overrides are there already, they are the same, see `why_occupied`
        if not directory.overrides_file.exists():
            directory.write_overrides(self.composition.overrides)

    def open(self, setup: Setup) -> None:
        """Open the run's directory: a new one, the one of the run to continue, or the one that `hydra.run.dir` names."""
        self.setup = setup
        directory = self._directory or setup.again or self._new_directory(setup)
        # A directory is removed after a user's mistake only if nothing was in it before
        others = (path for path in directory.path.rglob("*") if path.name != ".lock" and not path.is_dir())
        self._is_new = self._directory is None and next(others, None) is None
        # Locked before anything is written: two processes must not write into one directory
        directory.lock()
        self._directory = directory
        if setup.again is not None and not self.continued:
            # Before the console opens run.log, or it would report a deletion by others
            directory.forget()
        progress = setup.config.log.progress
        self.console = Console(directory.log_file, None if progress == "auto" else progress)

    def _new_directory(self, setup: Setup) -> RunDirectory:
        path = self.composition.run_dir
        if path is None:
            root = Path(setup.config.output_root)
            self._new_folders = [folder for folder in (root / setup.config.name, root) if not folder.exists()]
            reason = self._not_last(root)
            kind = "_debug" if reason.startswith("debug=") else "_limited" * bool(reason)
            return RunDirectory(claim(root / setup.config.name, timestamp(), kind))
        # A run in a sweep's folder would mix with the jobs of its ledger
        if holds_sweep(path):
            raise UserError("hydra.run.dir", f"{path} holds a sweep", "another folder")
        # The results of an earlier run must not be overwritten, except by the run that resumes it
        if (path / "summary.json").exists() and not is_inside(setup.found, path):
            other = f"ckpt_path={path} to continue it" if resumable(path) else "resume=auto to start it again"
            raise UserError("hydra.run.dir", f"{path} already holds a run", f"another folder, or {other} there")
        self._new_folders = [folder for folder in path.parents if not folder.exists()]
        make_folder(path)
        return RunDirectory(path)

    def leave(self, finished: RunDirectory) -> float | None:
        """Report a run that `resume=auto` found finished, leave it as it is, and return its best monitored value."""
        print(f"{finished.path} has finished already", flush=True)
        self.left = finished.path
        if self._directory is not None:
            self._directory.unlock()
            self._directory = None
        return number_or_none(at(read_summary(finished.path), "best.value"))

    def _not_last(self, folder: Path) -> str:
        """Why `ckpt_path=last` does not mean this run: it is for debugging, or a trial of a search; empty if it does."""
        limits = [f"limit.{key}={value}" for key, value in vars(self.setup.config.limit).items() if value is not None]
        debug = [f"debug={name}"] if (name := self.composition.given_choices.get("debug")) else []
        trial = at(self.composition.values, "search.sampler") is not None and in_sweep(folder)
        return ", ".join([*debug, *limits, *(["values of a search"] if trial else [])])

    def begin(self) -> None:
        """Write overrides, environment, and a summary that says when the run started and from what."""
        config, found = self.setup.config, self.setup.found
        self.summary["started"] = datetime.now(UTC).isoformat(timespec="microseconds")
        self.summary["resumed_from"] = str(found.path) if found else None
        self.summary |= {name: value for name in ("tags", "notes") if (value := getattr(config, name))}
        # A resumed run loads nothing from `init_from`: the earlier summary knows where its weights once came from
        before = read_summary(found.path.parents[1]) if found and found.path.parent.name == "checkpoints" else None
        self.summary |= {"init_from": before["init_from"]} if before and "init_from" in before else {}
        # The config of a resumed run is the stored one, which the defaults of this command do not describe.
        kept = at(before, "choices") if found else self.composition.group_choices
        self.summary["choices"] = (kept if isinstance(kept, dict) else {}) | self.composition.given_choices
        self.summary |= {"not_last": reason} if (reason := self._not_last(self.directory.path)) else {}
        # Overrides come first: a summary without them belongs to an unknown command.
        self.directory.write_overrides(self.composition.overrides)
        self.directory.write_summary(self.summary)
        write_json(self.directory.environment_file, environment())

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
        picture = self.directory.plots / "curves.png"
        try:
            if wanted:
                learning_curves(self.directory.metrics_file, picture)
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
        self.summary |= {"status": "preempted" if preempted else "failed", "error": sentence}
        saved = self._directory is not None and resumable(self._directory.checkpoints.parent)
        way = f"ckpt_path={self.directory.path}" if saved else ""
        # A preempted run did nothing wrong, so it gets a warning and the way to resume, not an error
        if preempted:
            repeat = "nothing was saved yet: repeat the same command"
            self.console.warn(f"{text}; {f'resume with {way}' if way else repeat}")
            return
        self.complain(text + (f"\n    to resume: {way}" if way and isinstance(error, DataFailed) else ""))
        is_mistake = isinstance(error, UserError | BadMetric)
        # The screen shows a short error; run.log gets the whole traceback for those who need it
        if self._directory is not None and self.exit_code == FAILED and not is_mistake and "Traceback" not in text:
            Console(self._directory.log_file, stream=io.StringIO()).line(whole(error))  # the screen has its own frames
        # A mistake before the first step leaves nothing worth keeping, see `close`
        self._mistaken = (self.exit_code == USAGE or isinstance(error, DiskFull)) and "global_step" not in self.summary
        unexpected = error.__cause__ is not None if is_mistake else not isinstance(error, SystemExit)
        # The debugger is for unexpected errors: the message of a mistake already says where it is
        if self.composition.values.get("post_mortem") is True and unexpected:
            self._to_debug = error
        if is_mistake and os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exception(error)

    def complain(self, text: str) -> None:
        """Report an error on standard error, and in the log if there is one."""
        log = self._directory.log_file if self._directory else None
        Console(log, progress=False, stream=sys.stderr).error(text)

    def close(self) -> None:
        """Write the summary, and let other processes use the directory."""
        self.console.stop()
        if self._directory is None:
            return
        self.summary["wall_s"] = round(time.perf_counter() - self._began, 3)
        # A full disk must not hide the first error: the exit code stays, and the failure to write is reported
        try:
            self._directory.write_summary(self.summary)
        except UserError as error:
            self.exit_code = self.exit_code or FAILED
            self.complain(str(error))
        # Before the lock is gone: another process may resume as soon as it is
        for ending in self.endings:
            ending()
        self.console.close()
        self._directory.unlock()
        if self._is_new and self._mistaken and not (self._directory.path / "config.yaml").exists():
            # The config is written once everything is built: nothing was trained, and the message has been shown.
            shutil.rmtree(self._directory.path, ignore_errors=True)
            for folder in self._new_folders:
                with contextlib.suppress(OSError):  # others may have begun to use it
                    folder.rmdir()
            self._directory = None

    def finish(self) -> None:
        """Open the debugger if that was asked for, print the directory, and end the process unless the run succeeded."""
        if self._to_debug is not None:
            post_mortem(self._to_debug)
        if self._directory is not None:
            print(self._directory.path, flush=True)
        if self.exit_code != OK:
            raise SystemExit(self.exit_code)


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
