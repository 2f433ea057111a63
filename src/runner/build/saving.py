"""Saving a run, at once or in the background, and going back to what was saved."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.checkpoint import file, resume
from runner.checkpoint.async_writer import AsyncWriter, Snapshot
from runner.checkpoint.find import LoadedCheckpoint
from runner.checkpoint.manager import CheckpointManager
from runner.checkpoint.disk_space import require_space, scarce, size_of
from runner.config.errors import UserError
from runner.config.targets import build
from runner.engine.callbacks import Checkpointing
from runner.engine.errors import Diverged, Interrupted, Preempted
from runner.engine.loop import Loop
from runner.engine.state import TrainState, not_finite
from runner.tracking.console import Console
from runner.tracking.environment import versions
from runner.tracking.loggers import JsonLines, Logger
from runner.tracking.metrics_buffer import MetricsBuffer
from runner.tracking.run_directory import RunDirectory

_MOMENTS = 2  # tensors of a weight's size that an optimizer keeps, as Adam does


class Saving:
    """Writes checkpoints of a run, and with each one the metrics and the summary up to it.

    Args:
        directory: of the run.
        keep: newest checkpoints to keep.
        callbacks: of the user, by name; those with a state are saved.
        config: the resolved config as YAML text.
        classes: names of the classes.
        identity: which data these are, see `runner.data.dataset_fingerprint`.
        images: channels, height and width of an image.
        sources: digests of the user's own source files, see `runner.build.sources`.
        loggers: where metrics are stored.
        show: metrics that are on their way there.
        summary: what `summary.json` says; brought up to date here.
        monitor: the metric that says which evaluation is best.
        in_background: whether a thread writes while training goes on.
    """

    def __init__(
        self,
        directory: RunDirectory,
        keep: int,
        callbacks: dict[str, Any],
        config: str,
        classes: list[str],
        identity: dict[str, Any],
        images: Sequence[int],
        sources: dict[str, str],
        loggers: Sequence[Logger],
        show: MetricsBuffer,
        summary: dict[str, Any],
        monitor: str,
        in_background: bool,
    ) -> None:
        self.manager = CheckpointManager(directory.checkpoints, keep)
        self._directory, self._callbacks = directory, callbacks
        self._config, self._classes, self._versions = config, classes, versions()
        self._identity, self._images, self._sources = identity, list(images), sources
        self._loggers, self._show = loggers, show
        self._summary, self._monitor = summary, monitor
        self._background = AsyncWriter() if in_background else None
        self._snapshot = Snapshot()
        self._by_design: set[str] = set()
        self._hook: Any = None

    def room_for(self, state: TrainState) -> str:
        """See that checkpoints fit on the disk, before the first step, and what of the state is not finite by design.

        Returns:
            A warning, or an empty string.

        Raises:
            UserError: if not even one does.
        """
        trained = {name for name, _ in state.model.named_parameters()}
        self._by_design = {
            name
            for name, tensor in state.model.state_dict().items()
            if name not in trained and tensor.is_floating_point() and not bool(tensor.isfinite().all())
        }
        weights = size_of(state.model.state_dict())
        require_space(self._directory.checkpoints, weights)
        tensors = 1 + _MOMENTS + (state.averaged is not None)
        return scarce(self._directory.checkpoints, weights * tensors, self.manager.keep)

    def save(self, loop: Loop, is_best: bool, earlier_best: dict[str, Any] | None = None) -> None:
        """Write the state, and before it the best one if that was put off.

        Raises:
            Diverged: if a tensor of it is not finite; nothing is written.
            UserError: if it cannot be written.
        """
        contents = self._contents(loop)
        self._show.empty()
        for logger in self._loggers:
            logger.flush()
        if self._background is None:
            self._write(contents, is_best, earlier_best, self._record(loop.state))
            return
        self._background.wait()  # its buffers are used again
        contents = self._copy_behind(contents, loop.state)
        summary = copy.deepcopy(self._record(loop.state))

        def work() -> None:
            self._snapshot.finish()
            self._write(contents, is_best, earlier_best, summary)

        self._background.start(work)

    def _copy_behind(self, contents: dict[str, Any], state: TrainState) -> dict[str, Any]:
        """A copy of which an optimizer's moments are copied by the thread: nothing changes them before the next update.

        Weights are copied at once, as some models change theirs in forward. The update waits for the thread, by a hook that
        is there for this one step.
        """
        self._free_step()
        if "step" in vars(state.optimizer):  # replaced by a compiled one, which calls no hooks
            return self._snapshot.take(contents)
        copied = self._snapshot.take(contents, lambda place: place.startswith("/optimizer/state/"))

        def wait(*_: Any) -> None:
            self._snapshot.complete.wait()

        self._hook = state.optimizer.register_step_pre_hook(wait)
        return copied

    def _free_step(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        if self._background is not None:
            if self._hook is not None and self._snapshot.complete.is_set():
                self._free_step()
            self._background.check()

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            Diverged: if a tensor was not finite.
            UserError: if it could not be written.
        """
        if self._background is not None:
            self._background.wait()

    def copy(self, loop: Loop) -> dict[str, Any]:
        """A copy of the state, to be written later.

        Raises:
            Diverged: if a tensor of it is not finite.
        """
        copied: dict[str, Any] = resume.copied(self._contents(loop))
        return copied

    def keep_best(self, contents: dict[str, Any]) -> None:
        """Write a copy of the best state that was put off, unless a tensor of it is not finite."""
        if not not_finite(contents, self._by_design):
            self.manager.save(contents, contents["position"]["global_step"], is_best=True)

    def roll_back(self, loop: Loop) -> None:
        """Put the run back to its last checkpoint, and take back what was logged since."""
        self.wait()
        self._show.empty()
        found = LoadedCheckpoint(self.manager.last, file.read(self.manager.last), [])
        resume.restore(found, loop.state, self._callbacks)
        self._directory.truncate_metrics(loop.state.position.global_step, repeated(loop.state))
        for logger in self._loggers:
            logger.close()
            logger.open(self._directory.path, loop.state.position.global_step)

    def _contents(self, loop: Loop) -> dict[str, Any]:
        loop.check_nonfinite()
        known = (self._config, self._classes, self._versions, self._identity, self._images, self._sources)
        return resume.contents(loop.state, self._callbacks, *known)

    def _write(
        self,
        contents: dict[str, Any],
        is_best: bool,
        earlier_best: dict[str, Any] | None,
        summary: dict[str, Any],
    ) -> None:
        step = contents["position"]["global_step"]
        if earlier_best is not None:
            self.keep_best(earlier_best)
        if name := not_finite(contents, self._by_design):
            raise Diverged(f"{name} is not finite after step {step}; it was not saved")
        self.manager.save(contents, step, is_best)
        self._directory.write_summary(summary)

    def _record(self, state: TrainState) -> dict[str, Any]:
        record(self._summary, state, self._monitor)
        return self._summary


