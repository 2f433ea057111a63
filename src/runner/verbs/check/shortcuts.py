"""Checks for what gives the label away without the object being looked at: marks in the image, and facts about its file."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import Result, check, passed, skipped, warned
from runner.verbs.check.sample_images import sample_images

_FEWEST = 15  # samples of a class
_GIVEN_AWAY = 0.97  # balanced accuracy of a single value
_DROP = 0.15  # by which pixels near a mark are worse
_TRIED = 48  # pixels of each class that are looked at closely
_FILES = 400


def _stump(values: Tensor, positive: Tensor) -> Tensor:
    """Best balanced accuracy of one threshold for each column of (N, P), in either direction: (P,)."""
    order = values.argsort(0)
    ranked = values.gather(0, order)
    hit = positive[order].double()
    inside = hit.cumsum(0) / positive.sum()
    outside = (1 - hit).cumsum(0) / (~positive).sum()
    accuracy = ((inside - outside).abs() + 1) / 2
    real = torch.ones_like(accuracy, dtype=torch.bool)
    real[:-1] = ranked[1:] > ranked[:-1]  # a threshold lies between two values
    return torch.where(real, accuracy, 0.5).amax(0)


def _separation(images: Tensor, positive: Tensor) -> Tensor:
    """Distance of the means of two groups in deviations, for each value of (N, D): (D,)."""
    inside, outside = images[positive], images[~positive]
    spread = (inside.var(0) + outside.var(0)).sqrt()
    return (inside.mean(0) - outside.mean(0)).abs() / (spread + 1e-3)


def _marked(images: Tensor, positive: Tensor) -> tuple[float, int, int] | None:
    """Balanced accuracy, row and column of a pixel that gives a class away, and is no part of an object."""
    channels, height, width = images.shape[1:]
    flat = images.flatten(1)
    # The exact accuracy is computed for the most promising values alone, and for those around the best one.
    separation = _separation(flat, positive)
    tried = separation.topk(min(_TRIED, len(separation))).indices
    accuracy = _stump(flat[:, tried], positive)
    best = float(accuracy.max())
    if best < _GIVEN_AWAY:
        return None
    places = tried[accuracy > best - 1e-3] % (height * width)
    rows, columns = places // width, places % width
    to_edge = torch.stack([rows, columns, height - 1 - rows, width - 1 - columns]).amin(0)
    row, column, edge = (int(each[int(to_edge.argmin())]) for each in (rows, columns, to_edge))
    own = images[positive][:, :, row, column]
    at_border = edge < max(1, min(height, width) // 6)
    # In photographs of one class no pixel has one value; black or white ones may have inside an object.
    steady = (own.std(0) < 1e-3) & ((own.mean(0) > 0.02) & (own.mean(0) < 0.98) | at_border)
    around = [
        (row + down, column + right)
        for down in (-3, 0, 3)
        for right in (-3, 0, 3)
        if (down or right) and 0 <= row + down < height and 0 <= column + right < width
    ]
    near = images[:, :, [each[0] for each in around], [each[1] for each in around]].flatten(1)
    isolated = float(_stump(near, positive).max()) < best - _DROP
    middle = images[:, :, height // 4 : height - height // 4, width // 4 : width - width // 4].flatten(1)
    inner = separation.view(channels, height, width)
    inner = inner[:, height // 4 : height - height // 4, width // 4 : width - width // 4].flatten()
    most = inner.topk(min(_TRIED, len(inner))).indices
    only_there = at_border and float(_stump(middle[:, most], positive).max()) < best - _DROP
    return (best, row, column) if isolated or only_there or bool(steady.any()) else None


def _constant_channel(images: Tensor, targets: Tensor, classes: Sequence[int]) -> str:
    """What is told of a channel or extreme value that is the same for all images of a class, and another for others."""
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


@check
def image_shortcut(context: CheckContext) -> Result:
    """A mark in the image that gives the label away: a border, a corner, a stamp, or a channel that is constant per class."""
    if not context.classes:
        return skipped("there are no classes")
    found = context.cached(sample_images).get("train")
    if found is None or found.targets.ndim != 1:
        return skipped("there are no images to look at")
    counts = Counter(found.targets.tolist())
    classes = sorted(each for each, count in counts.items() if count >= _FEWEST)
    if len(counts) < 2 or not classes:
        return skipped(f"fewer than {_FEWEST} images of each class were looked at")
    fix = "remove the mark from all images, or crop it off: the model would learn it in place of the object"
    if len(classes) > 1 and (told := _constant_channel(found.images, found.targets, classes)):
        return warned(told, fix)
    for each in classes:
        marked = _marked(found.images, found.targets == each)
        if marked is not None:
            accuracy, row, column = marked
            evidence = f"the pixel in row {row}, column {column} alone tells class {each} from the others"
            return warned(f"{evidence} with a balanced accuracy of {accuracy:.1%}", fix)
    return passed(f"no mark in {len(found.images)} images tells one of {len(classes)} classes from the others")


def _path(dataset: object, index: int) -> Path | None:
    """The file of a sample, where the data set knows it."""
    if callable(path := getattr(dataset, "path", None)):
        return Path(path(index))
    for name in ("samples", "imgs", "paths", "files"):
        known = getattr(dataset, name, None)
        if isinstance(known, list | tuple) and index < len(known):
            one = known[index][0] if isinstance(known[index], list | tuple) else known[index]
            return Path(one) if isinstance(one, str | Path) else None
    return None


def _facts(path: Path) -> dict[str, Hashable]:
    """What is known of an image file without decoding it."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(path) as image:
            return {
                "the format": image.format,
                "the colour mode": image.mode,
                "the size in pixels": image.size,
                "the size in bytes": path.stat().st_size,
            }


