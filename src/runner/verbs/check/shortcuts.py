"""Checks for what reveals the label without the object: marks in the image, and properties of its file."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import Result, passed, skipped, warned
from runner.verbs.check.sample_images import sample_images

_FEWEST = 15  # samples of a class
_REVEALING = 0.97  # balanced accuracy of a single value
_DROP = 0.15  # by how much pixels near a mark are worse
_TRIED = 48  # pixels of each class for which the exact accuracy is computed
_FILES = 400


def _threshold_accuracy(values: Tensor, positive: Tensor) -> Tensor:
    """Best balanced accuracy of a single threshold for each column of (N, P), in either direction: (P,)."""
    order = values.argsort(0)
    ranked, hit = values.gather(0, order), positive[order].double()
    accuracy = ((hit.cumsum(0) / positive.sum() - (1 - hit).cumsum(0) / (~positive).sum()).abs() + 1) / 2
    between = torch.ones_like(accuracy, dtype=torch.bool)  # a threshold lies between two values
    between[:-1] = ranked[1:] > ranked[:-1]
    return torch.where(between, accuracy, 0.5).amax(0)


def _find_mark(images: Tensor, positive: Tensor) -> tuple[float, int, int] | None:
    """Balanced accuracy, row and column of a pixel that reveals a class and is not part of an object."""
    channels, height, width = images.shape[1:]
    flat = images.flatten(1)
    # The exact accuracy is computed only for the pixels whose means differ most, in deviations.
    inside, outside = flat[positive], flat[~positive]
    separation = (inside.mean(0) - outside.mean(0)).abs() / ((inside.var(0) + outside.var(0)).sqrt() + 1e-3)
    tried = separation.topk(min(_TRIED, len(separation))).indices
    accuracy = _threshold_accuracy(flat[:, tried], positive)
    best = float(accuracy.max())
    if best < _REVEALING:
        return None
    places = tried[accuracy > best - 1e-3] % (height * width)
    rows, columns = places // width, places % width
    to_edge = torch.stack([rows, columns, height - 1 - rows, width - 1 - columns]).amin(0)
    row, column, edge = (int(each[int(to_edge.argmin())]) for each in (rows, columns, to_edge))
    own = images[positive][:, :, row, column]
    at_border = edge < max(1, min(height, width) // 6)
    # In photographs of one class no pixel is constant; inside an object, black or white pixels may be.
    constant = (own.std(0) < 1e-3) & ((own.mean(0) > 0.02) & (own.mean(0) < 0.98) | at_border)
    around = [
        (row + down, column + right)
        for down in (-3, 0, 3)
        for right in (-3, 0, 3)
        if (down or right) and 0 <= row + down < height and 0 <= column + right < width
    ]
    near = images[:, :, [each[0] for each in around], [each[1] for each in around]].flatten(1)
    isolated = float(_threshold_accuracy(near, positive).max()) < best - _DROP
    center = ..., slice(height // 4, height - height // 4), slice(width // 4, width - width // 4)
    inner = separation.view(channels, height, width)[center].flatten()
    middle = images[center].flatten(1)[:, inner.topk(min(_TRIED, len(inner))).indices]
    only_there = at_border and float(_threshold_accuracy(middle, positive).max()) < best - _DROP
    return (best, row, column) if isolated or only_there or bool(constant.any()) else None


def _constant_per_class(images: Tensor, targets: Tensor, classes: Sequence[int]) -> str:
    """A sentence about a channel or extreme value that is constant within each class and differs between classes."""
    flat = images.flatten(2)
    means, steady = flat.mean(2), flat.std(2) < 1e-3
    values = {
        f"channel {number}": means[:, number] for number in range(images.shape[1]) if bool(steady[:, number].all())
    }
    values |= {"the smallest value": images.flatten(1).amin(1), "the largest value": images.flatten(1).amax(1)}
    for name, value in values.items():
        groups = [value[targets == each] for each in classes]
        if all(float(group.max() - group.min()) < 1e-3 for group in groups):
            levels = [float(group.mean()) for group in groups]
            if max(levels) - min(levels) > 3e-3:
                return f"{name} is {levels[0]:.3g} in every image of class {classes[0]}, and {levels[-1]:.3g} of {classes[-1]}"
    return ""


def image_shortcut(context: CheckContext) -> Result:
    """A mark in the image that reveals the label: a border, a corner, a stamp, or a channel that is constant per class."""
    context.require_classes()
    found = context.cached(sample_images).get("train")
    if found is None or found.targets.ndim != 1:
        return skipped("there are no images to look at")
    images, targets = found
    counts = Counter(targets.tolist())
    classes = sorted(each for each, count in counts.items() if count >= _FEWEST)
    if len(counts) < 2 or not classes:
        return skipped(f"fewer than {_FEWEST} images of each class were read")
    fix = "remove the mark from all images, or crop it off: otherwise the model learns the mark, not the object"
    if len(classes) > 1 and (evidence := _constant_per_class(images, targets, classes)):
        return warned(evidence, fix)
    for each in classes:
        if (mark := _find_mark(images, targets == each)) is not None:
            accuracy, row, column = mark
            evidence = f"the pixel in row {row}, column {column} alone tells class {each} from the others"
            return warned(f"{evidence} with a balanced accuracy of {accuracy:.1%}", fix)
    return passed(f"no mark in {len(images)} images tells one of {len(classes)} classes from the others")


def _path(dataset: object, index: int) -> Path | None:
    """The file of a sample, if the data set knows it."""
    if callable(path := getattr(dataset, "path", None)):
        return Path(path(index))
    for name in ("samples", "imgs", "paths", "files"):
        known = getattr(dataset, name, None)
        if isinstance(known, list | tuple) and index < len(known):
            one = known[index][0] if isinstance(known[index], list | tuple) else known[index]
            return Path(one) if isinstance(one, str | Path) else None
    return None


def _properties(path: Path) -> dict[str, Any]:
    """Properties of an image file that are known without decoding it."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(path) as image:
            return {
                "the format": image.format,
                "the color mode": image.mode,
                "the size in pixels": image.size,
                "the size in bytes": path.stat().st_size,
            }


