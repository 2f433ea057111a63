"""Saves a run, at once or in the background, restores it, and compares its data with those of the checkpoint."""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from torch import Tensor

from runner.base.errors import UserError, is_own, with_place
from runner.checkpoint import resume
from runner.checkpoint.async_writer import AsyncWriter, Snapshot
from runner.checkpoint.find import LoadedCheckpoint
from runner.checkpoint.manager import CheckpointManager, require_space, scarce, size_of
from runner.checkpoint.weights import loss_of
from runner.config import stored
from runner.config.keys import to_plain
from runner.config.schema.train import Train
from runner.config.targets import build, targets_in
from runner.data.dataset_fingerprint import class_changes, data_changes
from runner.data.module import DataModule
from runner.distributed.world import world
from runner.engine.callbacks import Checkpointing
from runner.engine.errors import Diverged, Interrupted, Preempted
from runner.engine.loop import Loop
from runner.engine.state import TrainState, not_finite
from runner.instrument.no_trace import evaluating
from runner.run.evaluation import Predictions
from runner.run.interfaces import calls_of, require_methods
from runner.run.run import Run
from runner.run.run_directory import RunDirectory
from runner.tracking.environment import versions
from runner.tracking.loggers import JsonLines, Logger, MetricsBuffer, Watched
from runner.tracking.run_files import copy_until


