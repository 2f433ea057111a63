"""The parts of a run that come from the config and the data together, for `train` and every verb that has a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runner.checkpoint.rng import seed_everything
from runner.config.errors import UserError, nearest
from runner.config.schema import Train
from runner.config.targets import build, names_argument
from runner.data.assembly import Splits, assemble
from runner.engine.evaluation import untouched
from runner.engine.loop import Limits
from runner.engine.plan import Plan
from runner.engine.state import Meter, Position, TrainState
from runner.engine.step import StepParts
from runner.engine.tasks import Task
from runner.optim.kernels import KINDS, Kernels, choose_kernels
from runner.runtime.device import choose_device, configure_torch
from runner.runtime.flops import Flops, count_flops
from runner.runtime.precision import Precision, choose_precision
from runner.runtime.toggles import Toggled, toggle


@dataclass
class Training:
    """The objects of a run before it starts: what is trained, on what, and how."""

    device: torch.device
    device_reason: str
    precision: Precision
    splits: Splits
    plan: Plan
    task: Task
    loss: nn.Module
    limits: Limits
    total_steps: int
    monitor: str
    mode: str
    state: TrainState
    parts: StepParts
    toggled: Toggled
    kernels: Kernels
    warnings: list[str]

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.state.model


def build_training(
    config: Train, values: dict[str, Any], start: Position | None = None, splits: Splits | None = None
) -> Training:
    """Build what a run trains, in the order in which one thing needs another.

    Args:
        config: the validated config.
        values: the same as plain containers; what was taken from the data is written into them.
        start: where training starts, if not at its beginning.
        splits: the data, where it was assembled before from the same settings.

    Raises:
        UserError: if settings, data, model, loss and optimizer do not fit together.
    """
    # Device and precision
    device, device_reason = choose_device(config.device)
    warnings = set_switches(config, device)
    precision = choose_precision(config.amp, device)

    # Data
    splits = splits or assemble(
        config.data, config.transform, config.seed, device, config.evaluate.batch_size, config.channels_last
    )
    values["data"]["normalize"] = {"mean": list(splits.mean), "std": list(splits.std)}
    data = config.data
    plan = Plan(splits.train.samples, data.batch_size, config.accumulate, data.drop_last, config.limit.train_batches)
    if plan.batches == 0:
        raise UserError(
            f"data.batch_size: {data.batch_size} is more than the {plan.samples} training samples, and "
            "data.drop_last=true leaves no batch\n    allowed: a smaller data.batch_size, or data.drop_last=false"
        )

    # Task, model, loss
    seed_everything(config.seed)
    task, model, loss = build_learner(values, config, splits)
    place(model, loss, device, config.channels_last)
    probe(task, model, loss, splits)
    toggled = toggle(config, model, loss, precision, as_given(splits))

    # Optimizer and schedule
    monitor, mode = monitored(config, task, splits)
    limits = Limits(config.epochs, config.max_steps, config.evaluate.every_epochs, config.evaluate.every_steps)
    total_steps = limits.total_steps(plan, start)
    optimizer, kernels = build_optimizer(config, model)
    toggled.compile_step_of(optimizer)
    schedule = build(
        "scheduler",
        config.scheduler,
        facts={"total_steps": total_steps, "steps_per_epoch": plan.steps, "mode": mode},
    )
    state = TrainState(model, optimizer, schedule, precision.scaler, Meter(device))
    parts = StepParts(
        targets=task.targets,
        loss=loss,
        autocast=precision.autocast,
        clip_norm=config.clip.norm,
        clip_value=config.clip.value,
        objective=toggled.objective,
    )
    return Training(
        device=device,
        device_reason=device_reason,
        precision=precision,
        splits=splits,
        plan=plan,
        task=task,
        loss=loss,
        limits=limits,
        total_steps=total_steps,
        monitor=monitor,
        mode=mode,
        state=state,
        parts=parts,
        toggled=toggled,
        kernels=kernels,
        warnings=[*warnings, *toggled.warnings, *splits.warnings],
    )


def set_switches(config: Train, device: torch.device) -> list[str]:
    """Set torch's process-wide switches as the config says; gives warnings about those without effect."""
    switches = (config.cudnn_benchmark, config.tf32, config.detect_anomaly, config.matmul_precision)
    return configure_torch(device, config.threads, config.deterministic, *switches)


