"""One training run, from the config to the summary, in the order in which things happen."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from runner.build.auto_lr import settle_rate
from runner.build.batch_size import memory_for_evaluation, memory_for_training
from runner.build.data_check import compare_data, name_not_finite, way_on
from runner.build.debug_hooks import watch_modules
from runner.build.describe import describe
from runner.build.init_from import begun
from runner.build.metrics import build_callbacks, fresh_metrics
from runner.build.optimizer import table_of_groups
from runner.build.run import build_training, look_ahead, training_flops
from runner.build.saving import Saving, build_loggers, finish_saving, record, repeated
from runner.build.setup import Setup, is_inside, open_directory, open_job, read_best, settle, why_occupied
from runner.build.sources import own_sources
from runner.build.weight_average import evaluate_both, load_best
from runner.checkpoint import file as checkpoint_file
from runner.checkpoint import find, resume
from runner.checkpoint.digest import weights_sha256
from runner.checkpoint.weights import part_with
from runner.config import stored
from runner.config.app import Composition, current
from runner.config.changes import changes_result
from runner.config.durations import seconds
from runner.config.errors import DataFailed, UserError, called_exit, too_many_files
from runner.config.resolve import writes_where_told
from runner.engine.callbacks import Checkpointing, Log, Progress
from runner.engine.errors import BadMetric, Diverged, Interrupted, Preempted
from runner.engine.evaluation import evaluate
from runner.engine.freezing import UnfreezeCallback
from runner.engine.loop import Loop
from runner.engine.oom_retry import ReportMicroBatches
from runner.engine.state import Position
from runner.runtime.compilation import CompileReport, forget_compiled
from runner.runtime.debugger import post_mortem
from runner.runtime.determinism import operations_named
from runner.runtime.hardware_metrics import choose_hardware_metrics
from runner.runtime.memory import reset_peak_memory
from runner.runtime.peak_flops import kind_of
from runner.runtime.signals import StopSignals
from runner.tracking.console import Console
from runner.tracking.environment import environment
from runner.tracking.metrics_buffer import MetricsBuffer
from runner.tracking.plots import learning_curves
from runner.tracking.run_directory import RunDirectory
from runner.tracking.skipped_steps import SkippedSteps

OK, FAILED, USAGE, DIVERGED, PREEMPTED = 0, 1, 2, 3, 75


def run(cfg: DictConfig) -> float | None:
    """Run one job: the entry point that Hydra calls.

    Returns:
        The best value of the monitored metric, for sweepers; None if there is none.

    Raises:
        SystemExit: with the exit status, unless the job finished or is one of a sweep.
    """
    began = time.perf_counter()
    composition = current(cfg)
    directory: RunDirectory | None = None
    summary: dict[str, Any] = {"status": "running", "error": None}
    status, value = OK, None
    console = Console(None)
    signals = StopSignals()
    debugged = composition.values.get("post_mortem") is True
    raised: BaseException | None = None  # what the debugger is to be opened at
    if reason := why_occupied(composition):
        complain(None, reason)
        raise SystemExit(USAGE)
    try:
        with signals, operations_named(lambda text: console.warn(text)), contextlib.ExitStack() as built:
            directory = open_job(composition)
            setup = settle(composition)
            if setup.config.max_time is not None:
                signals.limit(seconds(setup.config.max_time), f"max_time={setup.config.max_time}")
            if setup.finished is not None:
                print(f"{setup.finished.path} has finished already", flush=True)
                if directory is not None:
                    directory.unlock()
                    directory = None  # and is left as it is
                return read_best(setup.finished)
            opened = directory or open_directory(setup, composition)
            opened.lock()
            directory = opened
            if setup.again is not None and not is_inside(setup.found, directory.path):
                directory.forget()  # before the console opens run.log, or it would take that for a deletion by others
            progress = setup.config.log.progress
            console = Console(directory.log_file, None if progress == "auto" else progress)
            value = train(setup, composition, directory, console, summary, signals, built)
        summary["status"] = "finished"
    except (UserError, BadMetric) as error:
        status = FAILED if isinstance(error, DataFailed) else USAGE
        summary |= {"status": "failed", "error": str(error)}
        complain(directory, f"{error}{way_on(directory, error)}")
        raised = error if debugged and error.__cause__ is not None else None
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
    except Preempted as error:
        status = PREEMPTED
        summary |= {"status": "preempted", "error": f"stopped by {error}"}
        console.warn(f"stopped by {error}; {after_stop(directory)}")
    except Diverged as error:
        status = DIVERGED
        summary |= {"status": "failed", "error": f"diverged: {error}"}
        advice = (
            "lower optimizer.lr, set grad_clip.norm=1.0 or on_nonfinite=skip, or find the operation with debug=anomaly"
        )
        complain(directory, f"diverged: {error}; {advice}")
        raised = error if debugged else None
    except SystemExit as stop:  # its status may be 0, and the run is not finished
        status = FAILED
        summary |= {"status": "failed", "error": called_exit(stop)}
        complain(directory, called_exit(stop))
    except Exception as error:
        status = FAILED
        summary |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        complain(directory, too_many_files(error) or traceback.format_exc().rstrip())
        raised = error if debugged else None
    finally:
        console.stop()
        if directory is not None:
            summary["wall_s"] = round(time.perf_counter() - began, 3)
            try:
                directory.write_summary(summary)
            except UserError as error:
                status = status or FAILED
                complain(directory, str(error))
            directory.unlock()
    if raised is not None:
        post_mortem(raised)
    if directory is not None:
        print(directory.path, flush=True)
    in_sweep = composition.job_dir is not None
    if in_sweep:
        # The loop freezes what exists, and what was frozen does not count towards Python's own full collections.
        gc.collect()
    if status == PREEMPTED or (status != OK and not in_sweep):
        raise SystemExit(status)
    return value


def after_stop(directory: RunDirectory | None) -> str:
    """How to go on with a run that was asked to stop."""
    if directory is None or find.named(directory.checkpoints, "last") is None:
        return "nothing was saved yet: give the same command again"
    return f"resume with ckpt_path={directory.path}"


def complain(directory: RunDirectory | None, text: str) -> None:
    """Say on standard error, and in the log if there is one, why the run failed."""
    Console(directory.log_file if directory else None, progress=False, stream=sys.stderr).error(text)


def train(
    setup: Setup,
    composition: Composition,
    directory: RunDirectory,
    console: Console,
    summary: dict[str, Any],
    signals: StopSignals,
    built: contextlib.ExitStack,
) -> float | None:
    """Assemble a run and carry it out.

    Args:
        setup: what to do.
        composition: where it came from.
        directory: where everything is written.
        console: where everything is shown.
        summary: filled in as things become known.
        signals: tells whether the run is asked to stop.
        built: what is to be closed if something raises before training starts, which closes it itself.

    Returns:
        The best value of the monitored metric, or None.
    """
    config, values = setup.config, setup.values
    continued = is_inside(setup.found, directory.path)
    resumed_step = setup.found.contents["position"]["global_step"] if setup.found else 0
    summary |= begun(config, setup.found)
    directory.write_overrides(composition.words)  # first, as a summary without them belongs to an unknown command
    directory.write_summary(summary)
    directory.write_environment(environment())

    # Device, data, model, optimizer
    start = resume.made_of(setup.found, "position", Position) if setup.found else None
    make_cache, data = writes_where_told(values, composition.values), None
    if config.compile:
        forget_compiled()
    if config.lr == "auto":
        data = settle_rate(config, values, make_cache, directory.path, console.line, signals.asked)
        built.callback(data.close)
    training = build_training(config, values, start, data, make_cache)
    splits, task, model, state = training.splits, training.task, training.model, training.state
    built.callback(splits.close)
    monitor, mode, warnings = training.monitor, training.mode, training.warnings
    warnings += look_ahead(config, training)
    identity, sources = splits.fingerprint(), own_sources(values)
    if setup.found:
        warnings += compare_data(setup.found.contents, splits, identity, sources, config.data.identity == "ignore")
    splits.bad_samples.open(directory.path / "skipped.jsonl", console.warn)

    # Callbacks: the list's order is the order they are called in; saving comes last, when all else is done.
    loggers = build_loggers(config.logger, console.warn)
    extra = build_callbacks(config, task, monitor, mode)
    kind = kind_of(training.precision.dtype, training.device)
    hardware_metrics = choose_hardware_metrics(
        config.log.utilization, training.device, kind, lambda: training_flops(training), training.warnings
    )

    text = stored.dump(values)  # complete from here on
    show = MetricsBuffer([console.metrics, *(logger.log for logger in loggers)])
    keep, in_background, classes = config.checkpoint.keep, config.checkpoint.async_, list(splits.classes)
    known = (text, classes, identity, splits.image_shape, sources)
    saving = Saving(directory, keep, extra, *known, loggers, show, summary, monitor, in_background)
    manager = saving.manager

    compilation = training.toggled.compilation
    compiling = [CompileReport(compilation, console.line, console.warn)] if compilation else []
    checkpointing = Checkpointing(
        config.checkpoint.every_steps,
        config.checkpoint.every_epochs,
        saving.save,
        saving.copy,
        config.checkpoint.min_seconds,
        saving.check,
    )
    callbacks = [
        *compiling,
        *([] if all(part.permanent for part in state.freezing.parts) else [UnfreezeCallback(console.line)]),
        Progress(console.advance),
        *extra.values(),
        SkippedSteps(directory.path, console),
        *([ReportMicroBatches(console.warn)] if config.on_oom == "split" else []),
        Log(config.log.every_steps, [show], hardware_metrics, console.warn),
        checkpointing,
    ]

    # Evaluation
    metrics = fresh_metrics(config, task, training.device)

    def evaluate_split(name: str, interrupted: Callable[[], bool]) -> dict[str, float]:
        split = splits.eval_split(name)
        assert split is not None, f"there is no split {name}"
        with memory_for_evaluation(config):
            found = evaluate(
                model,
                split.loader,
                task.targets,
                training.loss,
                metrics(),
                training.precision.autocast,
                config.limit.eval_batches,
                interrupted,
            )
        name_not_finite(found["loss"], splits, name, console.warn)
        return {f"{name}/{metric}": number for metric, number in found.items()}

    def stopped() -> bool:
        return bool(signals.asked())

    loop = Loop(
        state,
        splits.train.loader,
        training.plan,
        training.parts,
        training.limits,
        (lambda interrupted: evaluate_both(training, config, lambda: evaluate_split("val", interrupted), interrupted))
        if splits.val
        else None,
        callbacks,
        (monitor, mode),
        signals.asked,
        training.step,
        roll_back=saving.roll_back,
    )

    # Resume
    if setup.found:
        resume.restore(setup.found, state, extra)
        path, best = setup.found.path.resolve(), state.best
        if best is not None and (best.metric, best.mode) != (monitor, mode):
            before, now = f"{best.metric} ({best.mode})", f"{monitor} ({mode})"
            warnings.append(f"the best evaluation was by {before}, and is decided anew by {now}")
            state.best = None
        elif best is not None and not resume.carry_best(path, manager, best.global_step):
            warnings.append("the checkpoint of the best evaluation is gone: which one is best is decided anew")
            state.best = None
        if continued:
            manager.make_last(path)  # later ones are of a future that is computed again
        # A checkpoint that was moved away from its run has no metrics beside it.
        if not continued and path.parent.name == directory.checkpoints.name:
            directory.copy_metrics(path.parents[1], resumed_step)
        directory.truncate_metrics(resumed_step, repeated(state))
    directory.write_config(text)
    for logger in loggers:
        built.callback(logger.close)
        logger.open(directory.path, resumed_step if setup.found else None)

    # Tell
    rows = [*describe(config, training), *hardware_metrics.rows()]
    console.header(f"{config.name}  seed {config.seed}  {directory.path}", rows)
    if groups := table_of_groups(state.optimizer):
        columns = ["group", "tensors", "parameters", "lr", "weight decay"]
        console.table("parameter groups", columns, groups)
    for warning in [*warnings, *setup.warnings]:
        console.warn(warning)
    if training.started:
        summary["init_from"] = training.started.record()
        if training.started.misfits:
            columns = ["tensor", "what", "in the file", "in the model"]
            console.table("not taken from init_from", columns, training.started.table())
    if setup.found:
        console.line(f"resumed from {setup.found.path} at step {resumed_step}")
        if setup.differences:
            rows_changed = [[*found, "yes" if changes_result(found[0]) else "no"] for found in setup.differences]
            console.table("changed on the command line", ["key", "before", "now", "changes the result"], rows_changed)

    # Train
    if loop.finished:
        console.warn(
            f"there is nothing left to train: the checkpoint is at step {resumed_step} of {training.total_steps}"
        )
    watch_modules(config.watch, training, console)
    console.start(training.total_steps, config.epochs or 0, resumed_step)
    reset_peak_memory(training.device)
    built.pop_all()
    try:
        if warning := saving.room_for(state):
            console.warn(warning)
        if config.on_nonfinite == "rollback" and not manager.last.is_file():
            saving.save(loop, False)  # something to go back to
        with memory_for_training(config):
            loop.run()
        saving.wait()
        if not manager.last.is_file():
            saving.save(loop, False)
            saving.wait()
        if loop.stop_reason:
            console.line(f"stopped early: {loop.stop_reason}")
        record(summary, state, monitor)
        summary["weights_sha256"] = weights_sha256(model.state_dict())
        # Test, with the best weights if there are any
        if splits.test is not None and config.evaluate.test:
            has_best = manager.best.is_file() and state.best is not None
            of_best = load_best(training, checkpoint_file.read(manager.best, part_with())) if has_best else "raw"
            if has_best and (state.averaged is not None or of_best != "raw"):
                summary["test_weights"] = of_best
            test = functools.partial(evaluate_split, "test", stopped)
            results = test() if has_best else evaluate_both(training, config, test, stopped)
            summary["test"] = {name.removeprefix("test/"): number for name, number in results.items()}
            position = state.position
            show("test", summary["test"], position.global_step, position.epoch + (position.batch > 0))
    except Interrupted:
        raise Preempted(signals.asked()) from None
    finally:
        failed = sys.exc_info()[1]
        # Each of these happens, whatever becomes of the others, and the last one first.
        with contextlib.ExitStack() as ending:
            ending.callback(finish_saving, saving, checkpointing, failed, console)
            for logger in loggers:
                ending.callback(logger.close)
            ending.callback(console.stop)
            ending.callback(show.empty)
            for report in compiling:
                summary |= report.summary()
            splits.close()
            if said := splits.bad_samples.summary():
                summary["skipped"] = len(splits.bad_samples)
                console.warn(said)
    try:
        if config.log.curves:
            learning_curves(directory.metrics_file, directory.plots / "curves.png")
        else:
            (directory.plots / "curves.png").unlink(missing_ok=True)  # those of an earlier part of the run
    except Exception as error:  # a picture must not cost a finished run
        console.warn(f"no learning curves were drawn: {error}")
    return state.best.value if state.best else None
