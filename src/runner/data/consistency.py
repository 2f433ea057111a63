"""Checks that the splits of a data set agree with each other and with their attributes.

All targets are checked if they are known without reading samples, and the first image of each split; `check` looks at more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.data.loaders import Batch
from runner.data.sources.listing import in_two_splits
from runner.data.splits import Parts, groups_of, targets_of
from runner.instrument.nested import fields_of

Examples = Mapping[str, tuple[Tensor, Tensor]]
"""For each split the image and the target of its first sample."""


def known_targets(
    parts: Parts, sources: Mapping[str, Dataset[Any]], examples: Examples
) -> tuple[dict[str, Tensor], list[str]]:
    """The targets of all samples, (N, ...) for each split where the attribute `targets` agrees with its first sample; warnings.

    `sources` are what is read instead of the data sets. Raises `UserError` if the attribute has another length.
    """
    known, warnings = {}, []
    for name, (dataset, indices) in parts.items():
        targets, index, read = targets_of(sources[name]), int(indices[0]), examples[name][1]
        if targets is None:
            continue
        samples = len(dataset)  # type: ignore[arg-type]
        if targets.ndim == 0 or len(targets) != samples:
            count = "one entry" if targets.ndim == 0 else f"{len(targets)} entries"
            problem = f"its attribute targets has {count} for {samples} samples of '{name}'"
            raise UserError("data.dataset", problem, "one target for each sample, or no such attribute")
        # One sample tells whether the attribute is in the order of the samples.
        listed = targets[index]
        if listed.shape == read.shape and torch.allclose(listed.double(), read.double(), equal_nan=True):
            known[name] = targets
        elif getattr(dataset, "target_transform", None) is None:
            warnings.append(
                f"data.dataset: its attribute targets has {listed.tolist()} for sample {index} of '{name}', and the sample "
                f"itself {read.tolist()}: stratified splits and class weights follow the attribute; make them agree"
            )
    return known, warnings


def check_classes(parts: Parts, classes: Sequence[str]) -> None:
    """Raise `UserError` if a class has different numbers in two splits. `classes` is empty for regression."""
    for name, (dataset, _) in parts.items():
        theirs = [str(label) for label in getattr(dataset, "classes", None) or ()]
        for number, (one, other) in enumerate(zip(classes, theirs, strict=False)):
            if one != other:
                problem = f"class {number} is '{other}' in '{name}' and '{one}' in 'train'"
                raise UserError("data.dataset", problem, "the same classes in the same order in every split")


def class_counts(targets: Tensor, classes: int) -> Tensor:
    """Samples of each class, int64 (classes,); targets that are not class numbers, which the task refuses, do not count."""
    numbers = targets.long()
    return torch.bincount(numbers[(numbers >= 0) & (numbers < classes)], minlength=classes)


def check_images(examples: Examples) -> None:
    """Raise `UserError` if the images of one split cannot be used with those of another, by the first one of each."""
    first, _ = examples["train"]
    for name, (image, _) in examples.items():
        if len(image) != len(first):
            problem = f"images of '{name}' have {len(image)} channels, and those of 'train' {len(first)}"
            raise UserError("data.dataset", problem, "images with the same channels in every split")
    # Bytes are divided by 255 and floats are not, so splits of both kinds agree only if the floats end at 1.
    of_bytes = next((name for name, (image, _) in examples.items() if image.dtype == torch.uint8), None)
    for name, (image, _) in examples.items():
        low, high = float(image.min()), float(image.max())
        if of_bytes is not None and image.is_floating_point() and (low < 0 or high > 1):
            problem = f"images of '{name}' are {image.dtype} with values from {low:g} to {high:g}"
            problem += f", and those of '{of_bytes}' uint8, which are divided by 255"
            raise UserError("data.dataset", problem, "uint8 in every split, or floats from 0 to 1")


def shared_groups(parts: Parts, group: str) -> list[str]:
    """Warnings about groups (see `groups_of`) that are in two splits."""
    groups: dict[str, list[str]] = {}
    for name, (dataset, indices) in parts.items():
        try:
            labels = groups_of(dataset, group)
        except UserError as error:  # a test set that comes with the data need not name groups
            problem = error.args[0].splitlines()[0]
            return [f"whether groups are in '{name}' and in another split is not known: {problem}"]
        groups[name] = [labels[index] for index in indices[:].tolist()]
    return [f"data.split.group: {warning}" for warning in in_two_splits("group", groups)]


def not_finite(batches: Iterable[Batch], name: str) -> str:
    """A sentence on the first sample of a split with a number that is not finite; empty if there is none."""
    known = {"images": "pixels that are", "targets": "a target that is"}
    for batch in batches:
        for field, values in fields_of(batch.data).items():
            if not values.is_floating_point() or values.shape[:1] != batch.indices.shape:
                continue
            wrong = (~values.isfinite()).reshape(len(values), -1).any(1)
            if bool(wrong.any()):
                index = int(batch.indices[wrong.nonzero()[0, 0]])
                what = known.get(field, f"a value in '{field}' that is")
                return f"sample {index} of '{name}' has {what} not finite: correct it, or remove it"
    return ""