class Saving:
    """Writes checkpoints of a run, and with each one the metrics and the summary up to it.

    Callbacks of the user are saved if they have a state; `buffer` has metrics on their way to `loggers`; for `clock` see
    `runner.engine.callbacks.Checkpointing`. When the run ends, `__exit__` waits for the background, and keeps the best state if
    a failure came before it was written.
    """

    def __init__(
        self,
        run: Run,
        directory: RunDirectory,
        *,
        callbacks: dict[str, Any],
        loggers: Sequence[Logger],
        buffer: MetricsBuffer,
        clock: Callable[[], float],
    ) -> None:
        settings = run.config.checkpoint
        self.manager = CheckpointManager(directory.checkpoints, settings.keep, world().first)
        self.callback = Checkpointing(  # decides when to save
            every_steps=settings.every_steps,
            every_epochs=settings.every_epochs,
            save=self._save,
            copy=lambda loop: resume.copied(self._contents(loop)),
            min_seconds=settings.min_seconds,
            check=self._check,
            clock=clock,
        )
        self._run, self._directory, self._callbacks = run, directory, callbacks
        self._loggers, self._buffer = loggers, buffer
        # Facts that do not change during a run; with them, a checkpoint can be used without its run directory
        self.config_text = stored.dump(run.config)
        self._texts = {"config": self.config_text, "classes": list(run.data.classes), "versions": versions()}
        self._known: dict[str, Any] = {
            "data": run.data.fingerprint(),
            **({"images": list(run.data.image_shape)} if run.data.pairs else {}),
            "sources": source_digests(run.config),
        }
        self._background, self._snapshot = AsyncWriter(), Snapshot()
        self._never_finite, self._hook = set[str](), ExitStack()  # removes the hook of `_copy_behind`

    def begin(self, loop: Loop) -> None:
        """Check before the first step that checkpoints fit on the disk."""
        state, folder = loop.state, self._directory.checkpoints
        # Buffers that a model keeps non-finite on purpose, such as masks of -inf, do not mean divergence
        trained = {name for name, _ in state.named_parameters()}
        of_loss = {f"loss.{name}": tensor for name, tensor in state.loss.state_dict().items()}
        self._never_finite = {
            name
            for name, tensor in (state.model.state_dict() | of_loss).items()
            if name not in trained and tensor.is_floating_point() and not bool(tensor.isfinite().all())
        }
        # A disk that is full is found out now, not after hours of training
        weights = size_of(state.model.state_dict())
        require_space(folder, weights)
        # A checkpoint has the weights, two moments of each as Adam keeps them, and the average if there is one
        if warning := scarce(folder, weights * (3 + (state.averaged is not None)), self.manager.keep):
            self._directory.console.warn(warning)

    def end(self, loop: Loop) -> None:
        """Wait until everything is written, and write a checkpoint if there is none yet."""
        self._background.wait()
        if not world().decide(self.manager.last.is_file):
            self._save(loop, False)
            self._background.wait()
        world().gather(None)  # so that all see the same best checkpoint

    def resume(self, found: LoadedCheckpoint) -> list[str]:
        """Put the run back to a checkpoint, with its best checkpoint and the metrics up to it; returns warnings.

        Raises `UserError` if it was trained on other data, or is of another model or optimizer.
        """
        data, ignore = self._run.data, self._run.config.data.identity == "ignore"
        # Other data would make the position in the epoch and the metrics meaningless, so they are compared first
        warnings = compare_data(found.contents, data, self._known["data"], self._known["sources"], ignore)
        state, monitor, directory = self._run.state, self._run.monitor, self._directory
        saved = loss_of(found.contents, "raw", self._run.config, state.loss)
        resume.restore(found._replace(contents=found.contents | {"loss": saved}), state, self._callbacks)
        path, best, step = found.path.resolve(), state.best, state.position.global_step
        # The best value so far is comparable only if the metric is still the same one
        if best is not None and (best.metric, best.mode) != monitor:
            now = f"it is determined by {monitor.metric} ({monitor.mode})" if monitor.metric else "there is none"
            warnings.append(f"the best evaluation was by {best.metric} ({best.mode}); from now on {now}")
            state.best = None
        # The file of the best weights belongs to the state: without it, the value would have no weights
        elif best is not None and not world().decide(lambda: self.manager.carry_best(path, best.global_step)):
            warnings.append("the checkpoint of the best evaluation is missing: the best one is determined again")
            state.best = None
        if directory.continued:
            self.manager.name(path, self.manager.last)  # later ones belong to a future that is computed again
        elif path.parent.name == directory.checkpoints.name:  # one that was moved has no metrics beside it
            copy_until(path.parents[1] / directory.metrics_file.name, directory.metrics_file, step)
        if state.best is None and self.manager.writes:
            self.manager.best.unlink(missing_ok=True)  # of an evaluation that does not count any more
        # Lines logged after the checkpoint are logged again, so they are removed: each appears once. So are those of splits
        # that are evaluated at this very step, where an earlier attempt may have done so already.
        repeated = ("test", "val") if state.position.evaluation_due else ("test",)
        copy_until(directory.metrics_file, directory.metrics_file, step, repeated)
        return warnings

    def _save(self, loop: Loop, is_best: bool, earlier_best: dict[str, Any] | None = None) -> None:
        """Write the state, and before it the best one if that was put off."""
        contents, background = self._contents(loop), self._run.config.checkpoint.async_
        # The log goes first: a resume removes lines after the checkpoint, but cannot add missing ones before it
        self._buffer.empty()
        for logger in self._loggers:
            logger.flush()
        summary = copy.deepcopy(self._directory.update(loop.state, self._run.monitor.metric))
        # Only rank 0 writes, but all ranks took part in collecting the state
        if not self.manager.writes:
            return
        if background:
            self._background.wait()  # its buffers are used again
            # The thread writes a copy, as training changes the tensors meanwhile
            contents = self._copy_behind(contents, loop.state)

        def write() -> None:
            if background:
                self._snapshot.finish()
            if earlier_best is not None:
                self._write_best(earlier_best)
            step = contents["position"]["global_step"]
            if name := self._not_finite(contents):
                raise Diverged(f"{name} is not finite after step {step}; it was not saved")
            self.manager.save(contents, step, is_best)
            self._directory.write_summary(summary)

        if background:
            self._background.start(write)
        else:
            write()

    def _copy_behind(self, contents: dict[str, Any], state: TrainState) -> dict[str, Any]:
        """A copy of which an optimizer's moments are copied by the thread: nothing changes them before the next update.

        Weights are copied at once, as some models change theirs in forward. The update waits for the thread, by a hook that
        is there for this one step.
        """
        self._hook.close()
        if "step" in vars(state.optimizer):  # replaced by a compiled one, which calls no hooks
            return self._snapshot.take(contents)
        copied = self._snapshot.take(contents, lambda place: place.startswith("/optimizer/state/"))

        # The update is the only thing that changes moments, so it is what has to wait for the copy
        def wait(*_: Any) -> None:
            self._snapshot.complete.wait()

        self._hook.callback(state.optimizer.register_step_pre_hook(wait).remove)
        return copied

    def _check(self) -> None:
        """Raise what went wrong in the background, if anything did."""
        if self._snapshot.complete.is_set():
            self._hook.close()
        self._background.check()

    def _write_best(self, contents: dict[str, Any]) -> None:
        """Write a copy of the best state that was put off, unless a tensor of it is not finite."""
        if self.manager.writes and not self._not_finite(contents):
            self.manager.save(contents, contents["position"]["global_step"], is_best=True)

    def _contents(self, loop: Loop) -> dict[str, Any]:
        loop.check_nonfinite()
        return resume.contents(loop.state, self._callbacks, self._texts, self._known)

    def _not_finite(self, contents: dict[str, Any]) -> str:
        return not_finite({key: contents.get(key) for key in ("model", "loss", "optimizer")}, self._never_finite)

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failed: BaseException | None, trace: TracebackType | None
    ) -> None:
        # If training failed before a best state was written, keep it now: it is the result so far
        best = self.callback.leave()
        try:
            self._background.wait()
            if failed is not None and best is not None:
                self._write_best(best)
        except (UserError, Diverged) as error:
            if failed is None or isinstance(failed, Preempted | Interrupted):
                raise
            self._directory.console.warn(f"and then: {error}")  # the failure before is the one to report
        finally:
            self._background.close()