@check
def file_shortcut(context: CheckContext) -> Result:
    """Facts about the files that give the label away: format, colour mode, size in pixels or bytes."""
    dataset = context.splits.parts["train"][0]
    if not context.classes or "train" not in context.labels:
        return skipped("there are no classes")
    known = dict(zip(context.train_stats.indices.tolist(), context.train_stats.targets.tolist(), strict=True))
    rows: list[tuple[int, dict[str, Hashable]]] = []
    until = 0.95 * context.left
    for index in context.readable("train", _FILES):
        path = _path(dataset, index)
        if path is None:
            return skipped("the data set names no files")
        if context.left < until:
            break
        try:
            rows.append((int(known[index]), _facts(path)))
        except OSError:
            continue
    targets = torch.tensor([target for target, _ in rows])
    counts = Counter(targets.tolist())
    classes = [each for each, count in sorted(counts.items()) if count >= _FEWEST]
    if len(counts) < 2 or not classes:
        return skipped(f"fewer than {_FEWEST} files of each class were looked at")
    for name in rows[0][1]:
        values = [facts[name] for _, facts in rows]
        numbers = torch.tensor([float(each) if isinstance(each, int) else 0.0 for each in values])
        for each in classes:
            positive = targets == each
            for value in {v for v, inside in zip(values, positive.tolist(), strict=True) if inside}:
                column = torch.tensor([float(v == value) for v in values]) if name != "the size in bytes" else numbers
                accuracy = float(_stump(column[:, None], positive))
                if accuracy >= _GIVEN_AWAY:
                    what = f"{name} of the file" + (f" ({value})" if name != "the size in bytes" else "")
                    told = f"{what} alone tells class {each} from the others with a balanced accuracy of {accuracy:.1%}"
                    fix = (
                        "store the files of all classes in the same way; what made them may also be seen in the pixels"
                    )
                    return warned(told, fix)
                if name == "the size in bytes":
                    break
    return passed(f"format, mode and size of {len(rows)} files are alike in all classes")
