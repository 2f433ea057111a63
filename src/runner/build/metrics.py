"""Metrics, which of them says what is best, and the callbacks that watch them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from runner.config.errors import UserError, nearest
from runner.config.schema.train import Train
from runner.config.targets import build, names_argument
from runner.data.build import DataModule
from runner.engine.tasks import Task
from runner.engine.weight_average import Kind, prefix

_SMALLER_IS_BETTER = ("loss", "mae", "mse", "rmse")  # by name, where the metric itself does not say


def monitored(config: Train, task: Task, splits: DataModule) -> tuple[str, str]:
    """The metric that says which evaluation is best, and whether the `min` or the `max` is.

    Raises:
        UserError: if there will be no such metric, or neither it nor the config says which of its values are better.
    """
    named = config.checkpoint.monitor or task.monitor.replace("val/", f"val/{prefix(averaging(config))}", 1)
    monitor = _full_name("checkpoint.monitor", named, config, task)
    return monitor, config.checkpoint.mode or _better("checkpoint.mode", monitor, config, task)


def averaging(config: Train) -> Kind | None:
    """What kind of average of the weights is evaluated beside them."""
    return "ema" if config.ema is not None else "swa" if config.swa is not None else None


def _full_name(key: str, name: str, config: Train, task: Task) -> str:
    """The full name of a metric of the validation split."""
    own = [f"val/{metric}" for metric in ("loss", *(config.metrics or task.metric_names()))]
    start = f"val/{prefix(averaging(config))}"
    allowed = [*own, *(metric.replace("val/", start, 1) for metric in own if start != "val/")]
    name = name if "/" in name else f"val/{name}"
    if name not in allowed:
        close = nearest(name, allowed)
        hint = f"; did you mean '{close}'?" if close else ""
        raise UserError(f"{key}: there is no metric '{name}'{hint}\n    allowed: {', '.join(allowed)}")
    return name


def _better(key: str, name: str, config: Train, task: Task) -> Literal["min", "max"]:
    """Whether the `min` or the `max` of a metric, by its full name, is best: its own `higher_is_better` says so.

    Raises:
        UserError: if it is not known; `key` is what to set.
    """
    names = {"loss", *(config.metrics or task.metric_names())}
    plain = name.removeprefix("val/")
    plain = plain if plain in names else plain.removeprefix(prefix(averaging(config)))
    if f"val/{plain}" == task.monitor and config.metrics is None:
        return task.mode
    # Building a metric may import torchmetrics, which takes a second: only where nothing else says it.
    higher = None
    if plain != "loss":
        higher = getattr(build_metrics(config, task, torch.device("cpu"))[plain], "higher_is_better", None)
    if isinstance(higher, bool):
        return "max" if higher else "min"
    if plain in _SMALLER_IS_BETTER:
        return "min"
    if f"val/{plain}" == task.monitor:
        return task.mode
    raise UserError(
        f"{key}: whether small or large values of '{name}' are better is not known\n"
        "    allowed: min or max, or a metric with the attribute higher_is_better"
    )


def build_callbacks(config: Train, task: Task, monitor: str, mode: str) -> dict[str, Any]:
    """Build the callbacks of the config by name; what they leave open about a metric is that of the best evaluation.

    Raises:
        UserError: if early stopping watches a metric that there will not be, or it is not known which of its values are
            better.
    """
    built = {}
    for name, node in config.callbacks.items():
        facts = {"monitor": monitor, "mode": mode}
        if node.get("monitor") is not None and (stops_early(node) or names_argument(node, "mode")):
            watched = _full_name(f"callbacks.{name}.monitor", str(node["monitor"]), config, task)
            node = node | {"monitor": watched}
            # Another metric may be better in the other direction.
            if node.get("mode") is None and watched != monitor:
                facts["mode"] = _better(f"callbacks.{name}.mode", watched, config, task)
        built[name] = build(f"callbacks.{name}", node, facts=facts)
    return built


def stops_early(node: Mapping[str, Any]) -> bool:
    """Whether a callback is early stopping."""
    return str(node["_target_"]).endswith("EarlyStopping")


def build_metrics(config: Train, task: Task, device: torch.device) -> dict[str, Any]:
    """Fresh metrics: those of the config, or of the task."""
    if config.metrics is None:
        return task.metrics(device)
    facts = {"num_classes": getattr(task, "num_classes", None), "task": "multiclass"}
    return {name: build(f"metrics.{name}", node, facts=facts).to(device) for name, node in config.metrics.items()}


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
