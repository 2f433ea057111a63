"""Metrics, which of them says what is best, and the callbacks that watch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from runner.config.errors import UserError, nearest
from runner.config.schema.train import Train
from runner.config.targets import build
from runner.data.assembly import Splits
from runner.engine.averaging import Kind, prefix
from runner.engine.tasks import Task


def monitored(config: Train, task: Task, splits: Splits) -> tuple[str, str]:
    """The metric that says which evaluation is best, and whether the `min` or the `max` is.

    Raises:
        UserError: if there will be no such metric.
    """
    named = config.checkpoint.monitor or task.monitor.replace("val/", f"val/{prefix(averaging(config))}", 1)
    monitor, mode = _metric("checkpoint.monitor", named, config, task)
    return monitor, config.checkpoint.mode or mode


def averaging(config: Train) -> Kind | None:
    """What kind of average of the weights is evaluated beside them."""
    return "ema" if config.ema is not None else "swa" if config.swa is not None else None


def _metric(key: str, name: str, config: Train, task: Task) -> tuple[str, Literal["min", "max"]]:
    """The full name of a metric of the validation split, and which of its values are usually better."""
    own = [f"val/{metric}" for metric in ("loss", *(config.metrics or task.metric_names()))]
    start = f"val/{prefix(averaging(config))}"
    allowed = [*own, *(metric.replace("val/", start, 1) for metric in own if start != "val/")]
    name = name if "/" in name else f"val/{name}"
    if name not in allowed:
        close = nearest(name, allowed)
        hint = f"; did you mean '{close}'?" if close else ""
        raise UserError(f"{key}: there is no metric '{name}'{hint}\n    allowed: {', '.join(allowed)}")
    plain = name if name in own else name.replace(start, "val/", 1)
    usual: Literal["min", "max"] = "min" if plain.rsplit("/", 1)[1] in ("loss", "mae", "rmse", "mse") else "max"
    return name, task.mode if plain == task.monitor else usual


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
