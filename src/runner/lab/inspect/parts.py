"""The parts of an inspection: each adds tables, pictures and numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import UserError
from runner.config.rules import never_evaluates
from runner.config.schema.verbs import Inspect
from runner.data.bad_samples import path_of
from runner.data.loaders import Batch
from runner.data.module import SplitData
from runner.engine.metrics import class_numbers
from runner.engine.step import Supervised
from runner.instrument.flops import Flops
from runner.instrument.nested import parts_of_rows
from runner.instrument.no_trace import evaluating
from runner.lab.inspect import pictures
from runner.lab.inspect.layers import Layer, layers_of, outer_maps, shape_text
from runner.lab.inspect.statistics import ObservedPass, Summary, pass_through, summarize
from runner.run.from_checkpoint import split_of, unique_names
from runner.run.model import example_input
from runner.run.outputs import Predictions
from runner.run.run import Run, training_flops
from runner.tracking.formats import compact, number, percent
from runner.tracking.image_grid import Pixels, Tile, image_grid
from runner.tracking.plots import confusion_matrix
from runner.tracking.verb_report import mib

_NUMBERS = ("mean", "std", "min", "max", "norm", "zeros", "not finite")


@dataclass(frozen=True)
class Table:
    """A table with its title; `notes` are lines above it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass
class Inspection:
    """The results so far, and what several parts need, computed when first used."""

    config: Inspect  # what to do
    training: Run  # what is inspected
    folder: Path  # where pictures go
    lines: list[str] = field(default_factory=list)  # shown first
    parts: list[Table | tuple[Path, str]] = field(default_factory=list)  # tables, and pictures with titles
    record: dict[str, Any] = field(default_factory=dict)  # for JSON
    skipped: list[str] = field(default_factory=list)  # parts that could not be shown, and why

    @property
    def plain(self) -> bool:
        """Whether samples are pairs of image and target, and the task computes no steps itself."""
        return self.training.data.trial is None and isinstance(self.training.steps, Supervised)

    def lacks(self, part: str) -> str:
        """What a part needs, and this task or its data do not have; empty if it can be shown."""
        if part in ("layers", "inputs", "features") and not self.plain:
            return "needs pairs of image and target, and a task without steps of its own"
        never = not self.plain and not self.config.evaluate.test and never_evaluates(self.config)
        return "needs evaluations, and the run has none" if part == "errors" and never else ""

    @cached_property
    def flops(self) -> Flops:
        """Operations of the model."""
        return training_flops(self.training, self.training.state.position)

    @cached_property
    def layers(self) -> list[Layer]:
        """The modules of the model."""
        flops = self.flops
        return layers_of(self.training.model, example_input(self.training.data), flops.by_module, flops.samples)

    @cached_property
    def batch(self) -> Batch:
        """The first batch of the epoch that the state stands in, as a training step is given it."""
        return next(iter(self.training.data.train.loader.batches(self.training.state.position.epoch, 0, 1)))

    @cached_property
    def passed(self) -> ObservedPass:
        """The batch, forward and backward."""
        return pass_through(self.training, self.batch, self.config.tensors)

    @cached_property
    def weights(self) -> list[Summary]:
        """Every parameter."""
        return [summarize(name, weight) for name, weight in self.training.model.named_parameters()]

    def add_picture(self, path: Path, title: str) -> None:
        """Add a picture; an empty title says that there was nothing to draw."""
        if title:
            self.parts.append((path, title))

    def add_summaries(
        self,
        key: str,
        summaries: Sequence[Summary],
        title: str,
        *,
        more: tuple[str, Mapping[str, str]] | None = None,
        notes: Sequence[str] = (),
        marks: Mapping[str, str] | None = None,
    ) -> None:
        """Tensors as a table with a row for each, and as histograms.

        Args:
            key: of the record, and the name of the picture.
            summaries: of the tensors.
            title: of the table and the picture.
            more: title of a further column, and its cells by tensor.
            notes: lines above the table.
            marks: notes in the histograms by tensor.
        """
        self.record[key] = [dataclasses.asdict(each) for each in summaries]
        column, cells = more or ("", {})
        rows = [[*_cells(each), *([cells.get(each.name, "")] if column else [])] for each in summaries]
        if rows or notes:
            kind = "parameter" if key in ("weights", "gradients") else "output"
            columns = [kind, "shape", *_NUMBERS, *([column] if column else [])]
            self.parts.append(Table(title, columns, rows, notes))
        if rows:
            quantity = {"weights": "weight", "activations": "activation"}.get(key, "gradient")
            path = self.folder / f"{key}.png"
            self.add_picture(path, pictures.draw_histograms(summaries, marks or {}, quantity, title, path))


