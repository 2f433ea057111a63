"""Checks for what reveals the label without the object: marks in the image, and properties of its file."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from runner.lab.check.context import CheckContext
from runner.lab.check.result import Result, check, need, passed, warned

_FEWEST = 15  # samples of a class
_REVEALING = 0.97  # balanced accuracy of a single value
_DROP = 0.15  # by how much pixels elsewhere are worse than a mark
_AROUND = 3  # pixels from a mark to those that it is compared with
_TRIED = 48  # pixels that may be a mark
_FILES = 400


def _threshold_accuracy(values: Tensor, positive: Tensor) -> Tensor:
    """Best balanced accuracy of a single threshold for each column of (N, P), in either direction: (P,)."""
    ordered, order = values.sort(0)
    hits = positive[order]
    gap = (hits.cumsum(0) / hits.sum(0) - (~hits).cumsum(0) / (~hits).sum(0)).abs()
    # No threshold lies between equal values.
    gap[:-1][ordered[1:] == ordered[:-1]] = 0
    return (gap.amax(0) + 1) / 2


def _frequent_classes(targets: Tensor, what: str) -> list[int]:
    counts = Counter(targets.tolist())
    classes = sorted(each for each, count in counts.items() if count >= _FEWEST)
    need(len(counts) > 1 and classes, f"fewer than {_FEWEST} {what} of each class were read")
    return classes


def _find_mark(images: Tensor, positive: Tensor) -> tuple[float, int, int] | None:
    """Balanced accuracy, row and column of a pixel that reveals a class and is not part of an object."""
    height, width = images.shape[2:]
    accuracy = _threshold_accuracy(images.flatten(1), positive).view(images.shape[1:])
    # A mark is among the pixels whose means differ most, in deviations.
    inside, outside = images[positive], images[~positive]
    separation = (inside.mean(0) - outside.mean(0)).abs() / ((inside.var(0) + outside.var(0)).sqrt() + 1e-3)
    tried = separation.flatten().topk(min(_TRIED, separation.numel())).indices
    best = float(accuracy.flatten()[tried].max())
    if best < _REVEALING:
        return None
    places = tried[accuracy.flatten()[tried] > best - 1e-3] % (height * width)
    rows, columns = places // width, places % width
    to_edge = torch.stack([rows, columns, height - 1 - rows, width - 1 - columns]).amin(0)
    row, column, edge = (int(each[int(to_edge.argmin())]) for each in (rows, columns, to_edge))
    own = images[positive][:, :, row, column]
    at_border = edge < max(1, min(height, width) // 6)
    # In photographs of one class no pixel is constant; inside an object, black or white pixels may be.
    constant = (own.std(0) < 1e-3) & ((own.mean(0) > 0.02) & (own.mean(0) < 0.98) | at_border)
    # The pixels of an object reveal the class as well as their neighbors do, those of a mark do not.
    steps = [(down, right) for down in (-_AROUND, 0, _AROUND) for right in (-_AROUND, 0, _AROUND) if down or right]
    around = [(row + down, column + right) for down, right in steps if row + down >= 0 and column + right >= 0]
    near = [float(accuracy[:, down, right].max()) for down, right in around if down < height and right < width]
    isolated = max(near) < best - _DROP
    middle = accuracy[:, height // 4 : height - height // 4, width // 4 : width - width // 4]
    only_there = at_border and float(middle.max()) < best - _DROP
    return (best, row, column) if isolated or only_there or bool(constant.any()) else None


@check("shortcuts")
def image_shortcut(context: CheckContext) -> Result:
    """A mark in the image that reveals the label: a border, a corner, a stamp, or a channel that is constant per class."""
    need(context.classes and "train" in context.labels, "there are no classes")
    images, targets = context.train_images(2 * _FEWEST)
    classes = _frequent_classes(targets, "images")
    fix = "remove the mark from all images, or crop it off: otherwise the model learns the mark, not the object"
    flat = images.flatten(2)
    values = {f"channel {n}": each.mean(1) for n, each in enumerate(flat.unbind(1)) if bool((each.std(1) < 1e-3).all())}
    values |= {"the smallest value": flat.amin((1, 2)), "the largest value": flat.amax((1, 2))}
    for name, value in values.items():
        groups = [value[targets == each] for each in classes]
        levels = [float(group.mean()) for group in groups]
        if max(float(group.max() - group.min()) for group in groups) < 1e-3 and max(levels) - min(levels) > 3e-3:
            evidence = f"{name} is {levels[0]:.3g} in every image of class {classes[0]}, and {levels[-1]:.3g} of "
            return warned(f"{evidence}{classes[-1]}", fix)
    for each in classes:
        if (mark := _find_mark(images, targets == each)) is not None:
            accuracy, row, column = mark
            evidence = f"the pixel in row {row}, column {column} alone tells class {each} from the others"
            return warned(f"{evidence} with a balanced accuracy of {accuracy:.1%}", fix)
    return passed(f"no mark in {len(images)} images tells one of {len(classes)} classes from the others")


def _path(dataset: object, index: int) -> Path:
    """The file of a sample, if the data set knows it."""
    if callable(path := getattr(dataset, "path", None)):
        return Path(path(index))
    samples = getattr(dataset, "samples", None)  # as torchvision's ImageFolder has them
    need(isinstance(samples, list) and isinstance(samples[index], tuple), "the data set does not name its files")
    return Path(samples[index][0])  # type: ignore[index]


@check("shortcuts")
def file_shortcut(context: CheckContext) -> Result:
    """Properties of the files that reveal the label: format, color mode, size in pixels or bytes."""
    from PIL import Image

    dataset = context.splits.parts["train"][0]
    need(context.classes and "train" in context.labels, "there are no classes")
    # Only the header of a file is read, so this is quick
    known = dict(zip(context.train_stats.indices.tolist(), context.train_stats.targets.tolist(), strict=True))
    numbers: list[int] = []
    files: list[tuple[object, ...]] = []  # properties that are known without decoding the image
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in context.readable("train", _FILES):
            path = _path(dataset, index)
            with contextlib.suppress(OSError), Image.open(path) as image:
                files.append((image.format, image.mode, image.size, path.stat().st_size))
                numbers.append(int(known[index]))
    targets = torch.tensor(numbers)
    classes = _frequent_classes(targets, "files")
    fix = "store the files of all classes in the same way; what differs may also be visible in the pixels"
    names = ("the format", "the color mode", "the size in pixels", "the size in bytes")
    for name, values in zip(names, zip(*files, strict=True), strict=True):
        for each in classes:
            # A size in bytes is compared with a threshold, the others for equality with those of the class.
            columns: dict[str, Sequence[object]] = {"": values}
            if name != "the size in bytes":
                own = {value for value, number in zip(values, numbers, strict=True) if number == each}
                columns = {f" ({one})": [value == one for value in values] for one in own}
            for which, column in columns.items():
                accuracy = float(_threshold_accuracy(torch.tensor(column).float()[:, None], targets == each))
                if accuracy >= _REVEALING:
                    evidence = f"{name} of the file{which} alone tells class {each} from the others"
                    return warned(f"{evidence} with a balanced accuracy of {accuracy:.1%}", fix)
    return passed(f"format, mode and size of {len(files)} files are similar in all classes")
