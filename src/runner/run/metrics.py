"""Metrics, the one that decides which evaluation is best, and the callbacks that watch them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from runner.base.errors import UserError, nearest
from runner.config.rules import never_evaluates
from runner.config.schema.train import Train
from runner.config.targets import build, names_argument, resolve
from runner.engine.callbacks import METHODS as CALLBACK
from runner.engine.protocols import Metric
from runner.engine.weight_average import Kind, prefix
from runner.run.finetune import explaining
from runner.run.interfaces import calls_of, require_methods
from runner.tasks.task import Task, converting

_SMALLER_IS_BETTER = ("loss", "mae", "mse", "rmse")  # by name, where the metric itself does not say


class Monitor(NamedTuple):
    """The metric that decides which evaluation is best."""

    metric: str  # its full name, such as `val/loss`; empty if none decides
    mode: str  # whether the `min` or the `max` of it is best


def choose_monitor(config: Train, task: Task, scalars: Sequence[str] = ()) -> Monitor:
    """The metric that decides which evaluation is best; none, if neither the config nor the task names one.

    `scalars` are those that the task's evaluation gives beside its metrics.

    Raises `UserError` if there is no such metric, or neither it nor the config says which of its values are better.
    """
    if (own := task.monitor) is None and config.checkpoint.monitor is None:
        return Monitor("", "min")
    # A run that is never evaluated needs no metric
    known = ("loss", *metric_names(config, task), *scalars)
    if config.checkpoint.monitor is None and never_evaluates(config) and own.removeprefix("val/") not in known:
        return Monitor("", "min")
    named = config.checkpoint.monitor or own.replace("val/", f"val/{prefix(averaging(config))}", 1)
    metric = _full_name("checkpoint.monitor", named, config, task, scalars)
    return Monitor(metric, config.checkpoint.mode or better("checkpoint.mode", metric, config, task, scalars))


def expected_monitor(config: Train) -> Monitor:
    """What `choose_monitor` will say, from the class of the task alone; raises `UserError` if that does not tell it."""
    task, start = resolve(config.task["_target_"]), f"val/{prefix(averaging(config))}"
    own = getattr(task, "monitor", None)
    # The task names a metric of the weights; with an average, that of the average is the one to watch
    name = config.checkpoint.monitor or (own and str(own).replace("val/", start, 1))
    if name is None:
        raise UserError("checkpoint.monitor", "is null, and the task's class names no metric", "such as val/loss")
    name = name if "/" in name else f"val/{name}"
    plain = name.replace(start, "val/", 1)
    # A direction belongs to a metric: the task's is used only for the metric that the task names
    mode = config.checkpoint.mode or (getattr(task, "mode", None) if plain == own else None)
    mode = mode or ("min" if plain.removeprefix("val/") in _SMALLER_IS_BETTER else None)
    if mode is None:
        raise UserError("checkpoint.mode", f"is null, and a search has to know it of {name}", "min or max")
    return Monitor(name, mode)


def averaging(config: Train) -> Kind | None:
    """The average of the weights that is evaluated as well."""
    return "ema" if config.ema is not None else "swa" if config.swa is not None else None


def _full_name(key: str, name: str, config: Train, task: Task, scalars: Sequence[str]) -> str:
    """The full name of a metric of the validation split."""
    own = [f"val/{metric}" for metric in dict.fromkeys(("loss", *metric_names(config, task), *scalars))]
    start = f"val/{prefix(averaging(config))}"
    allowed = [*own, *(metric.replace("val/", start, 1) for metric in own if start != "val/")]
    name = name if "/" in name else f"val/{name}"
    if name not in allowed:
        raise UserError(key, f"there is no metric '{name}'", ", ".join(allowed), nearest(name, allowed))
    return name


def metric_names(config: Train, task: Task) -> list[str]:
    """The names of all metrics: those of the task, and those that the config adds or puts in their place."""
    return list(dict.fromkeys([*task.metric_names(), *(config.metrics or {})]))


def better(key: str, name: str, config: Train, task: Task, scalars: Sequence[str] = ()) -> Literal["min", "max"]:
    """Whether the `min` or the `max` of a metric, by its full name, is best; `key` is what to set if it is not known."""
    metrics = metric_names(config, task)
    names = {"loss", *metrics, *scalars}
    plain = name.removeprefix("val/")
    # A metric of the average is named after the one of the weights, and as good in the same direction
    plain = plain if plain in names else plain.removeprefix(prefix(averaging(config)))
    if f"val/{plain}" == task.monitor and plain not in (config.metrics or {}):
        return task.mode
    # Building a metric may import torchmetrics, which takes two seconds: only where nothing else says it.
    metric = build_metrics(config, task, torch.device("cpu"))[plain] if plain in metrics else None
    higher = getattr(metric, "higher_is_better", None)
    if isinstance(higher, bool):
        return "max" if higher else "min"
    # Some names, such as loss, leave no doubt
    if plain in _SMALLER_IS_BETTER:
        return "min"
    if f"val/{plain}" == task.monitor:
        return task.mode
    allowed = "min or max, or a metric with the attribute higher_is_better"
    raise UserError(key, f"whether small or large values of '{name}' are better is not known", allowed)


def build_callbacks(config: Train, task: Task, monitor: Monitor, scalars: Sequence[str] = ()) -> dict[str, Any]:
    """Build the callbacks of the config by name; one that names no metric watches that of the best evaluation."""
    built = {}
    for name, node in config.callbacks.items():
        # The metric of the best evaluation and its direction are facts that a callback may take as arguments
        facts = {"monitor": monitor.metric, "mode": monitor.mode}
        if node.get("monitor") is not None and (stops_early(node) or names_argument(node, "mode")):
            watched = _full_name(f"callbacks.{name}.monitor", str(node["monitor"]), config, task, scalars)
            node = node | {"monitor": watched}
            # Another metric may be better in the other direction.
            if node.get("mode") is None and watched != monitor.metric:
                facts["mode"] = better(f"callbacks.{name}.mode", watched, config, task, scalars)
        elif not monitor.metric and (stops_early(node) or names_argument(node, "monitor")):
            raise UserError(f"callbacks.{name}.monitor", "is null, and the task names no metric", "such as val/loss")
        built[name] = build(f"callbacks.{name}", node, facts=facts)
        require_methods(f"callbacks.{name}", node["_target_"], built[name], CALLBACK, optional=CALLBACK)
    return built


def stops_early(node: Mapping[str, Any]) -> bool:
    """Whether a callback is early stopping."""
    return str(node["_target_"]).endswith("EarlyStopping")


def build_metrics(config: Train, task: Task, device: torch.device) -> dict[str, Any]:
    """Fresh metrics: those of the task, and those that the config adds or puts in their place."""
    metrics = dict(task.metrics(device))
    # torchmetrics has classes for each kind of task; the arguments say which one is meant
    classes, threshold = getattr(task, "num_classes", None), getattr(task, "threshold", None)
    of_labels = {"num_labels": classes, "threshold": threshold, "task": "multilabel"}
    facts = {"num_classes": classes} | ({"task": "multiclass"} if threshold is None else of_labels)
    # Metrics of the config come last, so that they replace those of the task with the same name
    for name, node in (config.metrics or {}).items():
        metric = build(f"metrics.{name}", node, facts=facts)
        require_methods(f"metrics.{name}", node["_target_"], metric, calls_of(Metric))
        metrics[name] = converting(metric.to(device) if hasattr(metric, "to") else metric, task)
    return metrics


def check_metrics(config: Train, task: Task, outputs: int, target: torch.Tensor) -> None:
    """Try the config's metrics of torchmetrics on two samples: those made for another number of classes refuse them.

    `outputs` is the number of the model's for each sample; `target` is that of one sample in the data set, shape (1, ...).
    Raises `UserError` if a metric refuses them.
    """
    if config.metrics is None or not target.numel():  # samples of another kind have no single target
        return
    with torch.random.fork_rng(devices=[]):  # the run's own generators go on as without this
        metrics = build_metrics(config, task, torch.device("cpu"))
    targets = task.targets(torch.cat([target.cpu(), target.cpu()]))
    problem = f"cannot take outputs of shape (2, {outputs}) and targets of shape {tuple(targets.shape)}: "
    for name in config.metrics:
        # Others may need more samples, or be expensive
        if type(metrics[name]).__module__.startswith("torchmetrics.classification"):
            with explaining(f"metrics.{name}", problem, "arguments that fit the task; null for those it knows"):
                metrics[name].update(torch.zeros(2, outputs), targets)


def fresh_metrics(config: Train, task: Task, device: torch.device) -> Callable[[], dict[str, Any]]:
    """A function that returns fresh metrics: built at the first call, later reset, or built again if one cannot be reset."""
    built: dict[str, Any] = {}

    def metrics() -> dict[str, Any]:
        nonlocal built
        # Building is expensive, so metrics are used again where they can be reset
        if built and all(hasattr(metric, "reset") for metric in built.values()):
            for metric in built.values():
                metric.reset()
        else:
            built = build_metrics(config, task, device)
        return built

    return metrics