def _cells(each: Summary) -> list[str]:
    numbers = (each.mean, each.std, each.minimum, each.maximum, each.norm)
    strange = f"{each.not_finite:,}" if each.not_finite else ""
    return [each.name, shape_text(each.shape), *map(number, numbers), percent(each.zeros), strange]


def layers(found: Inspection) -> None:
    """Every module: what it is, what it gives, what it costs; all for one sample."""
    model, flops = found.training.model, found.flops
    found.record["layers"] = [dataclasses.asdict(layer) for layer in found.layers]
    found.record["totals"] = totals = {
        "parameters": sum(layer.parameters for layer in found.layers),
        "trainable": sum(layer.trainable for layer in found.layers),
        "weights_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "buffers_bytes": sum(buffer.nbytes for buffer in model.buffers()),
        "output_bytes": sum(layer.output_bytes for layer in found.layers),
        "flops_forward": flops.forward // flops.samples,
        "flops_training": flops.of_sample,
    }
    size = (totals["weights_bytes"] + totals["buffers_bytes"]) / 1e6
    found.lines += [
        f"{totals['parameters']:,} parameters, {totals['trainable']:,} trainable; {size:,.2f} MB with buffers",
        f"outputs of one sample {mib(totals['output_bytes'])} MiB",
        f"{compact(totals['flops_forward'])} FLOPs forward and {compact(totals['flops_training'])} in training, a sample",
    ]
    columns = ["layer", "type", "output", "parameters", "trainable", "FLOPs", "output KiB"]
    rows = [
        [
            layer.name or "(the model itself)",
            layer.kind,
            shape_text(layer.output) if layer.calls else "does not run",
            f"{layer.parameters:,}" if layer.parameters else "",
            f"{layer.trainable:,}" if layer.trainable else "",
            compact(layer.flops) if layer.flops else "",
            f"{layer.output_bytes / 1024:,.2f}" if layer.output_bytes else "",
        ]
        for layer in found.layers
        # A row does not count the modules inside, so rows without anything else are empty.
        if not layer.inner or layer.parameters or layer.flops
    ]
    counts = [f"{totals['parameters']:,}", f"{totals['trainable']:,}", compact(totals["flops_forward"])]
    rows.append(["total", "", "", *counts, f"{totals['output_bytes'] / 1024:,.2f}"])
    found.parts.append(Table("layers, for one sample", columns, rows))


def weights(found: Inspection) -> None:
    """The weights in numbers and histograms."""
    if found.weights:
        found.add_summaries("weights", found.weights, "weights")
    else:
        found.skipped.append("weights: the model has none")


def activations(found: Inspection) -> None:
    """Outputs of the modules for a training batch, and the units that give nothing."""
    passed = found.passed
    found.record["dead_units"] = {name: {"dead": dead, "units": units} for name, (dead, units) in passed.dead.items()}
    cells = {name: f"{dead:,} of {units:,}" for name, (dead, units) in passed.dead.items()}
    marks = {name: f"{percent(dead / units)} dead" for name, (dead, units) in passed.dead.items() if dead}
    notes = ["a dead unit is 0 for every sample of the batch and at every position"] if passed.dead else []
    title = f"activations of a training batch of {len(found.batch.indices):,}"
    more = ("dead units", cells)
    found.add_summaries("activations", passed.activations, title, more=more, notes=notes, marks=marks)


