"""What is shown of a run before it starts."""

from __future__ import annotations

import torch

from runner.build.optimizer import table_of_groups
from runner.build.run import Training
from runner.config.schema.train import Train
from runner.config.targets import preferred_data


def describe(config: Train, training: Training) -> list[tuple[str, str, str]]:
    """What runs, and every choice that was made for the user, with its reason."""
    splits, plan, device, precision = training.splits, training.plan, training.device, training.precision
    counts = [(name, split.samples) for name in ("train", "val", "test") if (split := getattr(splits, name))]
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    trainable = sum(parameter.numel() for parameter in training.model.parameters() if parameter.requires_grad)
    shape = f"{splits.channels}x{splits.image_size[0]}x{splits.image_size[1]}"
    classes = f"{len(splits.classes)} classes, " if splits.classes else ""
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
        *splits.choices,
        (
            "device",
            f"{device}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device),
            training.device_reason,
        ),
        ("precision", precision.name, precision.reason),
        *_preferred(config, splits.channels),
        *training.rows,
        *([training.started.row()] if training.started else []),
        *_frozen(training),
        *training.toggled.rows(plan.batch_size),
        (
            "optimizer",
            f"{type(training.state.optimizer).__name__}, {settings}",
            f"schedule {str(config.scheduler['_target_']).rsplit('.', 1)[1]}",
        ),
        *_groups(training),
        *([("update", training.kernels.name, training.kernels.reason)] if training.kernels.name else []),
        *_averaging(training),
        (
            "steps",
            f"{training.total_steps:,}",
            f"{plan.steps:,} an epoch, {plan.batch_size} x {plan.accumulate} samples each",
        ),
    ]
    return rows + (_repeating(config, training.device) if config.deterministic else [])


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


def _frozen(training: Training) -> list[tuple[str, str, str]]:
    """What is not trained, and until when."""
    rows = []
    for part in training.state.freezing.parts:
        count = sum(parameter.numel() for parameter in part.parameters)
        until = "for good"
        if part.steps is not None:
            until = f"until after step {part.steps:,}"
        elif part.epochs is not None:
            until = f"until after epoch {part.epochs:,}"
        rows.append(("frozen", f"{part.name}, {count:,} parameters", until))
    return rows


def _groups(training: Training) -> list[tuple[str, str, str]]:
    """How many parameter groups there are, and their rates; the table has each."""
    rows = table_of_groups(training.state.optimizer)
    rates = [float(row[3]) for row in rows]
    return [("groups", str(len(rows)), f"lr {min(rates):.4g} to {max(rates):.4g}")] if rows else []


def _averaging(training: Training) -> list[tuple[str, str, str]]:
    """What is averaged, from when."""
    averaged = training.state.averaged
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