def file_shortcut(context: CheckContext) -> Result:
    """Properties of the files that reveal the label: format, color mode, size in pixels or bytes."""
    dataset = context.splits.parts["train"][0]
    if not context.classes or "train" not in context.labels:
        return skipped("there are no classes")
    known = dict(zip(context.train_stats.indices.tolist(), context.train_stats.targets.tolist(), strict=True))
    files: list[tuple[int, dict[str, Any]]] = []
    until = 0.95 * context.left
    for index in context.readable("train", _FILES):
        path = _path(dataset, index)
        if path is None:
            return skipped("the data set does not name its files")
        if context.left < until:
            break
        try:
            files.append((int(known[index]), _properties(path)))
        except OSError:
            continue
    targets = torch.tensor([target for target, _ in files])
    counts = Counter(targets.tolist())
    classes = [each for each, count in sorted(counts.items()) if count >= _FEWEST]
    if len(counts) < 2 or not classes:
        return skipped(f"fewer than {_FEWEST} files of each class were read")
    fix = "store the files of all classes in the same way; what differs may also be visible in the pixels"
    for name in files[0][1]:
        values = [properties[name] for _, properties in files]
        for each in classes:
            positive = targets == each
            inside = {value for value, hit in zip(values, positive.tolist(), strict=True) if hit}
            # A size in bytes is compared with a threshold, the others for equality.
            equal = {f" ({one})": [value == one for value in values] for one in inside}
            columns = {"": values} if name == "the size in bytes" else equal
            for which, column in columns.items():
                accuracy = float(_threshold_accuracy(torch.tensor(column).float()[:, None], positive))
                if accuracy >= _REVEALING:
                    evidence = f"{name} of the file{which} alone tells class {each} from the others"
                    return warned(f"{evidence} with a balanced accuracy of {accuracy:.1%}", fix)
    return passed(f"format, mode and size of {len(files)} files are similar in all classes")
