"""`eval`: the metrics of a checkpoint on a split, per-class accuracy and the confusion matrix."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import torch
from torch import nn

from runner.base.errors import UserError
from runner.base.files import make_folder, write_json
from runner.checkpoint.weights import weights_sha256
from runner.config.composition import Composition
from runner.config.schema.verbs import Eval
from runner.distributed.world import world
from runner.engine.evaluation import evaluate
from runner.engine.step import Supervised
from runner.instrument.no_trace import SavedAttributes
from runner.optim.losses import BinaryCrossEntropy, CrossEntropy, Focal
from runner.run.evaluation import warn_of_nonfinite
from runner.run.from_checkpoint import (
    ResolvedCheckpoint,
    activation_of,
    as_list,
    class_names,
    output_folder,
    resolve_checkpoint,
    run_directory_of,
    split_of,
    stored_data,
    with_tta,
)
from runner.run.metrics import build_metrics
from runner.run.model import build_task_model_loss, place
from runner.run.step import TaskSteps, steps_of
from runner.run.trial import probe
from runner.tracking.formats import digits, number
from runner.tracking.verb_report import Report

# Losses to which the logarithm of averaged probabilities is as good as logits, by the activation of the task.
_TAKE_LOGITS: dict[str, tuple[type[nn.Module], ...]] = {
    "softmax": (CrossEntropy, Focal, nn.CrossEntropyLoss),
    "sigmoid": (BinaryCrossEntropy, nn.BCEWithLogitsLoss),
}


def run(composition: Composition) -> float:
    """Evaluate a checkpoint; returns the loss, for sweepers."""
    report = Report(composition.values["json"])
    resolved = resolve_checkpoint(composition, Eval)
    config, found = resolved.config, resolved.found
    record = evaluation(resolved, report)
    loss = float(record["metrics"].get("loss", math.nan))
    # Every rank has the metrics, and only the first one writes them
    if not world().first:
        return loss
    folder = output_folder(config.output, run_directory_of(found.path), config.output_root, "evaluations")
    title = f"{record['data']} {record['split']}, {record['samples']:,} samples"
    # Other data must not replace the evaluation of the run's own data.
    same_data = config.data.name == stored_data(found).get("name")
    name = config.split if same_data else f"{config.data.name}_{config.split}"
    written = [folder / f"eval_{name}.json"]
    write_json(written[0], record, named=config.output is not None)
    if "confusion" in record:
        from runner.tracking.plots import confusion_matrix  # imports matplotlib

        written.append(folder / "plots" / f"confusion_{name}.png")
        make_folder(written[1].parent)
        confusion_matrix(record["confusion"], list(record.get("per_class", ())), written[1], title)
    if not report.json(record, written=[str(path) for path in written]):
        report.line(resolved.described())
        _show(record, title, report)
        report.lines(*written)
    return loss


def evaluation(resolved: ResolvedCheckpoint[Eval], report: Report) -> dict[str, Any]:
    """The metrics of a checkpoint on a split, as `eval` writes them; warnings go to the report."""
    config = resolved.config
    device, precision = resolved.set_up_device("eval", report)
    splits = resolved.data(device)
    splits.bad_samples.open(report.warn)
    report.warnings(text for text in splits.warnings if text.startswith("data.image_size"))
    with contextlib.closing(splits):
        split = split_of(splits, config.split)
        _, task, model, loss = build_task_model_loss(config, splits, fetch_weights=False)
        place(model, loss, device, config.channels_last, precision.weights)
        # A model that does not fit the data is a sentence before the first batch.
        attributes = SavedAttributes(task)
        steps = steps_of(task, model, loss, max(1, resolved.record()["global_step"]))
        probe(steps, task, model, loss, splits)
        attributes.restore()
        resolved.load_weights(model, task, loss)
        limit = config.limit.eval_batches
        measure = functools.partial(evaluate, loss=loss, autocast=precision.autocast, limit=limit)
        # Tables such as the confusion matrix are metrics that are not single numbers
        metrics, tables = build_metrics(config, task, device), task.tables(device)
        batches = math.ceil(split.samples / split.loader.batch_size / world().size)
        with report.counting("eval", batches if limit is None else min(batches, limit)) as begin:
            # Asked before each batch; nothing interrupts an evaluation.
            asked: Any = {"metrics": metrics | tables, "interrupted": lambda: bool(begin())}
            scalars = measure(model, split.loader, steps.evaluated, **asked)
        warn_of_nonfinite(scalars.get("loss", 0.0), splits, config.split, report.warn)
        with torch.inference_mode():
            computed = {name: metric.compute().tolist() for name, metric in tables.items()}
        # Test-time augmentation is a second evaluation, so that both results can be compared
        averaged = None
        if config.tta:
            if isinstance(steps, TaskSteps):
                problem = f"averages the outputs of the model, and {steps.name} evaluates batches itself"
                raise UserError("tta", problem, "null")
            image = resolved.blank_input(splits).to(precision.weights)
            views = with_tta(model, task, image, config.tta, config.tta_mean)
            evaluated = Supervised(views, loss, task.targets).evaluated
            averaged = measure(views, split.loader, evaluated, metrics=build_metrics(config, task, device))
            kind = str(activation_of(task))
            # Averaged probabilities are not logits, and most losses expect these
            if config.tta_mean == "probabilities" and not isinstance(loss, _TAKE_LOGITS.get(kind, ())):
                del averaged["loss"]
                why = f"as this loss does not take {kind} logits"
                report.warn(f"tta_mean=probabilities: the averaged views have no loss, {why}")
    splits.bad_samples.join(world())
    if summary := splits.bad_samples.summary():
        report.warn(summary)
    record: dict[str, Any] = {
        **resolved.record(),
        "weights_sha256": weights_sha256(resolved.weights[0]),
        "data": config.data.name,
        "split": config.split,
        "samples": split.samples if limit is None else min(split.samples, limit * split.loader.batch_size),
        "metrics": {name: value for name, value in scalars.items() if name not in tables},
    }
    if averaged is not None:
        record["tta"] = {"views": as_list(config.tta), "mean": config.tta_mean, "metrics": averaged}
    classes = list(class_names(resolved, task))
    if "per_class" in computed:
        record["per_class"] = dict(zip(classes, computed["per_class"], strict=True))
    # Results for each label or output, by the name of their kind
    for kind in ("label_", "output_"):
        if scores := {name.removeprefix(kind): each for name, each in computed.items() if name.startswith(kind)}:
            names = classes or map(str, range(task.outputs(splits.classes)))
            rows = zip(names, zip(*scores.values(), strict=True), strict=True)
            record[f"per_{kind[:-1]}"] = {name: dict(zip(scores, values, strict=True)) for name, values in rows}
    if "confusion" in computed:
        record["confusion"] = computed["confusion"]
    return record


def _show(record: dict[str, Any], title: str, report: Report) -> None:
    rows = [[name, digits(value)] for name, value in record["metrics"].items()]
    columns = ["metric", "value"]
    if tta := record.get("tta"):
        columns.append(f"with {', '.join(tta['views'])} (mean of {tta['mean']})")
        rows = [[name, value, digits(tta["metrics"][name]) if name in tta["metrics"] else ""] for name, value in rows]
    report.table(title, columns, rows)
    for kind in ("label", "output"):
        if scores := record.get(f"per_{kind}"):
            heads = next(iter(scores.values()))
            rows = [[name, *map(number, values.values())] for name, values in scores.items()]
            report.table(f"each {kind}", [kind, *(head.replace("_", " ") for head in heads)], rows)
    if "per_class" not in record:
        return
    names, columns = list(record["per_class"]), ["class", "accuracy"]
    rows = [[name, f"{value:.4f}"] for name, value in record["per_class"].items()]
    for index, counts in enumerate(record.get("confusion", ())):
        columns[2:] = ["samples", "most often confused with"]
        wrong = [(count, names[other]) for other, count in enumerate(counts) if other != index and count]
        count, other = max(wrong, default=(0, ""))
        rows[index] += [f"{sum(counts):,}", f"{other} ({count:,})" if wrong else ""]
    report.table("accuracy of each class", columns, rows)
