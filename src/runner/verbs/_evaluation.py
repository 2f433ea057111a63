"""The work of `eval`: a checkpoint, a split, and what comes out. Apart from the verb because it imports torch."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from runner.build.data_check import warn_of_nonfinite
from runner.build.metrics import build_metrics
from runner.build.model import build_task_model_loss, place
from runner.build.probe import probe
from runner.checkpoint.digest import weights_sha256
from runner.config.app import Composition
from runner.config.errors import UserError
from runner.config.schema.eval import Eval
from runner.data.build import DataModule
from runner.engine.evaluation import evaluate
from runner.engine.tasks import Task
from runner.tracking.console import Console
from runner.tracking.files import finite, write_json
from runner.verbs._checkpoint import (
    augmented,
    blank_given,
    class_count,
    distinct,
    fill,
    folder_for,
    listed,
    prepare,
    run_directory_of,
    settle,
    splits_of,
    stored_data,
)
from runner.verbs._work import guarded


def run(cfg: DictConfig) -> float | None:
    """Evaluate once: the entry point that Hydra calls.

    Returns:
        The loss, for sweepers.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    return guarded(_evaluate, cfg)


def _evaluate(composition: Composition) -> float:
    # With --json, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if composition.values["json"] else None)
    settled = settle(composition, Eval)
    config, found = settled.config, settled.found
    device, precision = prepare(settled, "eval", console)
    splits = splits_of(settled, device)
    splits.bad_samples.open(None, console.warn)
    with contextlib.closing(splits):
        split = splits.eval_split(config.split)
        if split is None:
            raise UserError(f"split: this data has no '{config.split}' split\n    allowed: {', '.join(_names(splits))}")
        task, model, loss = build_task_model_loss(config, splits, fetch_weights=False)
        place(model, loss, device, config.channels_last)
        probe(task, model, loss, splits)
        fill(model, settled)
        parts = (split.loader, task.targets, loss)
        metrics, tables = build_metrics(config, task, device), task.tables(device)
        scalars = evaluate(model, *parts, metrics | tables, precision.autocast, config.limit.eval_batches)
        warn_of_nonfinite(scalars["loss"], splits, config.split, console.warn)
        with torch.inference_mode():
            computed = {name: metric.compute().tolist() for name, metric in tables.items()}
        averaged = None
        if config.tta:
            views = augmented(model, task, blank_given(settled, splits), config.tta, config.tta_mean)
            fresh = build_metrics(config, task, device)
            averaged = evaluate(views, *parts, fresh, precision.autocast, config.limit.eval_batches)
            if config.tta_mean == "probabilities" and not _of_softmax(loss, task, device):
                del averaged["loss"]
                console.warn(
                    "tta_mean=probabilities: there is no loss of the averaged views, as this loss is not one of softmax "
                    "probabilities"
                )
    if said := splits.bad_samples.summary():
        console.warn(said)
    classes = distinct(settled.classes)
    limit = config.limit.eval_batches
    samples = split.samples if limit is None else min(split.samples, limit * split.loader.batch_size)
    trained_on = stored_data(found).get("name")
    name = config.split if config.data.name == trained_on else f"{config.data.name}_{config.split}"
    weights, kind = settled.weights
    record: dict[str, Any] = {
        "checkpoint": str(found.path),
        "global_step": found.contents["position"]["global_step"],
        "weights": kind,
        "weights_sha256": weights_sha256(weights),
        "data": config.data.name,
        "split": config.split,
        "samples": samples,
        "metrics": {name: value for name, value in scalars.items() if name not in tables},
    }
    if averaged is not None:
        record["tta"] = {"views": listed(config.tta), "mean": config.tta_mean, "metrics": averaged}
    if "per_class" in computed:
        record["per_class"] = dict(zip(classes, computed["per_class"], strict=True))
    if "confusion" in computed:
        record["confusion"] = computed["confusion"]
    folder = folder_for(config.output, run_directory_of(found.path), config.output_root, "evaluations")
    written = _write(record, folder, name, classes)
    if config.json:
        print(json.dumps(finite(record | {"written": [str(path) for path in written]}), allow_nan=False))
    else:
        _show(record, console, written)
    return float(record["metrics"]["loss"])


def _of_softmax(loss: Callable[[Tensor, Tensor], Tensor], task: Task, device: torch.device) -> bool:
    """Whether a loss of classes takes the outputs for logits of a softmax: a number added to all of them then changes nothing."""
    logits = torch.linspace(-1, 1, 2 * (class_count(task) or 2), device=device).view(2, -1)
    targets = task.targets(torch.arange(2, device=device))
    with torch.inference_mode():
        return torch.allclose(loss(logits, targets), loss(logits + 2, targets), rtol=1e-3, atol=1e-4)


def _names(splits: DataModule) -> list[str]:
    return [name for name in ("train", "val", "test") if splits.eval_split(name) is not None]


def _write(record: dict[str, Any], folder: Path, name: str, classes: list[str]) -> list[Path]:
    path = folder / f"eval_{name}.json"
    write_json(path, record)
    if "confusion" not in record:
        return [path]
    from runner.tracking.plots import confusion_matrix

    plots = folder / "plots"
    plots.mkdir(exist_ok=True)
    picture = plots / f"confusion_{name}.png"
    title = f"{record['data']} {record['split']}, {record['samples']:,} samples"
    confusion_matrix(record["confusion"], classes, picture, title)
    return [path, picture]


def _show(record: dict[str, Any], console: Console, written: list[Path]) -> None:
    average = "" if record["weights"] == "raw" else f"  averaged weights ({record['weights']})"
    console.line(f"{record['checkpoint']}  step {record['global_step']}{average}")
    rows = [[name, repr(value)] for name, value in record["metrics"].items()]
    columns = ["metric", "value"]
    if "tta" in record:
        tta = record["tta"]
        columns.append(f"with {', '.join(tta['views'])} (mean of {tta['mean']})")
        rows = [[name, value, repr(tta["metrics"][name]) if name in tta["metrics"] else ""] for name, value in rows]
    console.table(f"{record['data']} {record['split']}, {record['samples']:,} samples", columns, rows)
    if "per_class" in record:
        matrix = record.get("confusion")
        names = list(record["per_class"])
        rows = []
        for index, (name, value) in enumerate(record["per_class"].items()):
            row = [name, f"{value:.4f}"]
            if matrix:
                wrong = [(count, names[other]) for other, count in enumerate(matrix[index]) if other != index and count]
                worst = max(wrong, default=None)
                row += [f"{sum(matrix[index]):,}", f"{worst[1]} ({worst[0]:,})" if worst else ""]
            rows.append(row)
        columns = ["class", "accuracy"] + (["samples", "most often taken for"] if matrix else [])
        console.table("accuracy of each class", columns, rows)
    for path in written:
        console.line(str(path))
