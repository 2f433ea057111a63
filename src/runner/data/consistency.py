"""Checks that the splits of a data set agree with each other and with their attributes.

All targets are checked if they are known without reading samples; only a few images are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError
from runner.config.schema.sections import Normalize
from runner.data.sampler import Indices
from runner.data.samples import SampleTransform, SeededDataset, as_tensor
from runner.data.splits import targets_of

_SHOWN = 5  # names of classes in a message
_READ = 8  # float images of a split that are read for their range of values
_OTHER_SCALE = 10  # times the largest value of another split
_COLOURS = (1, 3, 4)  # sizes of the last dimension if channels come last

Parts = Mapping[str, tuple[Dataset[Any], Indices]]
"""For each split the data set that it is read from, and its samples in it."""
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
        listed = targets[index]
        if listed.shape == read.shape and torch.allclose(listed.double(), read.double(), equal_nan=True):
            known[name] = targets
        elif getattr(dataset, "target_transform", None) is None:
            warnings.append(
                f"data.dataset: its attribute targets has {listed.tolist()} for sample {index} of '{name}', and the sample "
                f"itself {read.tolist()}: stratified splits and class weights follow the attribute; make them agree"
            )
    return known, warnings


def check_classes(parts: Parts, classes: Sequence[str], known: Mapping[str, Tensor]) -> list[str]:
    """Warnings about names of classes, and about classes without samples.

    Raises `UserError` if a class has different numbers in two splits. `classes` is empty for regression.
    """
    train = parts["train"][0]
    for name, (dataset, _) in parts.items():
        theirs = [] if dataset is train else [str(label) for label in getattr(dataset, "classes", None) or ()]
        for number, (one, other) in enumerate(zip(classes, theirs, strict=False)):
            if one != other:
                problem = f"class {number} is '{other}' in '{name}' and '{one}' in 'train', so class numbers differ in meaning"
                raise UserError("data.dataset", problem, "the same classes in the same order in every split")
    return _same_names(classes) + _without_samples(parts, classes, known)


def _same_names(classes: Sequence[str]) -> list[str]:
    if len(set(classes)) == len(classes):
        return []
    first = {name: number for number, name in reversed(list(enumerate(classes)))}
    twins = [(first[name], number, name) for number, name in enumerate(classes) if first[name] != number]
    one, other, name = twins[0]
    more = f", and {len(twins) - 1} more share their name with another" if len(twins) > 1 else ""
    return [f"data.dataset: classes {one} and {other} are both called '{name}'{more}: give them different names"]


def _without_samples(parts: Parts, classes: Sequence[str], known: Mapping[str, Tensor]) -> list[str]:
    warnings = []
    for name, targets in known.items():
        dataset, indices = parts[name]
        # A small split that was taken from another need not have samples of every class.
        if not classes or targets.ndim != 1 or (name != "train" and dataset is parts["train"][0]):
            continue
        numbers = targets[indices[:]].long()
        within = numbers[(numbers >= 0) & (numbers < len(classes))]
        empty = (torch.bincount(within, minlength=len(classes)) == 0).nonzero()[:, 0].tolist()
        if empty:
            names = ", ".join(f"'{classes[number]}' ({number})" for number in empty[:_SHOWN])
            what = "class" if len(empty) == 1 else f"{len(empty)} classes"
            more = ", ..." if len(empty) > _SHOWN else ""
            consequence = "it is never learned" if name == "train" else f"metrics of '{name}' do not measure it"
            warnings.append(
                f"data.dataset: '{name}' has no sample of the {what} {names}{more}: {consequence}; add samples, or correct "
                "the names of the classes"
            )
    return warnings


def check_images(
    parts: Parts, examples: Examples, transforms: Sequence[SampleTransform], normalize: Normalize
) -> list[str]:
    """Warnings about channels, dtype and range of values of the images; a few float images of each split are read.

    `examples` are the first samples as they are evaluated, with `transforms`. Raises `UserError` if the images of one split
    cannot be used with those of another.
    """
    first = examples["train"][0]
    channels, height, width = first.shape
    warnings = []
    if width in _COLOURS and channels > max(_COLOURS) and height > max(_COLOURS):
        warnings.append(
            f"data.dataset: images of 'train' have shape {tuple(first.shape)}, read as {channels} channels of "
            f"{height}x{width}: if the channels come last, give image.permute(2, 0, 1)"
        )
    for name, (image, _) in examples.items():
        if image.shape[0] != channels:
            problem = f"images of '{name}' have {image.shape[0]} channels, and those of 'train' {channels}"
            raise UserError("data.dataset", problem, "images with the same channels in every split")
    if all(image.dtype == torch.uint8 for image, _ in examples.values()):
        return warnings
    ranges = {name: _range(name, *part, examples[name][0], transforms) for name, part in parts.items()}
    kinds = {name: str(image.dtype).removeprefix("torch.") for name, (image, _) in examples.items()}
    for one, other in itertools.permutations(parts, 2):
        low, high = ranges[one]
        if kinds[other] == "uint8" != kinds[one] and (low < 0 or high > 1):
            raise UserError(
                "data.dataset",
                f"images of '{one}' are {kinds[one]} with values from {low:g} to {high:g}, and those of '{other}' uint8, "
                "which are divided by 255",
                "uint8 in every split, or floats from 0 to 1",
            )
        size, usual = (max(abs(end) for end in ranges[name]) for name in (one, other))
        if size > _OTHER_SCALE * usual > 0 and "train" in (one, other):
            warnings.append(
                f"data.dataset: images of '{one}' have values up to {size:g}, and those of '{other}' up to {usual:g}: give "
                "all splits the same scale, such as floats from 0 to 1"
            )
    high = ranges["train"][1]
    if kinds["train"] != "uint8" and high > _OTHER_SCALE and normalize.mean is not None and max(normalize.mean) <= 1:
        warnings.append(
            f"data.dataset: images of 'train' have values up to {high:g}, and data.normalize is for values from 0 to 1: "
            "divide the images by 255, or give uint8"
        )
    return warnings


def _range(
    name: str, dataset: Dataset[Any], indices: Indices, example: Tensor, transforms: Sequence[SampleTransform]
) -> tuple[float, float]:
    """The extreme values of a few images of a split; 0 and 1 for uint8, which is divided by 255.

    Raises `UserError` if an image of an evaluated split is not finite.
    """
    if example.dtype == torch.uint8:
        return 0.0, 1.0
    seeded, count = SeededDataset(dataset, 0, transforms, split=name), min(_READ, len(indices))
    ends: list[float] = []
    for place in range(count):
        index = int(indices[place * (len(indices) - 1) // max(1, count - 1)])
        try:
            image = as_tensor(seeded[0, index][0]).float()
        except UserError:  # reported when it is used, or skipped
            continue
        finite = image[image.isfinite()]
        if name != "train" and finite.numel() < image.numel():
            problem = f"sample {index} of '{name}' has pixels that are not finite"
            raise UserError("data.dataset", problem, "images of finite numbers; correct this one, or remove it")
        if finite.numel():
            ends += [float(finite.min()), float(finite.max())]
    return (min(ends), max(ends)) if ends else (0.0, 1.0)


def not_finite(batches: Any, name: str) -> str:
    """A sentence on the first sample of a split with a pixel or target that is not finite; empty if there is none."""
    for images, targets, indices in batches:
        for what, values in (("pixels", images), ("a target", targets)):
            wrong = (~values.isfinite()).flatten(1).any(1) if values.ndim > 1 else ~values.isfinite()
            if bool(wrong.any()):
                index = int(indices[wrong.nonzero()[0, 0]])
                verb = "are" if what == "pixels" else "is"
                return f"sample {index} of '{name}' has {what} that {verb} not finite: correct it, or remove it"
    return ""
