"""What is shown of a run before it starts, and a dry run, which shows it and tries one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runner.config.changes import changes_result
from runner.config.keys import with_changes
from runner.config.schema.sections import Data, components_of
from runner.config.schema.train import Train
from runner.config.targets import called, preferred_data, resolve
from runner.distributed.world import rows, world
from runner.run.finetune import explaining
from runner.run.optimizer import table_of_groups
from runner.run.ranks import count_ranks
from runner.run.run import Run, validate_limits
from runner.run.run_directory import RunDirectory
from runner.run.trial import explaining_memory, try_step
from runner.runtime.memory import readable, reset_peak_memory
from runner.tracking.console import Console
from runner.tracking.formats import amount
from runner.tracking.run_files import PROGRESS, Progress

Row = tuple[str, str, str]  # label, value and reason

_ALONE = {"devices": 1, "strategy": "auto", "sync_batchnorm": False}  # how one process tries the step of a rank


def show_run(run: Run, directory: RunDirectory, more: list[Row], warnings: list[str]) -> None:
    """Show what runs, the warnings, what was not loaded from `init_from`, and what the command line changed on resuming."""
    config, console, initial = run.config, directory.console, run.initial
    found, differences = directory.found, directory.differences
    title = f"{config.name}  seed {config.seed}  {directory.path}"
    data_found = directory.composition.data_found if found is None else ""  # a checkpoint has what it needs
    console.header(title, [*[("found", data_found, "")] * bool(data_found), *describe(config, run), *more])
    if groups := table_of_groups(run.state.optimizer):
        console.table("parameter groups", ["group", "tensors", "parameters", "lr", "weight decay"], groups)
    for warning in warnings:
        console.warn(warning)
    # The summary stores where the weights came from, so that the source outlives the log
    if loaded := initial.record():
        directory.summary["init_from"] = loaded
    if initial.misfits:
        columns = ["tensor", "what", "in the file", "in the model"]
        console.table("skipped tensors of init_from", columns, initial.table())
    if found is not None:
        console.line(f"resumed from {found.path} at step {run.state.position.global_step}")
    # What the command line changed on resuming may explain why the curves differ afterwards
    if found is not None and differences:
        rows = [[*change, "yes" if changes_result(change[0]) else "no"] for change in differences]
        console.table("changed on the command line", ["key", "before", "now", "changes the result"], rows)


def dry_run(config: Train, build: Callable[[Train], Run], console: Console) -> None:
    """Print what is built from `config`, and the peak memory of an optimizer step with the samples of one rank.

    Raises `UserError` if the config cannot be run; nothing is written.
    """
    ranks = count_ranks(config)
    if config.budget is not None:
        console.line(f"budget={config.budget}: training measures how many steps fit, and has others than shown here")
        config = with_changes(config, {"max_steps": config.max_steps or 1})
    run = build(with_changes(config, _ALONE) if ranks > 1 else config)
    with contextlib.closing(run.data):
        console.header(f"{config.name}  seed {config.seed}  a dry run", describe(run.config, run))
        for warning in (*run.warnings, *validate_limits(run)):
            console.warn(warning)
        # The first rank has the most samples
        samples = rows(run.plan.size(0), 0, ranks).stop
        of_rank = f", of one of {ranks} ranks" * (ranks > 1)
        problem = f"a step with batches of {samples}{of_rank} fails: "
        failed = explaining("data.batch_size", problem, "a larger data.batch_size, or fewer devices")
        short = explaining_memory("data.batch_size", samples, "a smaller data.batch_size with a larger accumulate")
        with failed, short:
            peak = try_step(run, samples)
    console.line(f"a step with batches of {samples}{of_rank}: {readable(peak.bytes)} ({peak.what})")


def start_progress(run: Run, directory: RunDirectory) -> None:
    """Start the clocks of training and the display of its progress."""
    state = run.state
    # A finished run that is resumed does no harm, but is rarely what was meant
    if (step := state.position.global_step) >= run.total_steps:
        directory.console.warn(f"there is nothing left to train: the checkpoint is at step {step} of {run.total_steps}")
    directory.note_startup()
    directory.console.start(
        Progress(step, run.total_steps, 0, run.config.epochs or 0, device=str(run.device), metric=run.monitor.metric),
        best=lambda: (state.best.value, state.best.global_step) if state.best else None,
        file=directory.path / PROGRESS,
    )
    # Building took memory too, and the peak to report is that of training
    reset_peak_memory(run.device)


def describe(config: Train, run: Run) -> list[Row]:
    """What runs, and every choice that was made for the user, with its reason."""
    # Each row has a value and the reason for it, as many settings are chosen automatically
    data, plan, device, averaged, ranks = run.data, run.plan, run.device, run.state.averaged, world().size
    counts = [f"{split.samples:,} {name}" for name in ("train", "val", "test") if (split := getattr(data, name))]
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    trainable = sum(parameter.numel() for parameter in run.model.parameters() if parameter.requires_grad)
    shape = f"{data.channels}x{data.image_size[0]}x{data.image_size[1]}, " if data.channels else ""
    classes = f"{len(data.classes)} classes, " if data.classes else ""
    where = f"{device}, {amount(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else str(device)
    some_trained = f"{trainable:,} trainable" * (trainable < parameters)
    rows: list[Row] = [
        ("model", f"{_class(config.model)}, {parameters:,} parameters", some_trained),
        ("data", f"{_data(config.data)}, {shape}{classes}{', '.join(counts)}", ""),
        *data.choices,
        ("device", where, run.hardware.reason),
    ]
    if ranks > 1:
        strategy = "ddp" if config.strategy == "auto" else config.strategy
        rows += [("ranks", str(ranks), f"{strategy}, batches of {plan.batch_size} divided among them")]
    rows += [("precision", run.precision.name, run.precision.reason)]
    rows += _preferred(config, data.channels)
    rows += run.initial.rows()
    if (lora := config.adapters).rank is not None:
        share = f"{trainable / parameters:.2%} of {parameters:,} weights are trained"
        rows += [("adapters", f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}", share)]
    rows += [("frozen", f"{part.name}, {part.size:,} parameters", part.until) for part in run.state.freezing.parts]
    rows += run.toggled.rows()
    rows += _optimizers(config)
    rows += [("update", run.kernels.name, run.kernels.reason)] if run.kernels.name else []
    if averaged is not None and averaged.kind == "ema":
        rows += [("averaging", f"EMA, decay {averaged.decay}", "after every step" + ", rising" * averaged.warmup)]
    elif averaged is not None:
        rows += [("averaging", f"SWA, from step {averaged.start:,}", f"every {averaged.every:,} steps")]
    an_epoch = f"{plan.steps:,} an epoch, {plan.batch_size} x {plan.accumulate} samples each"
    rows += [("steps", f"{run.total_steps:,}", an_epoch)]
    # What decides which evaluation is best, where the config gives a part of its name
    (metric, mode), given = run.monitor, config.checkpoint.monitor
    rows += [("best by", f"{metric}, {mode}", f"checkpoint.monitor={given} means that of val")] * (
        given not in (None, metric)
    )
    if config.deterministic:
        # What a deterministic run repeats, and what it cannot promise
        other = "another CPU, number of threads or version" if device.type == "cpu" else "another GPU or version"
        some = " where available" if config.deterministic == "warn" else ""
        rows += [
            ("algorithms", f"deterministic{some}", f"deterministic={str(config.deterministic).lower()}"),
            ("seeded", "Python, NumPy, torch, each sample", "not: generators created by other code"),
            ("same bits", "on this machine", f"{other} may round differently"),
        ]
    return rows


def _optimizers(config: Train) -> list[Row]:
    """Each optimizer with its settings and its schedule."""
    schedules, rows = components_of("scheduler", config.scheduler), list[Row]()
    for key, node in components_of("optimizer", config.optimizer).items():
        schedule = schedules.get(key.replace("optimizer", "scheduler", 1)) or next(iter(schedules.values()))
        names = ("lr", "lr_base_batch_size", "weight_decay")
        settings = [f"{name} {node[name]}" for name in names if node.get(name) is not None]
        rows.append((key.rpartition(".")[2], ", ".join([_class(node), *settings]), f"schedule {_class(schedule)}"))
    return rows


def _class(node: dict[str, Any]) -> str:
    name = called(target := str(node["_target_"]), node.get("name"))
    # A file of a task has names of its own for them: `data, model = Views, Net`
    own = getattr(resolve(target), "__name__", "") if target.endswith(f".{name}") else ""
    return own if own.isidentifier() else name  # a lambda has no name


def _data(data: Data) -> str:
    """The name of the data set; with its folder where only the kind of its files has one, and with its class or function if it
    is not shipped."""
    where = Path(str(data.dataset.get("path") or data.dataset.get("root") or data.root)).absolute().name
    if data.name in ("image_folder", "csv", "huggingface"):
        return f"{where} ({data.name})"
    # The name may be that of the option whose data set was replaced
    own = _class(data.dataset)
    return data.name if data.dataset["_target_"].startswith("runner.") or own == data.name else f"{own} ({data.name})"


def _preferred(config: Train, channels: int) -> list[Row]:
    """The image size and normalisation of the pretrained weights, if the model has any."""
    wanted = preferred_data(config.model, grey=channels == 1)
    if not wanted:
        return []
    normalize = config.data.normalize
    given = {"image_size": config.data.image_size, "normalize": {"mean": normalize.mean, "std": normalize.std}}
    own = [f"data.{name}" for name in wanted if given[name] != wanted[name]]
    statistics = wanted.get("normalize", {}).items()
    parts = [f"{wanted['image_size']} pixels"] if "image_size" in wanted else []
    parts += [f"{name} {', '.join(f'{value:.4g}' for value in values)}" for name, values in statistics]
    reason = "from the pretrained weights"
    return [("images", ", ".join(parts), f"{reason}, except {' and '.join(own)}" if own else reason)]
