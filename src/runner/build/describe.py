"""What is shown of a run before it starts."""

from __future__ import annotations

import torch

from runner.build.optimizer import table_of_groups
from runner.build.run import Run
from runner.build.run_record import RunRecord
from runner.config.schema.train import Train
from runner.config.targets import preferred_data


def show_run(run: Run, record: RunRecord, more: list[tuple[str, str, str]], warnings: list[str]) -> None:
    """Show what runs, the warnings, what was not loaded from `init_from`, and what the command line changed on resuming.

    Args:
        run: the run.
        record: its directory and console; the summary gets `init_from`.
        more: rows of label, value and reason to show below the others.
        warnings: what to warn of.
    """
    config, console, started = run.config, record.console, run.initial.started
    title = f"{config.name}  seed {config.seed}  {record.directory.path}"
    console.header(title, [*describe(config, run), *more])
    if groups := table_of_groups(run.state.optimizer):
        console.table("parameter groups", ["group", "tensors", "parameters", "lr", "weight decay"], groups)
    for warning in warnings:
        console.warn(warning)
    if started:
        record.summary["init_from"] = started.record()
        if started.misfits:
            columns = ["tensor", "what", "in the file", "in the model"]
            console.table("not taken from init_from", columns, started.table())
    record.show_resumed(run.state.position.global_step)


def describe(config: Train, run: Run) -> list[tuple[str, str, str]]:
    """What runs, and every choice that was made for the user, with its reason."""
    data, plan, device, precision = run.data, run.plan, run.device, run.precision
    counts = [(name, split.samples) for name in ("train", "val", "test") if (split := getattr(data, name))]
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    trainable = sum(parameter.numel() for parameter in run.model.parameters() if parameter.requires_grad)
    shape = f"{data.channels}x{data.image_size[0]}x{data.image_size[1]}"
    classes = f"{len(data.classes)} classes, " if data.classes else ""
    target = str(config.model["_target_"]).rsplit(".", 1)[1]
    settings = ", ".join(
        f"{key} {value}" for key, value in config.optimizer.items() if key == "lr" or key == "weight_decay"
    )
    rows = [
        (
            "model",
            f"{target}, {parameters:,} parameters",
            "" if trainable == parameters else f"{trainable:,} trainable",
        ),
        ("data", f"{config.data.name}, {shape}, {classes}" + ", ".join(f"{n:,} {name}" for name, n in counts), ""),
        *data.choices,
        (
            "device",
            f"{device}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device),
            run.hardware.reason,
        ),
        ("precision", precision.name, precision.reason),
        *_preferred(config, data.channels),
        *run.initial.rows(),
        *_frozen(run),
        *run.toggled.rows(plan.batch_size),
        (
            "optimizer",
            f"{type(run.state.optimizer).__name__}, {settings}",
            f"schedule {str(config.scheduler['_target_']).rsplit('.', 1)[1]}",
        ),
        *_groups(run),
        *([("update", run.kernels.name, run.kernels.reason)] if run.kernels.name else []),
        *_averaging(run),
        (
            "steps",
            f"{run.total_steps:,}",
            f"{plan.steps:,} an epoch, {plan.batch_size} x {plan.accumulate} samples each",
        ),
    ]
    return rows + (_repeating(config, run.device) if config.deterministic else [])


def _preferred(config: Train, channels: int) -> list[tuple[str, str, str]]:
    """Whether images are prepared as the trained weights of the model want them."""
    wanted = preferred_data(config.model, grey=channels == 1)
    if not wanted:
        return []
    normalize = config.data.normalize
    given = {"image_size": config.data.image_size, "normalize": {"mean": normalize.mean, "std": normalize.std}}
    own = [f"data.{name}" for name in wanted if given[name] != wanted[name]]
    statistics = wanted.get("normalize", {}).items()
    parts = [f"{wanted['image_size']} pixels"] if "image_size" in wanted else []
    parts += [f"{name} {', '.join(f'{value:.4g}' for value in values)}" for name, values in statistics]
    reason = "as the trained weights of the model want them"
    return [("images", ", ".join(parts), f"{reason}, but for {' and '.join(own)}" if own else reason)]


def _frozen(run: Run) -> list[tuple[str, str, str]]:
    """What is frozen, and until when."""
    rows = []
    for part in run.state.freezing.parts:
        count = sum(parameter.numel() for parameter in part.parameters)
        until = "permanently"
        if part.steps is not None:
            until = f"until after step {part.steps:,}"
        elif part.epochs is not None:
            until = f"until after epoch {part.epochs:,}"
        rows.append(("frozen", f"{part.name}, {count:,} parameters", until))
    return rows


def _groups(run: Run) -> list[tuple[str, str, str]]:
    """How many parameter groups there are, and their rates; the table has each."""
    rows = table_of_groups(run.state.optimizer)
    rates = [float(row[3]) for row in rows]
    return [("groups", str(len(rows)), f"lr {min(rates):.4g} to {max(rates):.4g}")] if rows else []


def _averaging(run: Run) -> list[tuple[str, str, str]]:
    """What is averaged, from when."""
    averaged = run.state.averaged
    if averaged is None:
        return []
    if averaged.kind == "ema":
        return [("averaging", f"EMA, decay {averaged.decay}", "after every step" + ", rising" * averaged.warmup)]
    return [("averaging", f"SWA, from step {averaged.start:,}", f"every {averaged.every:,} steps")]


def _repeating(config: Train, device: torch.device) -> list[tuple[str, str, str]]:
    """What a deterministic run repeats, and what it cannot promise."""
    warned = config.deterministic == "warn"
    where = {"cpu": "another CPU, number of threads or version"}.get(device.type, "another GPU or version")
    return [
        (
            "algorithms",
            "deterministic" if not warned else "deterministic where there are such",
            f"deterministic={str(config.deterministic).lower()}",
        ),
        ("seeded", "Python, NumPy, torch, each sample", "not: generators that code makes for itself; env says more"),
        ("same bits", "on this machine", f"{where} may round differently"),
    ]
