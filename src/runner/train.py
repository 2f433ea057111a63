"""One training run, from the config to the summary, in the order in which things happen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from runner.build.auto_lr import auto_lr
from runner.build.batch_size import auto_batch_size, memory_for_training
from runner.build.data_check import compare_data, source_digests
from runner.build.describe import show_run
from runner.build.evaluation import Evaluator
from runner.build.finetune import freeze
from runner.build.hardware import choose_hardware
from runner.build.held import Held, held_by
from runner.build.init_from import InitialWeights, set_initial_weights
from runner.build.length import plan_length
from runner.build.metrics import build_callbacks, check_metrics, choose_monitor
from runner.build.model import build_task_model_loss, example_input, place, with_facts
from runner.build.optimizer import build_optimizer, build_schedule
from runner.build.probe import check_batches_of_one, probe
from runner.build.ranks import check_same, shard_model, synchronize_norms, uneven_loss
from runner.build.run import Run, training_flops
from runner.build.run_record import RunRecord
from runner.build.saving import Saving, build_loggers
from runner.build.setup import Setup
from runner.build.step import build_parts, build_step, slow_guard
from runner.build.validate import validate_limits
from runner.build.weight_average import build_averaged
from runner.checkpoint import resume
from runner.checkpoint.rng import seed_everything
from runner.checkpoint.weights import weights_sha256
from runner.config import stored
from runner.config.merge import may_write_cache
from runner.config.schema.train import Train
from runner.data.build import DataModule, build_data
from runner.distributed.agreement import Agreement
from runner.distributed.parallel import parallelize
from runner.distributed.world import world
from runner.engine.callbacks import Log, Progress, UnfreezeCallback
from runner.engine.diagnosis import FiniteWatch
from runner.engine.errors import Interrupted, Preempted
from runner.engine.loop import Loop
from runner.engine.oom_retry import ReportMicroBatches
from runner.engine.position import Position
from runner.engine.state import RunningMean, TrainState
from runner.runtime.compilation import CompileReport, forget_compiled
from runner.runtime.hardware_metrics import choose_hardware_metrics
from runner.runtime.memory import reset_peak_memory
from runner.runtime.peak_flops import kind_of
from runner.runtime.shapes import COLUMNS, ShapeWatch, shapes_on_failure
from runner.runtime.signals import StopSignals
from runner.runtime.toggles import toggle
from runner.tracking.formats import WEIGHTS_STEP, aligned
from runner.tracking.metrics_buffer import MetricsBuffer
from runner.tracking.skipped_steps import SkippedSteps


def build_run(
    config: Train,
    start: Position | None = None,
    data: DataModule | None = None,
    make_cache: bool = True,
    fresh: bool = True,
) -> Run:
    """Build what a run trains, in the order in which one thing needs another.

    Args:
        config: the config.
        start: where training starts, if not at its beginning.
        data: the data, if they were built before from the same settings.
        make_cache: whether to make a cache of `data.cache` that does not exist yet.
        fresh: whether weights begin here; if a checkpoint brings them, no others are read or drawn.
    """
    choices = []
    if config.data.batch_size == "auto":
        config, row = auto_batch_size(config, functools.partial(build_run, make_cache=make_cache, fresh=fresh))
        choices.append(row)

    # Device and precision
    hardware = choose_hardware(config)
    device, precision = hardware.device, hardware.precision

    # Data
    data = data or build_data(
        config.data,
        config.transform,
        seed=config.seed,
        device=device,
        eval_batch_size=config.evaluate.batch_size,
        channels_last=config.channels_last,
        make_cache=make_cache,
        dtype=precision.weights,
    )
    data.choices.extend(choices)
    data.train.loader.world = world()
    length = plan_length(config, data, start)

    # Task, model and loss; from here on, the config has what comes from the data
    seed_everything(config.seed)
    fresh = fresh and start is None
    task, model, loss = build_task_model_loss(config, data, fresh)
    config = with_facts(config, task, data)
    place(model, loss, device, config.channels_last, precision.weights)
    warnings = synchronize_norms(config, model)
    with shapes_on_failure(model, config.watch.shapes, aligned):
        single_values = probe(task, model, loss, data)
    check_metrics(config, task, task.outputs(data.classes), data.example[1])
    monitor = choose_monitor(config, task)

    # Initial weights, which a checkpoint brings along, and what is frozen
    image = example_input(data)
    initial = set_initial_weights(config, model, data, image) if fresh else InitialWeights()
    freezing = freeze(config, model, image)
    check_batches_of_one(model, single_values, length.plan, 1 if config.sync_batchnorm else world().size)

    # Activation checkpointing and compilation
    toggled = toggle(config, model, loss, precision, image)

    # From here on, a rank may have a part of each weight
    freezing.follow_parameters(shard_model(config, model, hardware, warnings))

    # Optimizer, schedule, average of the weights; a loss with tensors of its own is trained and saved like the model
    trained_loss = loss if loss.state_dict() else nn.Identity()
    optimizer, kernels = build_optimizer(config, model, trained_loss)
    toggled.compile_step_of(optimizer)
    state = TrainState(
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(config, length, monitor),
        scaler=precision.scaler,
        meter=RunningMean(device, finite_only=config.on_nonfinite == "skip", dtype=precision.weights),
        position=Position(turns=[list(turn) for turn in length.timeline.turns]),
        averaged=build_averaged(config, model, trained_loss, optimizer, length),
        loss=trained_loss,
    )
    state.freezing = freezing

    # Step
    parts = build_parts(config, state, task, loss, hardware=hardware, toggled=toggled)
    step = build_step(config, length.plan.batch_size)
    if world().size > 1:
        find_unused, retries = config.dist.find_unused_parameters, config.on_oom == "split"
        warnings += uneven_loss(loss, task, data)
        parts, step = parallelize(parts, step, state, world(), find_unused=find_unused, retries=retries)
    return Run(
        config=config,
        hardware=hardware,
        data=data,
        task=task,
        loss=loss,
        length=length,
        monitor=monitor,
        state=state,
        parts=parts,
        step=step,
        toggled=toggled,
        kernels=kernels,
        initial=initial,
        warnings=[
            *hardware.warnings,
            *slow_guard(parts, state, hardware),
            *initial.warnings,
            *toggled.warnings,
            *data.warnings,
            *warnings,
        ],
    )


def train(setup: Setup, record: RunRecord, signals: StopSignals, also_call: Sequence[Any] = ()) -> float | None:
    """Build a run and train it: resume, train, test, and write what is known into the summary.

    `also_call` are callbacks that do not come from the config.

    Returns:
        The best value of the monitored metric, or None.
    """
    with contextlib.ExitStack() as ending:
        best = _train(setup, record, signals, ending, also_call)
    if world().first:
        record.draw_curves(setup.config.log.curves)
    return best


def _train(
    setup: Setup, record: RunRecord, signals: StopSignals, ending: contextlib.ExitStack, also_call: Sequence[Any]
) -> float | None:
    """See `train`; `ending` closes what is open, the last one first, whatever becomes of the others."""
    config, console, found = setup.config, record.console, setup.found
    record.begin()

    # Data, model, optimizer
    build = functools.partial(build_run, make_cache=may_write_cache(config, record.composition))
    start = resume.made_of(found, "position", Position) if found else None
    data = None
    if config.compile:
        forget_compiled()
    if config.lr == "auto":
        folder = record.directory.path
        config, data = auto_lr(config, build, folder=folder, tell=console.line, interrupted=signals.asked)
        ending.callback(data.close)
    run = build(config, start, data)
    config, data, state = run.config, run.data, run.state
    ending.callback(data.close)
    warnings = [*run.warnings, *validate_limits(run)]
    fingerprint, sources = data.fingerprint(), source_digests(config)
    check_same(run, fingerprint, world())
    agreement = Agreement(world(), signals.asked, config.dist.timeout_s) if world().size > 1 else None
    interrupted = agreement.reason if agreement else signals.asked
    if found:
        warnings += compare_data(found.contents, data, fingerprint, sources, config.data.identity == "ignore")
    data.bad_samples.open(record.directory.checkpoints.with_name("skipped.jsonl"), console.warn)

    # Logging and checkpoints
    loggers = build_loggers(run, console.warn)
    buffer = MetricsBuffer([console.metrics, *(logger.log for logger in loggers)])
    hardware_metrics = choose_hardware_metrics(
        config.log.utilization if config.dtype == "float32" else False,
        run.device,
        kind=kind_of(run.precision.dtype, run.device),
        count=lambda: training_flops(run),
        warnings=warnings,
    )
    custom_callbacks = build_callbacks(config, run.task, run.monitor)
    saving = Saving(
        run,
        record,
        callbacks=custom_callbacks,
        loggers=loggers,
        buffer=buffer,
        fingerprint=fingerprint,
        sources=sources,
        clock=agreement.clock if agreement else None,
    )

    # Callbacks are called in the order of the list; saving comes last, when everything else is done
    compilation = run.toggled.compilation
    compile_reports = [CompileReport(compilation, console.line, console.warn)] if compilation else []
    callbacks = [
        *([agreement] if agreement else []),
        *compile_reports,
        *([] if all(part.permanent for part in state.freezing.parts) else [UnfreezeCallback(console.line)]),
        Progress(console.advance),
        *custom_callbacks.values(),
        *also_call,
        SkippedSteps(record.directory.path, console),
        *([ReportMicroBatches(console.warn)] if config.on_oom == "split" else []),
        Log(config.log.every_steps, [buffer], hardware_metrics, console.warn),
        saving.callback,
    ]
    held = Held(run)
    evaluator = Evaluator(
        run, console.warn, lambda: bool(signals.asked()), agreement.confirm if agreement else lambda: None
    )
    loop = Loop(
        state,
        source=data.train.loader,
        plan=run.plan,
        parts=held.parts(),
        limits=run.length.limits,
        evaluate=functools.partial(evaluator.weights_and_average, "val") if data.val else None,
        callbacks=callbacks,
        monitor=run.monitor,
        interrupted=interrupted,
        step=run.step,
        roll_back=saving.roll_back,
    )

    # Resume
    if found:
        warnings += saving.resume(found, record.continued)
    resumed_step = state.position.global_step
    record.directory.write_config(stored.dump(config))
    for logger in loggers:
        ending.callback(logger.close)
        logger.open(record.directory.path, resumed_step if found else None)
        record.endings += [logger.finish] if hasattr(logger, "finish") else []
    show_run(run, record, hardware_metrics.rows(), [*warnings, *setup.warnings])

    # Train
    if loop.finished:
        console.warn(f"there is nothing left to train: the checkpoint is at step {resumed_step} of {run.total_steps}")
    if config.watch.shapes:
        ShapeWatch(run.model, functools.partial(console.table, "shapes in the first batch", COLUMNS))
    if config.watch.finite:
        FiniteWatch(state)
    record.note_startup()
    console.start(
        run.total_steps,
        config.epochs or 0,
        resumed_step,
        monitor=(run.monitor.metric, run.monitor.mode),
        best=(state.best.value, state.best.global_step) if state.best else None,
        device=str(run.device),
        file=record.directory.progress_file,
    )
    reset_peak_memory(run.device)
    ending.enter_context(saving)
    ending.callback(console.stop)
    ending.callback(buffer.empty)
    ending.callback(_summarize_losses, record, data, compile_reports)
    try:
        saving.begin(loop)
        with memory_for_training(config), shapes_on_failure(run.model, config.watch.shapes, aligned):
            loop.run()
        record.note_waiting()
        saving.end(loop)
        if loop.stop_reason:
            console.line(f"stopped early: {loop.stop_reason}")
        if loop.pruned:
            record.summary["pruned"] = loop.stop_reason
        record.update(state, run.monitor.metric)
        if world().size > 1:
            record.summary["memory"] = held.by_rank()
            console.line(held_by(world().rank, record.summary["memory"]))
        record.summary["weights_sha256"] = weights_sha256(run.model.state_dict())
        best = state.best.value if state.best else None

        # Test, with the best weights if there are any
        if data.test is not None and config.evaluate.test and not loop.pruned:
            record.summary |= evaluator.test(saving.manager)
            epoch = state.position.epoch + (state.position.batch > 0)
            tested = record.summary["test"] | {WEIGHTS_STEP: record.summary["test_step"]}
            buffer("test", tested, state.position.global_step, epoch)
        elif data.test is None and config.evaluate.test:
            console.line("not tested: there is no test split (data.split.test=0.2 takes one from the training samples)")
    except Interrupted:
        raise Preempted(interrupted() or signals.asked()) from None
    return best


def _summarize_losses(record: RunRecord, data: DataModule, reports: list[CompileReport]) -> None:
    """Add to the summary what compilation cost, and how many samples could not be read."""
    for report in reports:
        record.summary |= report.summary()
    data.close()
    if said := data.bad_samples.summary():
        record.summary["skipped"] = len(data.bad_samples)
        record.console.warn(said)
