"""`predict`: what a checkpoint says of images or other samples, written row by row."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.base.files import write_atomically
from runner.config.composition import Composition
from runner.config.schema.verbs import Predict
from runner.config.validate import shown
from runner.data.loaders import Batch
from runner.distributed.world import world
from runner.instrument.no_trace import evaluating
from runner.models.features import Extractor, write_features
from runner.run.directory import claim, timestamp
from runner.run.evaluation import Predictions
from runner.run.from_checkpoint import (
    MODEL,
    ResolvedCheckpoint,
    activation_of,
    as_list,
    class_names,
    resolve_checkpoint,
    with_tta,
)
from runner.run.model import KnownData, model_of
from runner.runtime.precision import Precision
from runner.tasks.task import STEPS
from runner.tracking.formats import amount, clean, compact, number
from runner.tracking.verb_report import Report
from runner.verbs.predict.inputs import INPUTS, Source, opened
from runner.verbs.predict.rows import FieldRows, Row, RowBuilder, check_ending, open_table

_SHOWN = 10  # rows, and unreadable images


def run(composition: Composition) -> float:
    """Predict images.

    Returns:
        Images a second, for sweepers.
    """
    report, main = Report(composition.values["json"]), world().first
    resolved = resolve_checkpoint(composition, Predict, MODEL)
    config = resolved.config
    # Unreadable samples of a split are listed, as files are; the one that replaces a sample in training gets no row
    data = dataclasses.replace(config.data, on_error="raise" if config.strict else "skip", max_skipped=1.0)
    resolved = dataclasses.replace(resolved, config=dataclasses.replace(config, data=data))
    if not as_list(config.input):
        raise UserError("input", "is missing", INPUTS)
    if config.output is not None:
        check_ending(Path(config.output))
    device, precision = resolved.set_up_device("predict", report)
    with opened(resolved, device, report) as source:
        predictor, layers, rows = _predictor(resolved, source.data, device)
        # Only rank 0 writes; the others compute batches for it.
        path = Path(config.output or "predictions.csv") if main else Path(os.devnull)
        if main and config.output is None:
            path = claim(Path(config.output_root) / "predictions", timestamp()) / path
        if isinstance(rows, FieldRows):
            rows.path = path
        features_file = path.with_name(f"{path.stem}_features.npz") if layers and main else None
        shown, count, began, unreadable = list[Row](), 0, time.perf_counter(), dict[int, str]()
        with open_table(path, rows.lists) as write:

            def written() -> Iterator[dict[str, Tensor]]:
                nonlocal count
                computed = functools.partial(_computed, predictor, layers, source, precision)
                for outputs, cells, features in _batches(computed, source, unreadable, config.strict, report):
                    if main:
                        write(made := rows.rows(outputs, cells))
                        shown.extend(made[: _SHOWN - len(shown)])
                        count += len(made)
                    yield features

            with evaluating(predictor):
                # Nobody stores the features: the batches still have to be drawn, as the table is written meanwhile
                if features_file is None:
                    deque(written(), maxlen=0)
                else:
                    write_features(written(), features_file)
        if not main:
            return 0.0
        seconds = time.perf_counter() - began
    unreadable_list = path.with_name(f"{path.stem}_unreadable.txt")
    if unreadable:
        lines = "".join(f"{_one_line(reason)}\n" for _, reason in sorted(unreadable.items()))
        write_atomically(unreadable_list, lines.encode(), named=True)
    record = resolved.record() | {
        "predicted": count,
        "unreadable": [reason for _, reason in sorted(unreadable.items())],
        "unreadable_list": str(unreadable_list) if unreadable else None,
        "seconds": round(seconds, 3),
        "images_per_s": round(count / seconds, 3),
        "output": str(path),
        "features": str(features_file) if features_file is not None else None,
    }
    if not report.json(record):
        report.line(resolved.described())
    _show(record, shown, report)
    return float(record["images_per_s"])


def _show(record: dict[str, Any], first: list[Row], report: Report) -> None:
    predicted, unreadable = record["predicted"], record["unreadable"]
    if first and not report.as_json:
        columns = [name for name, value in first[0].items() if not isinstance(value, list | dict)]
        rows = [
            [number(row[name]) if isinstance(row[name], float) else str(row[name]) for name in columns] for row in first
        ]
        more = f", the first {len(rows)}" if predicted > len(rows) else ""
        report.table(f"{predicted:,} predicted{more}", columns, rows)
    if unreadable:
        were, they = ("was", "it") if len(unreadable) == 1 else ("were", "they")
        report.warn(f"{amount(len(unreadable), 'image')} {were} not predicted, as {they} could not be read:")
        report.lines(*(f"  {_one_line(reason)}" for reason in unreadable[:_SHOWN]))
        if len(unreadable) > _SHOWN:
            report.line(f"  and {len(unreadable) - _SHOWN:,} more: {record['unreadable_list']}")
    rate = compact(record["images_per_s"])
    report.line(f"{predicted:,} images in {record['seconds']:.2f} s, {rate} images/s with reading and writing")
    if not report.as_json:
        report.lines(*filter(None, (record["output"], record["features"])))


def _predictor(
    resolved: ResolvedCheckpoint[Predict], data: KnownData, device: torch.device
) -> tuple[nn.Module, Extractor | None, RowBuilder | FieldRows]:
    """What computes outputs, and features, and what makes rows of them."""
    config = resolved.config
    task, modules = resolved.restore_model(data, device)
    dtype = getattr(torch, config.dtype)
    if dtype == torch.float64:  # as in training: in float32 each tensor keeps its type
        modules.to(dtype)
    own_steps = any(hasattr(task, name) for name in STEPS)
    if hasattr(task, "predict_step") or config.pictures or (config.data.images is not None and own_steps):
        for key in ("top_k", "probabilities", "logits", "features", "tta"):
            if getattr(config, key) != (default := Predict.__dataclass_fields__[key].default):
                problem = "does not apply to rows that the task makes in predict_step"
                raise UserError(key, problem, shown(default))
        return Predictions(config, task, modules, config.pictures), None, FieldRows()
    model = model_of(modules)
    threshold = getattr(task, "threshold", 0.5) if activation_of(task) == "sigmoid" else None
    rows = RowBuilder(class_names(resolved, task), config.top_k, config.probabilities, config.logits, threshold)
    # Features come from the plain model, as its views would have one each
    layers = Extractor(model, as_list(config.features)) if as_list(config.features) else None
    if config.tta:
        model = with_tta(model, task, resolved.blank_input(data).to(dtype), config.tta, config.tta_mean)
    return model, layers, rows


_Computed = tuple[Any, list[Row], dict[str, Tensor]]
"""Outputs of a model or task for the readable samples of a batch, their first cells, and their features."""


def _batches(
    computed: Callable[[Batch | None], _Computed],
    source: Source,
    unreadable: dict[int, str],
    strict: bool,
    report: Report,
) -> Iterator[_Computed]:
    """What `computed` gives for each batch; samples that cannot be read are added to `unreadable`, or refused if `strict`.

    Several ranks compute a batch each, and rank 0 gets what all have found.
    """
    loader, ranks = source.loader, world()
    # Each rank computes every n-th batch, and all gather after each, so that rows are written in order.
    batches = math.ceil(loader.samples / loader.batch_size)
    with report.counting("predict", math.ceil(batches / ranks.size)) as begin:
        own = iter(loader.batches(0, ranks.rank, batches, ranks.size))
        for first in range(0, batches, ranks.size):
            begin()
            torch.manual_seed(first + ranks.rank)  # what the task draws is that of the batch, as in evaluations
            parts = ranks.gather((computed(next(own, None)), source.found()))
            for _, found in parts:
                unreadable.update(found)
            if strict and unreadable:
                allowed = "strict=false, which lists such images and continues"
                raise UserError("input", unreadable[min(unreadable)], allowed)
            yield from (part for part, _ in parts if part[1])


def _computed(
    model: nn.Module, layers: Extractor | None, source: Source, precision: Precision, batch: Batch | None
) -> _Computed:
    if batch is None:
        return torch.empty(0), [], {}
    own = isinstance(model, Predictions)
    with precision.autocast():
        outputs = model(batch) if own else model(batch.images).float().cpu()
        features = layers.rows(batch.images) if layers is not None else {}
    indices, unreadable = batch.indices.tolist(), source.found()
    targets = [None] * len(indices) if own else batch.targets.tolist()
    readable = [place for place, index in enumerate(indices) if index not in unreadable]
    cells = [source.first_cells(indices[place], targets[place]) for place in readable]
    kept = [outputs[place] for place in readable] if own else outputs[readable]
    return kept, cells, {name: tensor[readable].cpu() for name, tensor in features.items()}


def _one_line(reason: str) -> str:
    """A reason without the line ends and other controls that a file's name may hold."""
    return " ".join(clean(reason).encode("utf-8", "backslashreplace").decode().split())