def build_learner(values: dict[str, Any], config: Train, splits: Splits) -> tuple[Task, nn.Module, nn.Module]:
    """Build task, model and loss; what they took from the data is written into `values`.

    Raises:
        UserError: if what the config says does not fit the data.
    """
    count = len(splits.classes)
    facts: dict[str, Any] = {"num_classes": count or None}
    if not count and config.task.get("num_classes", count) is None:
        raise UserError(
            "task.num_classes: is not known, as the data has no classes\n"
            "    allowed: task=regression loss=mse for numbers, or the number of classes"
        )
    _check_against_data("task", config.task, facts)
    task: Task = build("task", _with_facts(values, "task", facts), facts=facts)
    facts = {
        "in_channels": splits.channels,
        "image_size": splits.image_size,
        "num_classes": task.outputs(splits.classes),
    }
    _check_against_data("model", config.model, facts)
    model: nn.Module = build("model", _with_facts(values, "model", facts), facts=facts)
    facts = {"num_classes": facts["num_classes"], "class_counts": splits.class_counts}
    loss: nn.Module = build("loss", config.loss, facts=facts)
    return task, model, loss


def _check_against_data(key: str, node: dict[str, Any], facts: dict[str, Any]) -> None:
    for name, fact in facts.items():
        given = node.get(name)
        if given is not None and fact is not None and _plain(given) != _plain(fact):
            raise UserError(
                f"{key}.{name}: is {given}, but the data says {fact}\n"
                f"    allowed: {key}.{name}=null to take it from the data, or other data"
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def _with_facts(values: dict[str, Any], key: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Write facts into a component's stored arguments where it lists them as null, so that a checkpoint has them."""
    node: dict[str, Any] = values[key]
    for name, fact in facts.items():
        if name in node and node[name] is None and names_argument(node, name):
            node[name] = _plain(fact)
    return node


def monitored(config: Train, task: Task, splits: Splits) -> tuple[str, str]:
    """The metric that says which evaluation is best, and whether the `min` or the `max` is.

    Raises:
        UserError: if there will be no such metric.
    """
    monitor, mode = _metric("checkpoint.monitor", config.checkpoint.monitor or task.monitor, config, task)
    return monitor, config.checkpoint.mode or mode


def _metric(key: str, name: str, config: Train, task: Task) -> tuple[str, Literal["min", "max"]]:
    """The full name of a metric of the validation split, and which of its values are usually better."""
    allowed = [f"val/{metric}" for metric in ("loss", *(config.metrics or task.metric_names()))]
    name = name if "/" in name else f"val/{name}"
    if name not in allowed:
        close = nearest(name, allowed)
        hint = f"; did you mean '{close}'?" if close else ""
        raise UserError(f"{key}: there is no metric '{name}'{hint}\n    allowed: {', '.join(allowed)}")
    usual: Literal["min", "max"] = "min" if name.rsplit("/", 1)[1] in ("loss", "mae", "rmse", "mse") else "max"
    return name, task.mode if name == task.monitor else usual


def build_callbacks(config: Train, task: Task, monitor: str, mode: str) -> dict[str, Any]:
    """Build the callbacks of the config by name; what they leave open about a metric is that of the best evaluation.

    Raises:
        UserError: if early stopping watches a metric that there will not be.
    """
    built = {}
    for name, node in config.callbacks.items():
        facts = {"monitor": monitor, "mode": mode}
        if node.get("monitor") is not None and str(node["_target_"]).endswith("EarlyStopping"):
            watched, usual = _metric(f"callbacks.{name}.monitor", str(node["monitor"]), config, task)
            # Another metric may be better in the other direction.
            node, facts = node | {"monitor": watched}, {"mode": mode if watched == monitor else usual}
        built[name] = build(f"callbacks.{name}", node, facts=facts)
    return built


def build_metrics(config: Train, task: Task, device: torch.device) -> dict[str, Any]:
    """Fresh metrics: those of the config, or of the task."""
    if config.metrics is None:
        return task.metrics(device)
    facts = {"num_classes": getattr(task, "num_classes", None), "task": "multiclass"}
    return {name: build(f"metrics.{name}", node, facts=facts).to(device) for name, node in config.metrics.items()}


def training_flops(training: Training, samples: int = 2) -> Flops:
    """Operations of a batch in training, see `count_flops`; everything is left as it is but for the model's mode."""
    splits = training.splits
    images = as_given(splits, samples)
    targets = training.task.targets(splits.example[1].expand(samples, *splits.example[1].shape[1:]))
    training.model.train()
    return count_flops(
        training.model, images, lambda logits: training.loss(logits, targets), training.precision.autocast
    )


def as_given(splits: Splits, copies: int = 1) -> Tensor:
    """The first training sample as a model is given it, without augmentation: (copies, C, H, W)."""
    image = splits.example[0].expand(copies, *splits.example[0].shape[1:])
    return splits.train_for_eval.prepare(image, torch.zeros(copies, dtype=torch.int64, device=image.device), 0)


def fresh_metrics(config: Train, task: Task, device: torch.device) -> Callable[[], dict[str, Any]]:
    """A function that gives fresh metrics: built when first asked, then reset, or built anew if one cannot be reset."""
    built: dict[str, Any] = {}

    def metrics() -> dict[str, Any]:
        nonlocal built
        if built and all(hasattr(metric, "reset") for metric in built.values()):
            for metric in built.values():
                metric.reset()
        else:
            built = build_metrics(config, task, device)
        return built

    return metrics


def probe(task: Task, model: nn.Module, loss: nn.Module, splits: Splits) -> None:
    """Send one sample through model and loss, so that what does not fit is said before training starts.

    Weights, buffers, modes and random generators are left as they are.

    Raises:
        UserError: if the model cannot take the images, or the loss cannot take its outputs and the targets.
    """
    target = splits.example[1]
    outputs = task.outputs(splits.classes)
    with untouched(model):
        inputs = as_given(splits)
        shape = tuple(inputs.shape)
        try:
            logits = model(inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"model: cannot take images of shape {shape}: {_first_line(error)}") from error
        if not isinstance(logits, Tensor) or tuple(logits.shape) != (1, outputs):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(
                f"model: gives {got} for one image\n    allowed: a tensor of shape (1, {outputs}), one output a class or number"
            )
        try:
            value = loss(logits, task.targets(target))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UserError(
                f"loss: {_first_line(error)}\n    allowed: a loss that fits the task and its targets"
            ) from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError("loss: gives more than one value\n    allowed: a scalar, the mean over the samples")
        _probe_training(task, loss, splits, logits)


def _probe_training(task: Task, loss: nn.Module, splits: Splits, logits: Tensor) -> None:
    """Send the sample through what is done to samples in training alone: augmentation, and targets that are blended."""
    image, target = splits.example
    places = torch.zeros(1, dtype=torch.int64, device=image.device)
    try:
        images = splits.train.prepare(image, places, 0)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(f"transform.train: cannot take images of {tuple(image.shape)}: {_first_line(error)}") from error
    if splits.train.mix is None:
        return
    try:
        loss(logits, task.targets(splits.train.mix(images, target, places, 0)[1]))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"transform.mix: gives targets that task and loss cannot take: {_first_line(error)}\n"
            "    allowed: transform.mix=null, or a loss of probabilities such as loss=cross_entropy"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def place(model: nn.Module, loss: nn.Module, device: torch.device, channels_last: bool) -> None:
    """Move model and loss to the device, weights in the memory layout that the images come in."""
    model.to(device)
    loss.to(device)
    if channels_last:
        model.to(memory_format=torch.channels_last)


def build_optimizer(config: Train, model: nn.Module) -> tuple[torch.optim.Optimizer, Kernels]:
    """Build the optimizer over the trainable parameters; each group remembers its `initial_lr` for the schedule.

    Raises:
        UserError: if there is nothing to train, or the optimizer refuses its arguments.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("model: has no trainable parameter\n    allowed: a model with weights that require gradients")
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    kernels = choose_kernels(config.optimizer, parameters, sparse)
    facts = dict.fromkeys(config.optimizer.keys() & set(KINDS)) | kernels.arguments
    try:
        optimizer: torch.optim.Optimizer = build("optimizer", config.optimizer, parameters, facts=facts)
    except RuntimeError as error:  # how torch refuses arguments that do not go together
        raise UserError(f"optimizer: {config.optimizer['_target_']} refuses its arguments: {error}") from error
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer, kernels


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
        *training.toggled.rows(plan.batch_size),
        (
            "optimizer",
            f"{type(training.state.optimizer).__name__}, {settings}",
            f"schedule {str(config.scheduler['_target_']).rsplit('.', 1)[1]}",
        ),
        *([("update", training.kernels.name, training.kernels.reason)] if training.kernels.name else []),
        (
            "steps",
            f"{training.total_steps:,}",
            f"{plan.steps:,} an epoch, {plan.batch_size} x {plan.accumulate} samples each",
        ),
    ]
    if config.deterministic:
        rows.append(("algorithms", "deterministic", f"deterministic={str(config.deterministic).lower()}"))
    return rows