def gradients(found: Inspection) -> None:
    """Gradients of a training batch by the weights, relative to their size, and by the outputs."""
    passed, batch = found.passed, f"of a training batch of {len(found.batch.indices):,}"
    found.record |= {"loss": passed.loss, "without_gradient": passed.without, "frozen": passed.frozen}
    notes = [f"loss {number(passed.loss)}"]
    if passed.without:
        notes.append(f"no gradient reaches {', '.join(passed.without)}")
    if passed.frozen:
        notes.append(f"frozen: {', '.join(passed.frozen)}")
    norms = {weight.name: weight.norm for weight in found.weights}
    ratios = {each.name: number(each.norm / norms[each.name]) for each in passed.gradients if norms[each.name] > 0}
    title, more = f"gradients of the loss by the weights, {batch}", ("norm / weight's", ratios)
    found.add_summaries("gradients", passed.gradients, title, more=more, notes=notes)
    found.add_summaries("gradients_of_outputs", passed.flows, f"gradients of the loss by the outputs, {batch}")


def inputs(found: Inspection) -> None:
    """Samples of training as the model is given them, augmented."""
    count = found.config.samples
    images, targets = found.batch.images[:count], found.batch.targets[:count]
    path = found.folder / "inputs.png"
    found.add_picture(path, pictures.draw_inputs(images, targets, found.training.data, path))


def filters(found: Inspection) -> None:
    """The kernels that see the image."""
    path = found.folder / "filters.png"
    title = pictures.draw_filters(found.training.model, found.training.data, path)
    found.add_picture(path, title)
    if not title:
        found.skipped.append("filters: no layer has weights that lie over the image")


def features(found: Inspection) -> None:
    """Outputs of layers for a few images of the split that the config names, or of the training split."""
    names = found.config.tensors or outer_maps(found.layers)
    if not names:
        found.skipped.append("features: no layer gives maps; tensors=[...] names others")
        return
    data = found.training.data
    # Without a validation split, training images in evaluation mode are the next best.
    split = data.eval_split(found.config.split) or data.train_for_eval
    batch = next(iter(split.loader.batches(0, 0, 1)))
    drawn = pictures.draw_maps(found.training.model, batch, names, data, found.folder)
    found.parts += drawn
    if not drawn:
        found.skipped.append(f"features: nothing of {', '.join(names)} can be seen as maps")


def errors(found: Inspection) -> None:
    """The confusion matrix, and the most confident wrong predictions; without classes, the samples with the largest loss."""
    config, training = found.config, found.training
    classes = unique_names(training.data.classes)
    outputs = training.task.outputs(classes)
    split = split_of(training.data, config.split)
    # Without classes, or with over 2048 of them, the loss tells which samples are wrong
    if not found.plain or "confusion" not in training.task.tables(training.device) or len(classes) != outputs:
        _largest_losses(found, split)
        return
    confusion, surest = mistakes_in(training, split, outputs, limit=config.limit.eval_batches, most=config.samples)
    samples, matrix = int(confusion.sum()), confusion.tolist()
    wrong = samples - int(confusion.diag().sum())
    found.record["errors"] = {
        "split": config.split,
        "samples": samples,
        "wrong": wrong,
        "confusion": matrix,
        "surest": [
            {"index": m.index, "true": classes[m.true], "predicted": classes[m.predicted], "probability": m.probability}
            | {"file": path_of(training.data.parts[config.split][0], m.index)}
            for m in surest
        ],
    }
    rate = percent(wrong / max(1, samples))
    found.lines.append(f"{wrong:,} of {samples:,} {config.split} samples are predicted as another class ({rate})")
    title = f"{config.data.name} {config.split}, {samples:,} samples"
    path = found.folder / "confusion.png"
    confusion_matrix(matrix, classes, path, title)
    found.add_picture(path, title)
    if surest:
        title = f"{len(surest)} of {wrong:,} wrong predictions among {samples:,} samples, the most confident first"
        path = found.folder / "errors.png"
        found.add_picture(path, pictures.draw_errors(surest, title, classes, training.data, path))


