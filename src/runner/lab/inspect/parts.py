"""The parts of an inspection: each shows tables, draws pictures, and returns what `inspect.json` says of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.config.schema.verbs import Inspect
from runner.data.bad_samples import path_of
from runner.data.loaders import Batch
from runner.data.module import SplitData
from runner.engine.metrics import class_numbers
from runner.instrument.nested import parts_of_rows
from runner.instrument.no_trace import evaluating
from runner.instrument.observer import Observer
from runner.lab.inspect.numbers import Numbers, Pass, layers_of, numbers_of, pass_through
from runner.models.features import listener
from runner.run.evaluation import Predictions, pixels_of, with_pixels
from runner.run.from_checkpoint import split_of, unique_names
from runner.run.model import example_input
from runner.run.run import Run, training_flops
from runner.tracking.formats import amount, compact, number, percent
from runner.tracking.plots import Pixels, Tile, caption_of, confusion_matrix, image_grid
from runner.tracking.verb_report import Report, mib

_CHANNELS, _ROWS = 8, 4  # of a grid of activations
_LONGEST = 60  # letters of a layer in the name of a file: four bytes each at most, and 255 are allowed


@dataclass
class Inspection:
    """What is inspected, and what several parts need, computed when first used."""

    config: Inspect
    training: Run
    folder: Path  # where pictures go
    report: Report
    plain: bool  # whether samples are pairs of image and target, and the task computes no steps itself
    files: list[Path] = field(default_factory=list)  # pictures that are drawn

    @cached_property
    def batch(self) -> Batch:
        """The first batch of the epoch that the state stands in, as a training step is given it."""
        return next(iter(self.training.data.train.loader.batches(self.training.state.position.epoch, 0, 1)))

    @cached_property
    def passed(self) -> Pass:
        """This batch, forward and backward."""
        return pass_through(self.training, self.batch, self.config.tensors)

    def numbers(
        self, kind: str, title: str, found: Mapping[str, Numbers], sizes: Mapping[str, float] | None = None
    ) -> list[dict[str, Any]]:
        """Show tensors with a row for each, and its norm as a share of `sizes`; returns them for JSON."""
        columns = [kind, "shape", "mean", "std", "min", "max", "norm", "zeros", "not finite"]
        rows = []
        for name, each in found.items():
            values = [*map(number, each[1:6]), percent(each.zeros), f"{each.not_finite:,}" if each.not_finite else ""]
            share = [] if sizes is None else [number(each.norm / sizes[name]) if sizes[name] > 0 else ""]
            rows.append([name, shape_text(each.shape), *values, *share])
        if rows:
            title += f" of a training batch of {len(self.batch.indices):,}"
            self.report.table(title, columns if sizes is None else [*columns, "norm / weight's"], rows)
        return [{"name": name, **each._asdict()} for name, each in found.items()]

    def grid(self, tiles: Sequence[Tile], name: str, title: str, columns: int | None = None) -> None:
        """Draw a picture."""
        self.files.append(self.folder / f"{name}.png")
        image_grid(tiles, self.files[-1], title, columns)

    def record_of(self, index: Tensor, **found: Any) -> dict[str, Any]:
        """What is said of a sample of the split: its index, what was found, and its file if its data set names files."""
        file = path_of(self.training.data.parts[self.config.split][0], int(index))
        return {"index": int(index), **found, "file": file}

    def pixels_of(self, images: Tensor) -> list[Pixels]:
        """Images (B, C, H, W) as the model is given them, with the normalisation undone: (H, W, 3), uint8.

        Of images with more channels the first three, of those with two the first.
        """
        return pixels_of(with_pixels([images.detach().cpu()], self.training.config)[0])


def layers(seen: Inspection) -> dict[str, Any]:
    """Every module: what it is, what it gives, what it costs; all for one sample."""
    training, model = seen.training, seen.training.model
    flops = training_flops(training, training.state.position)
    found = layers_of(model, example_input(training.data), flops.by_module, flops.samples)
    totals = {name: sum(layer[name] for layer in found) for name in ("parameters", "trainable", "output_bytes")}
    totals["weights_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    totals["buffers_bytes"] = sum(buffer.nbytes for buffer in model.buffers())
    totals |= {"flops_forward": flops.forward // flops.samples, "flops_training": flops.of_sample}
    parameters, trainable = (f"{totals[name]:,}" for name in ("parameters", "trainable"))
    forward, size = compact(totals["flops_forward"]), (totals["weights_bytes"] + totals["buffers_bytes"]) / 1e6
    seen.report.lines(
        f"{parameters} parameters, {trainable} trainable; {size:,.2f} MB with buffers",
        f"outputs of one sample {mib(totals['output_bytes'])} MiB",
        f"{forward} FLOPs forward and {compact(totals['flops_training'])} in training, a sample",
    )
    rows = [
        [
            layer["name"] or "(the model itself)",
            layer["kind"],
            shape_text(layer["output"]) if layer["calls"] else "does not run",
            *(f"{layer[name]:,}" if layer[name] else "" for name in ("parameters", "trainable")),
            compact(layer["flops"]) if layer["flops"] else "",
            f"{layer['output_bytes'] / 1024:,.2f}" if layer["output_bytes"] else "",
        ]
        for layer in found
        # A row does not count the modules inside, so rows without anything else are empty
        if not layer["inner"] or layer["parameters"] or layer["flops"]
    ]
    rows.append(["total", "", "", parameters, trainable, forward, f"{totals['output_bytes'] / 1024:,.2f}"])
    columns = ["layer", "type", "output", "parameters", "trainable", "FLOPs", "output KiB"]
    seen.report.table("layers, for one sample", columns, rows)
    return {"layers": found, "totals": totals}


def activations(seen: Inspection) -> dict[str, Any]:
    """Outputs of the modules for a training batch."""
    return {"activations": seen.numbers("output", "activations", seen.passed.activations)}


def gradients(seen: Inspection) -> dict[str, Any]:
    """Gradients of a training batch by the weights, relative to their size, and by the outputs."""
    passed = seen.passed
    seen.report.line(f"loss {number(passed.loss)}")
    for title, names in (("no gradient reaches ", passed.without), ("frozen: ", passed.frozen)):
        seen.report.lines(*([title + ", ".join(names)] if names else []))
    norms = {name: numbers_of(weight).norm for name, weight in seen.training.model.named_parameters()}
    rows = seen.numbers("parameter", "gradients of the loss by the weights", passed.gradients, norms)
    return {
        "loss": passed.loss,
        "without_gradient": passed.without,
        "frozen": passed.frozen,
        "gradients": [row | {"weight_norm": norms[row["name"]]} for row in rows],
        "gradients_of_outputs": seen.numbers("output", "gradients of the loss by the outputs", passed.flows),
    }


def inputs(seen: Inspection) -> dict[str, Any]:
    """Samples of training as the model is given them, augmented."""
    images, targets = (each[: seen.config.samples] for each in (seen.batch.images, seen.batch.targets))
    three = " three" if images.shape[1] > 3 else ""
    first = "" if images.shape[1] in (1, 3) else f", first{three} of {images.shape[1]} channels"
    title = f"{amount(len(images), 'training sample')} as the model sees them, normalisation undone"
    title += f" ({shape_text(images.shape[1:])}{first})"
    captions = [caption_of(target, seen.training.data.classes) for target in targets.cpu()]
    seen.grid(list(map(Tile, seen.pixels_of(images), captions)), "inputs", title)
    return {}


def features(seen: Inspection) -> dict[str, Any]:
    """A grid of what each layer makes of a few images of the split that the config names, or of the training split."""
    data, model, names = seen.training.data, seen.training.model, seen.config.tensors
    # Without a validation split, training images in evaluation mode are the next best
    batch = next(iter((data.eval_split(seen.config.split) or data.train_for_eval).loader.batches(0, 0, 1)))
    images, drawn = batch.images[:_ROWS], dict[str, Tensor]()

    def take(name: str, output: Tensor) -> None:
        if (maps := maps_of(output)) is not None:
            if not names:  # the last layer alone
                drawn.clear()
            drawn[name] = maps

    def take_any(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if name and isinstance(output, Tensor):
            take(name, output)

    with evaluating(model), Observer(model, after=take_any, names=[] if names else None):
        (listener(model, names, take, "tensors") if names else model)(images)
    flat = ", ".join(name for name in names if name not in drawn)
    if flat or not drawn:
        why = f"no output of {flat or 'any layer'} can be seen as maps"
        seen.report.line(f"features: no picture, because {why}")
    captions = [caption_of(target, data.classes)[:1] for target in batch.targets[:_ROWS].cpu()]
    pictures = list(map(Tile, seen.pixels_of(images), captions))
    for name, maps in drawn.items():
        spread = maps.transpose(0, 1).flatten(1).std(dim=1, correction=0)
        channels = spread.topk(min(_CHANNELS, len(spread))).indices.sort().values.tolist()
        chosen = maps[:, channels]
        low, high = float(chosen.min()), float(chosen.max())
        shades = ((chosen - low) / max(high - low, 1e-12)).numpy()
        names_below, tiles = [[f"channel {channel}"] for channel in channels], list[Tile]()
        for picture, values in zip(pictures, shades, strict=True):
            tiles += [picture, *map(Tile, values, names_below)]
        title = f"{name}: {len(channels)} of {maps.shape[1]} channels that vary most, {shape_text(maps.shape[2:])}; "
        title += f"black is {number(low)}, white is {number(high)}"
        # An untrusted file may have named the modules, and a name must not lead to another folder
        plain = re.sub(r"[^\w.-]", "_", name)[:_LONGEST]
        seen.grid(tiles, f"features_{plain}", title, 1 + len(channels))
    return {}


def errors(seen: Inspection) -> dict[str, Any]:
    """The confusion matrix, and the most confident wrong predictions; without classes, the samples with the largest loss."""
    config, training = seen.config, seen.training
    split, classes = split_of(training.data, config.split), unique_names(training.data.classes)
    outputs = training.task.outputs(classes)
    # Without classes, or with over 2048 of them, the loss tells which samples are wrong
    if not seen.plain or "confusion" not in training.task.tables(training.device) or len(classes) != outputs:
        return _largest_losses(seen, split)
    confusion = torch.zeros(outputs, outputs, dtype=torch.int64)
    surest: list[tuple[dict[str, Any], Tensor]] = []  # with the image (C, H, W) as the model was given it
    with evaluating(training.model):
        for batch in batches_of(split, config.limit.eval_batches):
            with training.precision.autocast():
                logits = training.model(batch.images)
            probabilities, predicted = (largest.cpu() for largest in logits.float().softmax(dim=1).max(dim=1))
            true = class_numbers(training.task.targets(batch.targets)).cpu()
            confusion += torch.bincount(true * outputs + predicted, minlength=outputs * outputs).view(outputs, outputs)
            for place in (predicted != true).nonzero().flatten().tolist():
                names = {"true": classes[int(true[place])], "predicted": classes[int(predicted[place])]}
                record = seen.record_of(batch.indices[place], **names, probability=float(probabilities[place]))
                surest.append((record, batch.images[place]))
            surest = sorted(surest, key=lambda each: -each[0]["probability"])[: config.samples]
            surest = [(record, image.float().cpu().clone()) for record, image in surest]  # not the whole batch
    samples, wrong = int(confusion.sum()), int(confusion.sum() - confusion.diag().sum())
    rate = percent(wrong / max(1, samples))
    seen.report.line(f"{wrong:,} of {samples:,} {config.split} samples are predicted as another class ({rate})")
    seen.files.append(seen.folder / "confusion.png")
    title = f"{config.data.name} {config.split}, {samples:,} samples"
    confusion_matrix(confusion.tolist(), classes, seen.files[-1], title)
    if surest:
        pixels = seen.pixels_of(torch.stack([image for _, image in surest]))
        tiles = []
        for picture, (of, _) in zip(pixels, surest, strict=True):
            lines = [f"is {of['true']}", f"taken for {of['predicted']}", f"at {percent(of['probability'])}"]
            tiles.append(Tile(picture, lines, ["#228833", "#bb3344"]))
        title = f"{len(surest)} of {wrong:,} wrong predictions among {samples:,} samples, the most confident first"
        seen.grid(tiles, "errors", title)
    found = {"split": config.split, "samples": samples, "wrong": wrong, "confusion": confusion.tolist()}
    return {"errors": found | {"surest": [record for record, _ in surest]}}


def _largest_losses(seen: Inspection, split: SplitData) -> dict[str, Any]:
    """The samples with the largest loss, each evaluated by itself."""
    config, training = seen.config, seen.training
    worst: list[tuple[dict[str, Any], Batch]] = []
    with evaluating(training.model, training.loss), training.precision.autocast():
        for batch in batches_of(split, config.limit.eval_batches):
            for data, indices in parts_of_rows(tuple(batch), len(batch.indices), len(batch.indices)):
                evaluated = training.steps.evaluated(data)
                if "loss" not in evaluated:
                    why = "the evaluation_step of the task gives no loss"
                    if config.what:
                        raise UserError("what", f"names errors, and {why}", "other parts")
                    seen.report.line(f"errors: {why}")
                    return {}
                worst.append((seen.record_of(indices, loss=float(evaluated["loss"])), Batch(data, indices)))
            # NaN is worse than all
            worst = sorted(worst, key=lambda each: -math.inf if math.isnan(each[0]["loss"]) else -each[0]["loss"])
            del worst[config.samples :]
        shown: list[Pixels] = []
        if hasattr(training.task, "predict_step") and hasattr(training.task, "draw"):
            drawing = Predictions(training.config, training.task, training.model, True, training.data.classes)
            shown = pixels_of(drawing(batch)[0]["picture"] for _, batch in worst)
        elif training.data.pairs:
            shown = [image for _, batch in worst for image in seen.pixels_of(batch.images)]
    title = f"{len(worst)} samples of {config.data.name} {config.split} with the largest loss"
    rows = [[str(each["index"]), number(each["loss"]), each["file"] or ""] for each, _ in worst]
    seen.report.table(title, ["index", "loss", "file"], rows)
    if shown:
        seen.grid(list(map(Tile, shown, [[f"loss {row[1]}", f"sample {row[0]}"] for row in rows])), "errors", title)
    return {"errors": {"split": config.split, "largest": [each for each, _ in worst]}}


def batches_of(split: SplitData, limit: int | None) -> Iterator[Batch]:
    """The batches of a split as it is evaluated."""
    count = len(split.loader)
    return split.loader.batches(0, 0, count if limit is None else min(count, limit))


def shape_text(shape: Sequence[int] | None) -> str:
    """`32x8x8`; `scalar` for no axes; empty for None."""
    return "" if shape is None else "x".join(map(str, shape)) or "scalar"


def maps_of(outputs: Tensor) -> Tensor | None:
    """Outputs (B, C, H, W), or of tokens (B, N, C) on a square, perhaps after a class token, as such; 0 where not finite."""
    if outputs.ndim == 3 and outputs.shape[1] - (side := math.isqrt(outputs.shape[1])) ** 2 < 2:
        outputs = outputs[:, -side * side :].transpose(1, 2).reshape(len(outputs), -1, side, side)
    if outputs.ndim != 4 or outputs.shape[2:].numel() == 1:
        return None
    return outputs.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)


PARTS: dict[str, Callable[[Inspection], dict[str, Any]]] = {
    part.__name__: part for part in (layers, activations, gradients, inputs, features, errors)
}
"""In the order in which they are shown."""