def build_loggers(chosen: Mapping[str, Any], warn: Callable[[str], None]) -> list[Logger]:
    """The loggers of a run: `metrics.jsonl` first, as the others look there, and those of the config."""
    return [JsonLines(warn), *(build(f"logger.{name}", node, facts={"warn": warn}) for name, node in chosen.items())]


def repeated(state: TrainState) -> tuple[str, ...]:
    """Splits that a run evaluates at the step that it resumes from, where an earlier attempt may have done so already."""
    return ("test", "val") if state.position.evaluation_due else ("test",)


def record(summary: dict[str, Any], state: TrainState, monitor: str) -> None:
    """Bring the summary up to date."""
    best = state.best
    summary["best"] = dataclasses.asdict(best) if best else None
    summary["last"] = {name.removeprefix("val/"): value for name, value in state.last_metrics.items()}
    summary["monitor"] = monitor
    summary["global_step"] = state.position.global_step


def finish_saving(saving: Saving, checkpointing: Checkpointing, failed: BaseException | None, console: Console) -> None:
    """Wait for what the background writes, and keep the best state if a failure came before it was written.

    Raises:
        UserError: if it cannot be written, unless something else failed first, which is what is to be told.
    """
    best = checkpointing.leave()
    try:
        saving.wait()
        if failed is not None and best is not None:
            saving.keep_best(best)
    except (UserError, Diverged) as error:
        if failed is None or isinstance(failed, Preempted | Interrupted):
            raise
        console.warn(f"and then: {error}")