def _largest_losses(found: Inspection, split: SplitData) -> None:
    """The samples with the largest loss, each evaluated by itself."""
    config, training = found.config, found.training
    worst: list[tuple[dict[str, Any], Batch]] = []
    with evaluating(training.model, training.loss):
        for batch in batches_of(split, config.limit.eval_batches):
            for data, indices in parts_of_rows(tuple(batch), len(batch.indices), len(batch.indices)):
                with training.precision.autocast():
                    evaluated = training.steps.evaluated(data)
                if "loss" not in evaluated:
                    why = "the evaluation_step of the task gives no loss"
                    if config.what:
                        raise UserError("what", f"names errors, and {why}", "other parts")
                    found.skipped.append(f"errors: {why}")
                    return
                index, loss = int(indices), float(evaluated["loss"])
                file = path_of(training.data.parts[config.split][0], index)
                worst.append(({"index": index, "loss": loss, "file": file}, Batch(data, indices)))
            # NaN is worse than all
            worst = sorted(worst, key=lambda each: -math.inf if math.isnan(each[0]["loss"]) else -each[0]["loss"])
            del worst[config.samples :]
        shown: list[Pixels] = []
        if hasattr(training.task, "predict_step") and hasattr(training.task, "draw"):
            drawing = Predictions(training.config, training.task, training.model, draws=True)
            with training.precision.autocast():
                drawn = [drawing(batch)[0]["picture"] for _, batch in worst]
            shown = [picture.permute(1, 2, 0).numpy() / 255 for picture in drawn]
        elif training.data.trial is None:
            shown = [image for _, batch in worst for image in pictures.pixels_of(batch.images, training.data)]
    found.record["errors"] = {"split": config.split, "largest": [each for each, _ in worst]}
    title = f"{len(worst)} samples of {config.data.name} {config.split} with the largest loss"
    texts = [[str(each["index"]), number(each["loss"]), each["file"] or ""] for each, _ in worst]
    found.parts.append(Table(title, ("index", "loss", "file"), texts))
    if shown:
        captions = [[f"loss {loss}", f"sample {index}"] for index, loss, _ in texts]
        image_grid(list(map(Tile, shown, captions)), found.folder / "errors.png", title)
        found.add_picture(found.folder / "errors.png", title)


def batches_of(split: SplitData, limit: int | None) -> Iterator[Batch]:
    """The batches of a split as it is evaluated."""
    count = math.ceil(split.samples / split.loader.batch_size)
    return split.loader.batches(0, 0, count if limit is None else min(count, limit))


def mistakes_in(
    training: Run, split: SplitData, classes: int, *, limit: int | None, most: int
) -> tuple[Tensor, list[pictures.Mistake]]:
    """Evaluate a split, with no more than a batch of images in memory.

    Returns:
        The number of samples by class and predicted class, int64 (C, C); and at most `most` mistakes, the surest first.
    """
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    surest: list[pictures.Mistake] = []
    with evaluating(training.model):
        for batch in batches_of(split, limit):
            with training.precision.autocast():
                logits = training.model(batch.images)
            probabilities, predicted = (largest.cpu() for largest in logits.float().softmax(dim=1).max(dim=1))
            true = class_numbers(training.task.targets(batch.targets)).cpu()
            confusion += torch.bincount(true * classes + predicted, minlength=classes * classes).view(classes, classes)
            for place in (predicted != true).nonzero().flatten().tolist():
                sure = float(probabilities[place])
                # Images are copied only of mistakes that are among the surest so far.
                if len(surest) < most or sure > surest[-1].probability:
                    image = batch.images[place].float().cpu().clone()
                    mistake = pictures.Mistake(
                        sure, int(batch.indices[place]), int(true[place]), int(predicted[place]), image
                    )
                    surest = sorted([*surest, mistake], key=lambda each: -each.probability)[:most]
    return confusion, surest


PARTS: dict[str, Callable[[Inspection], None]] = {
    "layers": layers,
    "weights": weights,
    "activations": activations,
    "gradients": gradients,
    "inputs": inputs,
    "filters": filters,
    "features": features,
    "errors": errors,
}
"""In the order in which they are shown."""
