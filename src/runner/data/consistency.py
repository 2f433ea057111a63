"""Whether the splits of a data set agree with each other and with what they say of themselves.

Targets are checked all at once where they are known without reading samples; of images only a few are read.
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
from runner.data.indices import Indices
from runner.data.samples import SampleTransform, SeededDataset, as_tensor
from runner.data.splits import targets_of

_SHOWN = 5  # names of classes in a message
_READ = 8  # float images of a split that are read for their range of values
_OTHER_SCALE = 10  # times the largest value of another split
_COLOURS = (1, 3, 4)  # sizes that the last dimension has where channels come last

Parts = Mapping[str, tuple[Dataset[Any], Indices]]
"""For each split the data set that it is read from, and its samples in it."""
Examples = Mapping[str, tuple[Tensor, Tensor]]
"""For each split the image and the target of its first sample."""


def known_targets(
    parts: Parts, sources: Mapping[str, Dataset[Any]], examples: Examples
) -> tuple[dict[str, Tensor], list[str]]:
    """The targets of all samples, of data sets whose attribute `targets` is what their samples give.

    Args:
        parts: the splits.
        sources: for each split what is read in place of its data set.
        examples: their first samples.

    Returns:
        For each split with known targets those of its whole data set, (N, ...); and warnings.

    Raises:
        UserError: if the attribute does not have one target for each sample.
    """
    known, warnings = {}, []
    for name, (dataset, indices) in parts.items():
        targets, index, read = targets_of(sources[name]), int(indices[0]), examples[name][1]
        if targets is None:
            continue
        samples = len(dataset)  # type: ignore[arg-type]
        if targets.ndim == 0 or len(targets) != samples:
            count = "one entry" if targets.ndim == 0 else f"{len(targets)} entries"
            raise UserError(
                f"data.dataset: its attribute targets has {count} for {samples} samples of '{name}'\n"
                "    allowed: one target for each sample, or no such attribute"
            )
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
    """Compare the names of classes between splits, and look for classes without samples.

    Args:
        parts: the splits.
        classes: names of the classes of the training split; empty for regression.
        known: targets that are known, see `known_targets`.

    Returns:
        Warnings.

    Raises:
        UserError: if a class has one number in one split and another in another.
    """
    train = parts["train"][0]
    for name, (dataset, _) in parts.items():
        theirs = [] if dataset is train else [str(label) for label in getattr(dataset, "classes", None) or ()]
        for number, (one, other) in enumerate(zip(classes, theirs, strict=False)):
            if one != other:
                raise UserError(
                    f"data.dataset: class {number} is '{other}' in '{name}' and '{one}' in 'train', so class numbers mean "
                    "different things\n    allowed: the same classes in the same order in every split"
                )
    return _same_names(classes) + _without_samples(parts, classes, known)


def _same_names(classes: Sequence[str]) -> list[str]:
    if len(set(classes)) == len(classes):
        return []
    first = {name: number for number, name in reversed(list(enumerate(classes)))}
    twins = [(first[name], number, name) for number, name in enumerate(classes) if first[name] != number]
    one, other, name = twins[0]
    more = f", and {len(twins) - 1} more are called as another" if len(twins) > 1 else ""
    return [f"data.dataset: classes {one} and {other} are both called '{name}'{more}: give them different names"]


def _without_samples(parts: Parts, classes: Sequence[str], known: Mapping[str, Tensor]) -> list[str]:
    warnings = []
    for name, targets in known.items():
        dataset, indices = parts[name]
        # A small split that is carved out of another cannot have samples of every class.
        if not classes or targets.ndim != 1 or (name != "train" and dataset is parts["train"][0]):
            continue
        numbers = targets[indices[:]].long()
        within = numbers[(numbers >= 0) & (numbers < len(classes))]
        empty = (torch.bincount(within, minlength=len(classes)) == 0).nonzero()[:, 0].tolist()
        if empty:
            names = ", ".join(f"'{classes[number]}' ({number})" for number in empty[:_SHOWN])
            what = "class" if len(empty) == 1 else f"{len(empty)} classes"
            more = ", ..." if len(empty) > _SHOWN else ""
            consequence = "it is never learned" if name == "train" else f"metrics of '{name}' say nothing about it"
            warnings.append(
                f"data.dataset: '{name}' has no sample of the {what} {names}{more}: {consequence}; add samples, or correct "
                "the names of the classes"
            )
    return warnings


def check_images(
    parts: Parts, examples: Examples, transforms: Sequence[SampleTransform], normalize: Normalize
) -> list[str]:
    """Compare channels, dtype and range of values of the images between splits; a few float images of each are read.

    Args:
        parts: the splits.
        examples: their first samples, as they are evaluated.
        transforms: sample transforms of an evaluation.
        normalize: section of the config.

    Returns:
        Warnings.

    Raises:
        UserError: if the images of one split cannot be used beside those of another.
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
            raise UserError(
                f"data.dataset: images of '{name}' have {image.shape[0]} channels, and those of 'train' {channels}\n"
                "    allowed: images with the same channels in every split"
            )
    if all(image.dtype == torch.uint8 for image, _ in examples.values()):
        return warnings
    ranges = {name: _range(name, *part, examples[name][0], transforms) for name, part in parts.items()}
    kinds = {name: str(image.dtype).removeprefix("torch.") for name, (image, _) in examples.items()}
    for one, other in itertools.permutations(parts, 2):
        low, high = ranges[one]
        if kinds[other] == "uint8" != kinds[one] and (low < 0 or high > 1):
            raise UserError(
                f"data.dataset: images of '{one}' are {kinds[one]} with values from {low:g} to {high:g}, and those of "
                f"'{other}' uint8, which are divided by 255\n    allowed: uint8 in every split, or floats from 0 to 1"
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
    """The smallest and the largest value of a few images of a split; 0 and 1 for uint8, which is divided by 255.

    Raises:
        UserError: if one of a split that is evaluated is not finite.
    """
    if example.dtype == torch.uint8:
        return 0.0, 1.0
    keyed, count = SeededDataset(dataset, 0, transforms, split=name), min(_READ, len(indices))
    ends: list[float] = []
    for place in range(count):
        index = int(indices[place * (len(indices) - 1) // max(1, count - 1)])
        try:
            image = as_tensor(keyed[0, index][0]).float()
        except UserError:  # reported where it is needed, or skipped
            continue
        finite = image[image.isfinite()]
        if name != "train" and finite.numel() < image.numel():
            raise UserError(
                f"data.dataset: sample {index} of '{name}' has pixels that are not finite\n"
                "    allowed: images of finite numbers; correct this one, or remove it"
            )
        if finite.numel():
            ends += [float(finite.min()), float(finite.max())]
    return (min(ends), max(ends)) if ends else (0.0, 1.0)


def not_finite(batches: Any, name: str) -> str:
    """The first sample whose image or target is not finite, in words; empty if there is none.

    Args:
        batches: of a split, as the model is given them.
        name: of the split.
    """
    for images, targets, indices in batches:
        for what, values in (("pixels", images), ("a target", targets)):
            wrong = (~values.isfinite()).flatten(1).any(1) if values.ndim > 1 else ~values.isfinite()
            if bool(wrong.any()):
                index = int(indices[wrong.nonzero()[0, 0]])
                verb = "are" if what == "pixels" else "is"
                return f"sample {index} of '{name}' has {what} that {verb} not finite: correct it, or remove it"
    return ""
