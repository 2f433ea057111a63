"""The parts of an inspection: each adds tables, pictures and numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.build.model import example_input
from runner.build.run import Run, training_flops
from runner.config.errors import UserError
from runner.config.schema.verbs import Inspect
from runner.data.build import SplitData
from runner.data.loaders import Batch
from runner.instrument.flops import Flops
from runner.tracking.formats import percent
from runner.tracking.plots import confusion_matrix
from runner.verbs._checkpoint import unique_names
from runner.verbs.inspect import pictures, tables
from runner.verbs.inspect.errors import mistakes_in
from runner.verbs.inspect.layers import Anatomy, anatomy, outer_maps
from runner.verbs.inspect.observed_pass import Passed, pass_through
from runner.verbs.inspect.page import Table
from runner.verbs.inspect.statistics import Summary, summarize


@dataclass
class Inspection:
    """What was found so far, and what several parts need, computed when first used.

    Attributes:
        config: what to do.
        training: what is inspected.
        folder: where pictures go.
        lines: shown first.
        parts: tables, and pictures as (file, title), in order.
        record: for JSON.
        skipped: what could not be shown, and why.
    """

    config: Inspect
    training: Run
    folder: Path
    lines: list[str] = field(default_factory=list)
    parts: list[Table | tuple[Path, str]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @cached_property
    def flops(self) -> Flops:
        """Operations of the model."""
        return training_flops(self.training, self.training.state.position)

    @cached_property
    def anatomy(self) -> Anatomy:
        """The modules of the model."""
        flops = self.flops
        return anatomy(self.training.model, example_input(self.training.data), flops.by_module, flops.samples)

    @cached_property
    def batch(self) -> Batch:
        """The first batch of the epoch that the state stands in, as a training step is given it."""
        return next(iter(self.training.data.train.loader.batches(self.training.state.position.epoch, 0, 1)))

    @cached_property
    def passed(self) -> Passed:
        """The batch, forward and backward."""
        return pass_through(self.training, self.batch, self.config.tensors)

    @cached_property
    def weights(self) -> list[Summary]:
        """Every parameter."""
        return [summarize(name, weight) for name, weight in self.training.model.named_parameters()]

    def samples(self) -> tuple[Tensor, Tensor]:
        """Images and targets of the first samples of the split that the config names, or of the training split."""
        split = self.training.data.eval_split(self.config.split) or self.training.data.train_for_eval
        batch = next(iter(split.loader.batches(0, 0, 1)))
        return batch.images, batch.targets

    def add_picture(self, name: str, title: str) -> None:
        """Note a picture that was drawn."""
        self.parts.append((self.folder / name, title))


def split_of(config: Inspect, training: Run) -> SplitData:
    """The split that the config names.

    Raises:
        UserError: if the data has none.
    """
    split = training.data.eval_split(config.split)
    if split is None:
        there = [name for name in ("train", "val", "test") if training.data.eval_split(name) is not None]
        raise UserError("split", f"this data has no '{config.split}' split", f"{', '.join(there)}")
    return split


def _records(found: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in found]


def layers(found: Inspection) -> None:
    """Every module: what it is, what it gives, what it costs."""
    totals = tables.totals_of(found.anatomy, found.flops)
    found.lines += tables.totals_lines(totals)
    found.parts.append(tables.layers_table(found.anatomy, totals))
    found.record["totals"] = totals
    found.record["layers"] = _records(found.anatomy.layers)


def weights(found: Inspection) -> None:
    """The weights in numbers and histograms."""
    if not found.weights:
        found.skipped.append("weights: the model has none")
        return
    found.record["weights"] = _records(found.weights)
    found.parts.append(tables.weights_table(found.weights))
    title = "weights"
    pictures.draw_histograms(found.weights, {}, "weight", found.folder / "weights.png", title, logarithmic=False)
    found.add_picture("weights.png", title)


def activations(found: Inspection) -> None:
    """What modules give for a batch of training, and which units give nothing."""
    passed, size = found.passed, len(found.batch.images)
    found.record["activations"] = _records(passed.activations)
    found.record["dead_units"] = {name: {"dead": dead, "units": units} for name, (dead, units) in passed.dead.items()}
    found.parts.append(tables.activations_table(passed, size))
    if passed.activations:
        notes = {name: f"{percent(dead / units)} dead" for name, (dead, units) in passed.dead.items() if dead}
        title = f"activations of a training batch of {size:,}"
        target = found.folder / "activations.png"
        pictures.draw_histograms(passed.activations, notes, "activation", target, title, logarithmic=True)
        found.add_picture("activations.png", title)


def gradients(found: Inspection) -> None:
    """What a batch of training changes: gradients by the weights and by the outputs."""
    passed = found.passed
    found.record |= {
        "loss": passed.loss,
        "gradients": _records(passed.gradients),
        "gradients_of_outputs": _records(passed.flows),
        "without_gradient": passed.without,
        "frozen": passed.frozen,
    }
    found.parts += tables.gradients_tables(passed, {weight.name: weight.norm for weight in found.weights})
    for name, summaries, of in (
        ("gradients.png", passed.gradients, "weights"),
        ("gradients_of_outputs.png", passed.flows, "outputs"),
    ):
        if summaries:
            title = f"gradients of the loss by the {of}, of a training batch of {len(found.batch.images):,}"
            pictures.draw_histograms(summaries, {}, "gradient", found.folder / name, title, logarithmic=True)
            found.add_picture(name, title)


def inputs(found: Inspection) -> None:
    """Samples of training as the model is given them, augmented."""
    count = found.config.samples
    images, targets = found.batch.images[:count], found.batch.targets[:count]
    title = pictures.draw_inputs(images, targets, found.training.data, found.folder / "inputs.png")
    found.add_picture("inputs.png", title)


def filters(found: Inspection) -> None:
    """The kernels that see the image."""
    title = pictures.draw_filters(found.training.model, found.training.data, found.folder / "filters.png")
    if title:
        found.add_picture("filters.png", title)
    else:
        found.skipped.append("filters: no layer has weights that lie over the image")


def features(found: Inspection) -> None:
    """What layers make of a few images."""
    names = found.config.tensors or outer_maps(found.anatomy.layers)
    if not names:
        found.skipped.append("features: no layer gives maps; tensors=[...] names others")
        return
    images, targets = found.samples()
    model, splits = found.training.model, found.training.data
    drawn = pictures.draw_maps(model, images, targets, names, splits, found.folder)
    found.parts += drawn
    if not drawn:
        found.skipped.append(f"features: nothing of {', '.join(names)} can be seen as maps")


def errors(found: Inspection) -> None:
    """Where the model is wrong."""
    config, training = found.config, found.training
    classes = unique_names(training.data.classes)
    outputs = training.task.outputs(classes)
    if "confusion" not in training.task.tables(training.device) or len(classes) != outputs:
        if config.what is not None:
            raise UserError("what", "errors are those of classes, and this task has none", "the other parts")
        found.skipped.append("errors: the task has no classes")
        return
    mistakes = mistakes_in(training, split_of(config, training), outputs, config.limit.eval_batches, config.samples)
    found.record["errors"] = {
        "split": config.split,
        "samples": mistakes.samples,
        "wrong": mistakes.wrong,
        "confusion": mistakes.confusion,
        "surest": [
            {"index": m.index, "true": classes[m.true], "predicted": classes[m.predicted], "probability": m.probability}
            for m in mistakes.surest
        ],
    }
    share = percent(mistakes.wrong / max(1, mistakes.samples))
    found.lines.append(
        f"{mistakes.wrong:,} of {mistakes.samples:,} {config.split} samples are taken for another class ({share})"
    )
    title = f"{config.data.name} {config.split}, {mistakes.samples:,} samples"
    confusion_matrix(mistakes.confusion, classes, found.folder / "confusion.png", title)
    found.add_picture("confusion.png", title)
    if mistakes.surest:
        shown = pictures.draw_errors(
            mistakes.surest, classes, mistakes.wrong, mistakes.samples, training.data, found.folder / "errors.png"
        )
        found.add_picture("errors.png", shown)


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
