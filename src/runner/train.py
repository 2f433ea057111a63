"""One training run, from the config to the summary, in the order in which things happen."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

from runner.base.errors import DataFailed
from runner.base.files import write_atomically
from runner.checkpoint import resume
from runner.checkpoint.rng import seed_everything
from runner.config.rules import never_evaluates
from runner.config.schema.train import Train
from runner.config.untrusted import may_write_cache
from runner.data.build import read_data
from runner.data.module import DataModule
from runner.distributed.world import Agreement, world
from runner.engine.callbacks import Log, Progress
from runner.engine.diagnosis import watch_finite
from runner.engine.errors import Interrupted, Preempted
from runner.engine.loop import Loop
from runner.engine.plan import Position
from runner.instrument.no_trace import SavedAttributes, preserved_buffers
from runner.run import trial
from runner.run.budget import Clock, fix_steps
from runner.run.describe import show_run, start_progress
from runner.run.evaluation import Evaluator, Samples
from runner.run.finetune import InitialWeights, freeze, set_initial_weights
from runner.run.metrics import build_callbacks, check_metrics, choose_monitor
from runner.run.model import build_task_model_loss, example_input, model_of, place
from runner.run.optimizer import build_state
from runner.run.pictures import Pictures
from runner.run.ranks import RankBuffers, check_same, shard_model, synchronize_norms, uneven_loss
from runner.run.run import Run, choose_hardware, hardware_metrics_of, plan_length, validate_limits
from runner.run.run_directory import RunDirectory
from runner.run.saving import Saving, build_loggers, open_loggers
from runner.run.step import build_step, slow_guard, steps_of
from runner.runtime.hardware_metrics import HardwareMetrics
from runner.runtime.shapes import COLUMNS, watching_shapes
from runner.runtime.signals import StopSignals
from runner.runtime.toggles import Compilation, forget_compiled, toggle
from runner.tracking.console import SkippedSteps
from runner.tracking.formats import WEIGHTS_STEP, aligned, metric
from runner.tracking.loggers import MetricsBuffer


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
    # A search for the batch size builds runs of its own, so it comes before anything of this one exists
    config, choices = trial.auto_batch_size(config, functools.partial(build_run, make_cache=make_cache, fresh=fresh))

    # Device and precision first: data are read into the memory, and as the numbers, of the device
    hardware = choose_hardware(config)
    device, precision = hardware.device, hardware.precision
    data = data or read_data(config, device, make_cache=make_cache, dtype=precision.weights)
    data.choices.extend(choices)
    data.train.loader.world = world()
    length = plan_length(config, data, start)

    # Task, model and loss; from here on, the config has what comes from the data
    seed_everything(config.seed)
    draws_weights = fresh and start is None
    config, task, model, loss = build_task_model_loss(config, data, draws_weights)
    place(model, loss, device, config.channels_last, precision.weights)
    warnings, attributes = synchronize_norms(config, model), SavedAttributes(task)
    tried = steps_of(task, model, loss, length.total_steps)
    with watching_shapes(model, aligned) if config.watch.shapes else contextlib.nullcontext():
        evaluates = config.evaluate.test or not never_evaluates(config)
        scalars = trial.probe(tried, task, model, loss, data, evaluates=evaluates)
    check_metrics(config, task, task.outputs(data.classes), data.example[1])
    monitor = choose_monitor(config, task, scalars)

    # Initial weights, which a checkpoint brings along, and what is frozen
    image = example_input(data)
    initial = set_initial_weights(config, model, data, image) if draws_weights else InitialWeights()
    trial.try_adapters(config, tried, model, loss, data)
    freezing = freeze(config, model, image)
    trial.try_single_sample(config, tried, model, loss, data, freezing=freezing, epoch=length.plan)

    # Activation checkpointing and compilation
    with preserved_buffers(model, loss):  # also of modules that the task adds
        forward = functools.partial(trial.forward_copies, tried, model, data)
        toggled = toggle(config, model_of(model), loss, precision, forward)
    warnings += trial.unsaved_attributes(task, attributes.restore())

    # From here on, a rank may have a part of each weight
    freezing.follow_parameters(shard_model(config, model, hardware, warnings))

    # Optimizer, schedule, average of the weights: what training changes, and a checkpoint stores
    state, kernels = build_state(config, task, model, loss, freezing, hardware=hardware, length=length, monitor=monitor)
    toggled.compile_step_of(state.optimizer)

    step = build_step(config, state, task, loss, hardware=hardware, toggled=toggled, total=length.total_steps)
    warnings += slow_guard(step, hardware)
    if world().size > 1:
        warnings += uneven_loss(loss, task, data)
    return Run(
        config=config,
        hardware=hardware,
        data=data,
        task=task,
        loss=loss,
        length=length,
        monitor=monitor,
        scalars=scalars,
        state=state,
        step=step,
        toggled=toggled,
        kernels=kernels,
        initial=initial,
        warnings=[*hardware.warnings, *initial.warnings, *toggled.warnings, *data.warnings, *warnings],
    )


def train(directory: RunDirectory, signals: StopSignals, also_call: Sequence[Any] = ()) -> float | None:
    """Build a run and train it: resume, train, test, and write what is known into the summary.

    Args:
        directory: where the run is, and what it is asked to do.
        signals: ask it to stop.
        also_call: callbacks that do not come from the config.

    Returns:
        The best value of the monitored metric, or None.
    """
    directory.begin()
    config, found = directory.config, directory.found
    # Closes what is open, the last one first, whatever becomes of the others
    with contextlib.ExitStack() as ending:
        try:
            start = resume.made_of(found, "position", Position) if found else None
            # A config from a checkpoint must not choose a folder that is written to: it only opens a cache there
            make_cache = may_write_cache(config, directory.composition.values)
            build = functools.partial(_build, start=start, make_cache=make_cache)
            config, rows = fix_steps(config, directory, signals, functools.partial(_rehearse, build))
            run = build(config)
            run.data.choices.extend(rows)
            ending.callback(run.data.close)
            # Cheap checks that need the finished run; ranks that disagree end here and not in a hanging collective call
            run.warnings += validate_limits(run)
            check_same(run, world())
            best = _train(run, directory, signals, ending, also_call)
        except DataFailed as error:
            if signals.asked():  # which ends the wait for data that do not come
                directory.console.warn(str(error))
                raise Preempted(signals.asked()) from None
            raise
    if world().first:
        directory.draw_curves(config.log.curves)
    return best


def _build(config: Train, start: Position | None, make_cache: bool) -> Run:
    """Build a run once nothing is left of those that were measured: they are full of cycles, and it needs their memory."""
    if config.budget is not None:
        gc.collect()
    # Variants that another run in this process compiled would count against torch's limit
    if config.compile:
        forget_compiled()
    return build_run(config, start, make_cache=make_cache)


def _rehearse(build: Callable[[Train], Run], config: Train, directory: RunDirectory, clock: Clock) -> Run:
    """Build a run, and train it to its end, as the one that counts will be; see `fix_steps`."""
    run = build(config)
    with contextlib.closing(run.data), contextlib.ExitStack() as ending:
        _train(run, directory, clock, ending, [clock])
    if world().first:
        directory.draw_curves(config.log.curves)
    return run


def _train(
    run: Run, directory: RunDirectory, signals: StopSignals, ending: contextlib.ExitStack, also_call: Sequence[Any]
) -> float | None:
    """See `train`."""
    config, data, state, console, found = run.config, run.data, run.state, directory.console, directory.found

    # Ranks stop at the same step, whichever of them is asked to; a single process asks itself
    agreement = Agreement(world(), signals.asked, config.dist.timeout_s)
    pictures = Pictures(run, directory.path / "pictures", console.warn)
    evaluator = Evaluator(run, console.warn, lambda: bool(signals.asked()), agreement.confirm, pictures.watched)

    # What is logged and saved
    data.bad_samples.open(console.warn)
    loggers = build_loggers(run, console.warn)
    buffer = MetricsBuffer([console.metrics, *(logger.log for logger in loggers)])
    hardware_metrics = hardware_metrics_of(run)
    custom = build_callbacks(config, run.task, run.monitor, run.scalars)
    saving = Saving(run, directory, callbacks=custom, loggers=loggers, buffer=buffer, clock=agreement.clock)
    compiled = run.toggled.reports(console.line)
    state.freezing.report = console.line

    # Callbacks are called in this order; saving comes last, when everything else is done
    callbacks = [
        agreement,
        *([Samples(run, loggers)] if getattr(run.task, "sample", None) else []),
        *compiled,
        Progress(console.advance),
        *(pictures, *custom.values(), *also_call),
        SkippedSteps(directory.path, console),
        Log(config.log.every_steps, [buffer], hardware_metrics, console.warn),
        RankBuffers(run, directory),
        saving.callback,
    ]
    loop = Loop(
        run.step,
        source=data.train.loader,
        plan=run.plan,
        limits=run.length.limits,
        evaluate=functools.partial(evaluator.weights_and_average, "val") if data.val else None,
        callbacks=callbacks,
        directory=directory.path,
        monitor=run.monitor,
        interrupted=agreement.reason,
    )

    # From here on, the state is that of the checkpoint
    run.warnings += saving.resume(found) if found else []
    write_atomically(directory.path / "config.yaml", saving.config_text.encode())
    open_loggers(loggers, directory, state.position.global_step if found else None, ending)
    show_run(run, directory, hardware_metrics.rows(), [*run.warnings, *directory.warnings])
    show = functools.partial(console.table, "shapes in the first batch", COLUMNS)
    watching = watching_shapes(run.model, aligned, show) if config.watch.shapes else contextlib.nullcontext()
    if config.watch.finite:
        watch_finite(state)
    start_progress(run, directory)
    ending.enter_context(saving)
    ending.callback(console.stop)
    ending.callback(buffer.empty)
    ending.callback(pictures.close)
    ending.callback(_note_losses, directory, data, compiled, hardware_metrics)
    try:
        saving.begin(loop)
        with trial.memory_for_training(config), watching:
            loop.run()
        directory.note_waiting()
        saving.end(loop)
        directory.note_trained(loop)

        # Test, with the best weights if there are any
        if data.test is not None and config.evaluate.test and not loop.pruned:
            directory.summary |= evaluator.test(saving.manager)
            tested = directory.summary["test"] | {WEIGHTS_STEP: directory.summary["test_step"]}
            # In the epoch that has begun, if it has not ended
            buffer("test", tested, state.position.global_step, state.position.epoch + (state.position.batch > 0))
        else:
            _show_untested(run, directory)
        data.bad_samples.join(world())
    except Interrupted:
        raise Preempted(agreement.reason() or signals.asked()) from None
    return state.best.value if state.best else None


def _show_untested(run: Run, directory: RunDirectory) -> None:
    if (best := run.state.best) is not None:
        directory.console.line(f"best evaluation: step {best.global_step:,}  {metric(best.metric, best.value)}")
    if run.data.test is None and run.config.evaluate.test and run.config.data.split.val != "test":
        reason = "there is no test split (data.split.test=0.2 takes one from the training samples)"
        directory.console.line(f"not tested: {reason}")


def _note_losses(
    directory: RunDirectory, data: DataModule, compiled: list[Compilation], hardware: HardwareMetrics
) -> None:
    """Close the data, and note what compilation cost, how many samples could not be read, and how busy device and machine were."""
    for report in compiled:
        directory.summary |= report.summary()
    data.close()
    if said := data.bad_samples.summary():
        directory.summary["skipped"] = len(data.bad_samples)
        directory.console.warn(said)
    directory.summary |= hardware.summary()
    if "device_busy" in directory.summary:
        share = metric("device_busy", directory.summary["device_busy"])
        directory.console.line(f"{share} during training, as its driver reports")
    for sentence in busy(directory.summary.get("cpu_wait")):
        directory.console.line(sentence, "yellow")


def busy(cpu_wait: float | None) -> list[str]:
    """A sentence about a machine that was too busy for figures of speed; none if it was not."""
    if cpu_wait is None or cpu_wait < 0.3:
        return []
    return [
        f"the machine was busy: for {cpu_wait:.0%} of the time, other programs had the CPU core; do not trust the speed"
    ]
