"""The tables of `inspect`, and the same as plain containers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.instrument.flops import Flops
from runner.tracking.formats import compact, number, percent
from runner.verbs.inspect.layers import Anatomy, shape_text
from runner.verbs.inspect.observed_pass import Passed
from runner.verbs.inspect.page import Table
from runner.verbs.inspect.statistics import Summary

_MIB = 2**20


def layers_table(anatomy: Anatomy, totals: dict[str, Any]) -> Table:
    """A row for each module with parameters or operations besides those of modules inside; the sum is the model."""
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
        for layer in anatomy.layers
        if layer.listed
    ]
    rows.append(
        [
            "total",
            "",
            "",
            f"{totals['parameters']:,}",
            f"{totals['trainable']:,}",
            compact(totals["flops_forward"]),
            f"{totals['output_bytes'] / 1024:,.2f}",
        ]
    )
    columns = ["layer", "type", "output", "parameters", "trainable", "FLOPs", "output KiB"]
    return Table("layers, for one sample", columns, rows)


def totals_of(anatomy: Anatomy, flops: Flops) -> dict[str, Any]:
    """The model in a few numbers; operations and bytes are of one sample."""
    return {
        "parameters": sum(layer.parameters for layer in anatomy.layers),
        "trainable": sum(layer.trainable for layer in anatomy.layers),
        "weights_bytes": anatomy.weights_bytes,
        "buffers_bytes": anatomy.buffers_bytes,
        "output_bytes": sum(layer.output_bytes for layer in anatomy.layers),
        "flops_forward": flops.forward // flops.samples,
        "flops_training": flops.of_sample,
    }


def totals_lines(totals: dict[str, Any]) -> list[str]:
    """The same in words."""
    size = (totals["weights_bytes"] + totals["buffers_bytes"]) / 1e6
    return [
        f"{totals['parameters']:,} parameters, {totals['trainable']:,} trainable; {size:,.2f} MB with buffers",
        f"outputs of one sample {totals['output_bytes'] / _MIB:,.2f} MiB",
        f"{compact(totals['flops_forward'])} FLOPs forward and {compact(totals['flops_training'])} in training, a sample",
    ]


_NUMBERS = ("mean", "std", "min", "max", "norm", "zeros", "not finite")


def _numbers(summary: Summary) -> list[str]:
    numbers = [summary.mean, summary.std, summary.minimum, summary.maximum, summary.norm]
    strange = f"{summary.not_finite:,}" if summary.not_finite else ""
    return [*(number(value) for value in numbers), percent(summary.zeros), strange]


def weights_table(weights: Sequence[Summary]) -> Table:
    """A row for each parameter."""
    rows = [[each.name, shape_text(each.shape), *_numbers(each)] for each in weights]
    return Table("weights", ["parameter", "shape", *_NUMBERS], rows)


def activations_table(passed: Passed, samples: int) -> Table:
    """A row for each output of a module."""
    rows = []
    for each in passed.activations:
        dead = passed.dead.get(each.name)
        share = f"{dead[0]:,} of {dead[1]:,}" if dead else ""
        rows.append([each.name, shape_text(each.shape), *_numbers(each), share])
    columns = ["output", "shape", *_NUMBERS, "dead units"]
    notes = ["a dead unit is 0 for every sample of the batch and at every place"] if passed.dead else []
    return Table(f"activations of a training batch of {samples:,}", columns, rows, notes)


def gradients_tables(passed: Passed, norms: dict[str, float]) -> list[Table]:
    """Gradients by the weights, with their size relative to the weight, and by the outputs."""
    rows = [
        [
            each.name,
            shape_text(each.shape),
            *_numbers(each),
            number(each.norm / norms[each.name]) if norms[each.name] > 0 else "",
        ]
        for each in passed.gradients
    ]
    notes = [f"loss {number(passed.loss)}"]
    if passed.without:
        notes.append(f"no gradient reaches {', '.join(passed.without)}")
    if passed.frozen:
        notes.append(f"frozen: {', '.join(passed.frozen)}")
    columns = ["parameter", "shape", *_NUMBERS, "norm / weight's"]
    tables = [Table("gradients by the weights", columns, rows, notes)]
    if passed.flows:
        rows = [[each.name, shape_text(each.shape), *_numbers(each)] for each in passed.flows]
        tables.append(Table("gradients by the outputs", ["output", "shape", *_NUMBERS], rows))
    return tables