def build_loggers(run: Run, warn: Callable[[str], None]) -> list[Logger]:
    """The loggers of a run: `metrics.jsonl` first, as the others look there, and those of the config on the first rank."""
    samples = {split: image for split, (image, _) in run.data.examples.items()}
    facts = {"warn": warn, "watched": Watched(samples, functools.partial(_drawn, run))}
    chosen = run.config.logger if world().first else {}
    loggers = {name: build(f"logger.{name}", node, facts=facts) for name, node in chosen.items()}
    for name, logger in loggers.items():
        require_methods(f"logger.{name}", chosen[name]["_target_"], logger, calls_of(Logger))
        if not type(logger).__module__.startswith("runner."):
            loggers[name] = _sheltered(name, logger, warn)
    return [JsonLines(), *loggers.values()]


def _drawn(run: Run) -> list[Tensor]:
    """Pictures of predictions of the samples that are tried before training, uint8 (3, H, W); none if the task draws none."""
    # One rank cannot compute alone what is divided among several
    if world().size > 1 or not (hasattr(run.task, "predict_step") and hasattr(run.task, "draw")):
        return []
    with evaluating(run.model), run.precision.autocast():
        rows = Predictions(run.config, run.task, run.model, True, run.data.classes)(run.data.evaluated_batch())
    return [row["picture"] for row in rows]


def open_loggers(loggers: Sequence[Logger], directory: RunDirectory, step: int | None, ending: ExitStack) -> None:
    """Open loggers until `ending`, at the step that a run continues from."""
    for logger in loggers:
        ending.callback(logger.close)
        logger.open(directory.path, step)
        if hasattr(logger, "finish"):
            directory.ending.callback(logger.finish)


def _sheltered(name: str, logger: Logger, warn: Callable[[str], None]) -> Any:
    """The methods of a custom logger: one that raises causes a warning once, and the run continues."""
    reported = set[str]()

    def call(method: str, *arguments: Any) -> None:
        try:
            getattr(logger, method)(*arguments)
        except Exception as error:
            if method not in reported:
                reported.add(method)
                warn(f"logger.{name}: {method} raised {with_place(error)}; the run continues")

    methods = [each for each in (*calls_of(Logger), "finish") if hasattr(logger, each)]
    return SimpleNamespace(**{each: functools.partial(call, each) for each in methods})


def source_digests(config: Train) -> dict[str, str]:
    """SHA-256 of the source file of every imported module of the packages that custom components of the config come from.

    Installed packages are not read: their versions are recorded. The components must have been built.
    """
    # Code of the user changes between runs without a version number; installed packages have one
    packages = {target.partition(".")[0] for _, target in targets_in(to_plain(config))}
    packages -= {"runner", "torch", "torchvision", "torchmetrics"}
    digests = {}
    for name in sorted(name for name in sys.modules if name.partition(".")[0] in packages):
        path = Path(getattr(sys.modules[name], "__file__", None) or "")
        if path.suffix == ".py" and path.is_file() and is_own(str(path)):
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def compare_data(
    checkpoint: dict[str, Any], splits: DataModule, identity: dict[str, Any], sources: dict[str, str], ignore: bool
) -> list[str]:
    """Compare data, their fingerprint and `source_digests` with the contents of a checkpoint; returns warnings.

    Raises `UserError` if the data are others, unless `ignore` says to continue with them at the end of an epoch.
    """
    before, digests = checkpoint["metrics"]["data"], checkpoint["metrics"]["sources"]
    warnings = []
    # An edit of the source need not change any result, so it is a warning only
    if changed := [name for name in sources if digests.get(name, sources[name]) != sources[name]]:
        since = "has changed since the checkpoint was written: the resumed run may differ"
        warnings.append(f"the source of {', '.join(changed)} {since}")
    others = class_changes(checkpoint["classes"], list(splits.classes)) + data_changes(
        before, identity, splits.fingerprint
    )
    if not others:
        return warnings
    problem = f"these are not what the checkpoint was trained on: {'; '.join(others)}"
    then, now = before.get("train", {}), identity["train"]
    if checkpoint["position"]["batch"] > 0 and any(then.get(key) != now.get(key) for key in ("samples", "blocks")):
        # Inside an epoch, the position counts batches of an order that depends on the number of samples, and on shards
        raise UserError("data", problem, "the same data, or a checkpoint from the end of an epoch")
    if not ignore:
        raise UserError("data", problem, "the same data, or data.identity=ignore to use these")
    return [*warnings, f"data: {problem} (data.identity=ignore)"]
