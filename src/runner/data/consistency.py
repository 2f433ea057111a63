"""Checks that the splits of a data set agree with each other and with their attributes.

All targets are checked if they are known without reading samples; only a few images are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError
from runner.config.schema.sections import Normalize
from runner.data.num_workers import spread_places
from runner.data.sampler import Indices
from runner.data.samples import SampleTransform, SeededDataset, as_tensor
from runner.data.sources.arrays import ImageArrays
from runner.data.splits import Parts, groups_of, targets_of

_SHOWN = 5  # names of classes in a message
_READ = 8  # float images of a split that are read for their range of values
_OTHER_SCALE = 10  # times the largest value of another split
_COLOURS = (1, 3, 4)  # sizes of the last dimension if channels come last

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
    train, warnings = parts["train"][0], []
    for name, (dataset, _) in parts.items():
        theirs = [] if dataset is train else [str(label) for label in getattr(dataset, "classes", None) or ()]
        for number, (one, other) in enumerate(zip(classes, theirs, strict=False)):
            if one != other:
                problem = f"class {number} is '{other}' in '{name}' and '{one}' in 'train', so class numbers differ in meaning"
                raise UserError("data.dataset", problem, "the same classes in the same order in every split")
    first = {name: number for number, name in reversed(list(enumerate(classes)))}
    if twins := [(first[name], number, name) for number, name in enumerate(classes) if first[name] != number]:
        number, twin, name = twins[0]
        more = f", and {len(twins) - 1} more share their name with another" if len(twins) > 1 else ""
        warnings.append(
            f"data.dataset: classes {number} and {twin} are both called '{name}'{more}: give them different names"
        )
    for name, targets in known.items():
        dataset, indices = parts[name]
        # A small split that was taken from another need not have samples of every class.
        if not classes or targets.ndim != 1 or (name != "train" and dataset is train):
            continue
        if empty := (class_counts(targets[indices[:]], len(classes)) == 0).nonzero()[:, 0].tolist():
            names = ", ".join(f"'{classes[number]}' ({number})" for number in empty[:_SHOWN])
            what = "class" if len(empty) == 1 else f"{len(empty)} classes"
            more = ", ..." if len(empty) > _SHOWN else ""
            consequence = "it is never learned" if name == "train" else f"metrics of '{name}' do not measure it"
            warnings.append(
                f"data.dataset: '{name}' has no sample of the {what} {names}{more}: {consequence}; add samples, or correct "
                "the names of the classes"
            )
    return warnings


def class_counts(targets: Tensor, classes: int) -> Tensor:
    """Samples of each class, int64 (classes,); targets that are not class numbers, which the task refuses, do not count."""
    numbers = targets.long()
    return torch.bincount(numbers[(numbers >= 0) & (numbers < classes)], minlength=classes)


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
    kinds = {name: str(image.dtype).removeprefix("torch.") for name, (image, _) in examples.items()}
    # Images of bytes are divided by 255.
    ranges = {
        name: (0.0, 1.0) if kinds[name] == "uint8" else _range(name, *part, transforms) for name, part in parts.items()
    }
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
    if high > _OTHER_SCALE and normalize.mean is not None and max(normalize.mean) <= 1:
        warnings.append(
            f"data.dataset: images of 'train' have values up to {high:g}, and data.normalize is for values from 0 to 1: "
            "divide the images by 255, or give uint8"
        )
    return warnings


def _range(
    name: str, dataset: Dataset[Any], indices: Indices, transforms: Sequence[SampleTransform]
) -> tuple[float, float]:
    """The extreme values of a few float images of a split.

    Raises `UserError` if an image of an evaluated split is not finite.
    """
    seeded, ends = SeededDataset(dataset, 0, transforms, split=name), []
    for place in spread_places(len(indices), min(_READ, len(indices))).tolist():
        index = int(indices[place])
        try:
            image = as_tensor(seeded[0, index][0]).float()
        except UserError:  # reported when it is used, or skipped
            continue
        finite = image[image.isfinite()]
        if name != "train" and finite.numel() < image.numel():
            problem = f"sample {index} of '{name}' has pixels that are not finite"
            raise UserError("data.dataset", problem, "images of finite numbers; correct this one, or remove it")
        ends += [float(finite.min()), float(finite.max())] if finite.numel() else []
    return (min(ends), max(ends)) if ends else (0.0, 1.0)


def find_leaks(parts: Parts, group: str | None) -> list[str]:
    """Warnings about groups (see `groups_of`; None for none), and images in memory, that are in two splits."""
    found: list[str] = []
    known: dict[int, list[str]] = {}
    groups: dict[str, dict[str, None]] = {}
    for name, (dataset, indices) in parts.items() if group is not None else ():
        if id(dataset) not in known:
            try:
                known[id(dataset)] = groups_of(dataset, group or "")
            except UserError as error:  # a test set that comes with the data need not name groups
                problem = error.args[0].splitlines()[0]
                found.append(f"whether groups are in '{name}' and in another split is not known: {problem}")
                groups.clear()
                break
        groups[name] = dict.fromkeys(known[id(dataset)][index] for index in indices[:].tolist())
    for one, other in itertools.combinations(groups, 2):
        if shared := [label for label in groups[one] if label in groups[other]]:
            count = "1 group is" if len(shared) == 1 else f"{len(shared):,} groups are"
            found.append(f"data.split.group: {count} in '{one}' and in '{other}', such as {shared[0]}")
    arrays = {name: (data, indices[:]) for name, (data, indices) in parts.items() if isinstance(data, ImageArrays)}
    digests = {name: dataset.digests[indices.numpy()] for name, (dataset, indices) in arrays.items()}
    for one, other in itertools.combinations(arrays, 2):
        again = np.flatnonzero(np.isin(digests[other], digests[one]))
        if len(again) == 0:
            continue
        (first, firsts), (second, seconds) = arrays[one], arrays[other]
        place = int(np.flatnonzero(digests[one] == digests[other][again[0]])[0])
        twins = int(firsts[place]), int(seconds[int(again[0])])
        if torch.equal(first.images[twins[0]], second.images[twins[1]]):  # not the same digest of two images by chance
            count = "1 image is" if len(again) == 1 else f"{len(again):,} images are"
            found.append(
                f"{count} in '{other}' and, pixel for pixel, in '{one}', such as sample {twins[1]} as sample {twins[0]}: "
                f"what is measured on '{other}' is a little too good"
            )
    return found


def not_finite(batches: Iterable[tuple[Tensor, Tensor, Tensor]], name: str) -> str:
    """A sentence on the first sample of a split with a pixel or target that is not finite; empty if there is none."""
    for images, targets, indices in batches:
        for what, values in (("pixels that are", images), ("a target that is", targets)):
            wrong = (~values.isfinite()).reshape(len(values), -1).any(1)
            if bool(wrong.any()):
                index = int(indices[wrong.nonzero()[0, 0]])
                return f"sample {index} of '{name}' has {what} not finite: correct it, or remove it"
    return ""
