"""Checks of the targets, and of images that occur more than once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from runner.verbs.check.context import CheckContext
from runner.verbs.check.near_duplicates import nearest_matches
from runner.verbs.check.result import NotApplicable, Result, failed, graded, join_names, passed, skipped, warned
from runner.verbs.check.split_stats import SplitStats

_FEW = 0.005  # share of a split above which repeated images are not an accident
_NEARLY = 0.01  # share of a split above which similar pictures are not an accident
_MOSTLY = 0.5  # share of copies that no collection of pictures has
_EXPECTED = 10  # expected samples of a class above which their absence is not an accident


def _class_numbers(context: CheckContext) -> Tensor:
    if not context.classes or "train" not in context.labels:
        raise NotApplicable("the targets are not class numbers")
    return context.labels["train"]


def _counts(targets: Tensor, classes: int) -> Tensor:
    return torch.bincount(targets.clamp_min(0), minlength=classes).double()


def target_range(context: CheckContext) -> Result:
    """Class numbers that are out of range, or targets that are not finite."""
    if not context.classes:
        bad = sum(int((~stats.targets.float().isfinite()).sum()) for stats in context.stats.values())
        evidence = f"{bad:,} targets are not finite"
        return failed(evidence, "remove these samples") if bad else passed("every target is finite")
    top = context.classes - 1
    for name, targets in context.labels.items():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high > top:
            wrong = int(((targets < 0) | (targets > top)).sum())
            evidence = f"{wrong:,} targets of {name} are outside 0 to {top}: from {low} to {high}"
            one_off = low == 1 and high == top + 1
            return failed(evidence, "count classes from 0: subtract 1" if one_off else "number the classes from 0")
    if not context.labels:
        return skipped("the targets are not class numbers")
    return passed(f"0 to {top} in {', '.join(context.labels)}")


def missing_classes(context: CheckContext) -> Result:
    """Classes without training samples, for example because labels count from 1."""
    ours = _class_numbers(context)
    present = {name: set(targets.tolist()) for name, targets in context.labels.items()}
    empty = [index for index in range(context.classes) if index not in present["train"]]
    if not empty:
        counts = _counts(ours, context.classes)
        for name, targets in context.labels.items():
            expected = counts / counts.sum() * len(targets)
            gone = [n for n in range(context.classes) if n not in present[name] and float(expected[n]) >= _EXPECTED]
            if gone:
                evidence = f"no sample of {name} is of class {join_names([str(each) for each in gone])}"
                evidence += f"; with the class shares of train there would be {float(expected[gone[0]]):.0f}"
                return warned(evidence, f"data.split.stratified=true, or samples of every class in {name}")
        return passed(f"all {context.classes} classes have training samples")
    names = join_names([str(each) for each in empty])
    evidence = f"no training sample of {len(empty)} of {context.classes} classes: {names}"
    if empty == [0]:
        return failed(f"{evidence}; labels run from 1 to {max(present['train'])}", "count classes from 0: subtract 1")
    others = [name for name, found in present.items() if name != "train" and found & set(empty)]
    if others:
        evidence += f"; {', '.join(others)} has samples of them"
        return failed(evidence, "data.split.stratified=true, or other data")
    return warned(evidence, "remove these classes, or add samples")


def class_balance(context: CheckContext) -> Result:
    """A single class, or classes of very different sizes, within a split or between splits."""
    counts = _counts(_class_numbers(context), context.classes)
    shares = counts / counts.sum()
    low, high = float(counts[counts > 0].min()), float(counts.max())
    evidence = f"{low:,.0f} to {high:,.0f} training samples per class, the largest has {float(shares.max()):.1%}"
    if int((counts > 0).sum()) == 1:
        evidence = f"every training sample is of class {int(counts.argmax())}"
        return failed(evidence, "use other data: there is nothing to distinguish")
    for name, targets in context.labels.items():
        theirs = _counts(targets, context.classes)[: context.classes]
        apart = float((theirs / theirs.sum() - shares[: context.classes]).abs().sum()) / 2
        # By chance alone the shares of C classes in n samples are about sqrt(C / n) / 2 apart.
        if len(targets) > 50 and apart > 0.15 + (context.classes / len(targets)) ** 0.5:
            evidence = f"the class shares of {name} differ from train: {apart:.0%} of the samples would have to move"
            return warned(evidence, "data.split.stratified=true, or splits from the same source")
    fix = "loss.class_weights=balanced, and other metrics than accuracy"
    return graded(evidence, fix, warn=float(shares.max()) > 0.9 or high > 50 * low)


def class_order(context: CheckContext) -> Result:
    """DataModule that list their classes in another order, so that class numbers have another meaning."""
    datasets = {name: stats.dataset for name, stats in context.stats.items()}
    named = {name: tuple(map(str, getattr(each, "classes", None) or ())) for name, each in datasets.items()}
    ours = named["train"]
    for name, theirs in named.items():
        if ours and theirs and theirs != ours:
            pairs = enumerate(zip(ours, theirs, strict=False))
            place = next((number for number, pair in pairs if pair[0] != pair[1]), len(theirs))
            labels = " and ".join(repr(each[place]) if place < len(each) else "none" for each in (ours, theirs))
            evidence = f"class {place} is {labels} in train and {name}"
            return failed(evidence, f"give {name} the classes of train, in their order")
    return passed("the same in every split") if ours else skipped("the data set names no classes")


def _digests(stats: SplitStats) -> list[tuple[int, bytes]]:
    """Position and digest of each image; constant images are skipped, because all of them are the same picture."""
    return [(place, stats.digests[place]) for place in (~stats.constant).nonzero().flatten().tolist()]


def _repeats(stats: SplitStats) -> tuple[int, list[int]]:
    """How many images are copies of earlier ones, and the indices of the first pair."""
    first: dict[bytes, int] = {}
    pair: list[int] = []
    copies = 0
    for place, digest in _digests(stats):
        if first.setdefault(digest, place) != place:
            copies += 1
            pair = pair or [int(stats.indices[first[digest]]), int(stats.indices[place])]
    return copies, pair


def duplicates(context: CheckContext) -> Result:
    """The same image several times in a split."""
    found = {name: _repeats(stats) for name, stats in context.stats.items()}
    name = max(found, key=lambda each: found[each][0] / max(1, len(context.stats[each].indices)))
    copies, pair = found[name]
    count = len(context.stats[name].indices)
    evidence = f"{copies:,} of {count:,} images of {name} are exact copies of others"
    if copies <= _FEW * count:
        return passed(evidence)
    evidence += f", such as samples {pair[0]} and {pair[1]}"
    if copies > _MOSTLY * count:
        return failed(evidence, "check how the data set maps an index to an image: most samples are the same pictures")
    return warned(evidence, "remove copies: they count several times")


def conflicting_labels(context: CheckContext) -> Result:
    """The same image with different targets."""
    known: dict[bytes, tuple[str, int, Any]] = {}
    conflicts, example = 0, ""
    for name, stats in context.stats.items():
        targets = stats.targets.tolist()
        for place, digest in _digests(stats):
            split, index, target = known.setdefault(digest, (name, int(stats.indices[place]), targets[place]))
            if target != targets[place]:
                conflicts += 1
                where = f"{index} of {split} and {int(stats.indices[place])} of {name}"
                example = example or f"samples {where} are {target} and {targets[place]}"
    if not conflicts:
        return passed("no image has two targets")
    total = sum(len(stats.digests) for stats in context.stats.values())
    evidence = f"{conflicts:,} images have another target than an exact copy: {example}"
    fix = "decide which target is right"
    if conflicts > _FEW * total:
        return failed(evidence, f"{fix}; check how images and targets are paired")
    return warned(evidence, fix)


def leakage(context: CheckContext) -> Result:
    """Held-out images that are also in the training split, bit for bit."""
    if not context.held_out_stats:
        return skipped("there is no other split")
    train = context.train_stats
    ours = {digest: place for place, digest in _digests(train)}
    worst = (0.0, 0, "", "")
    counts = []
    for stats in context.held_out_stats:
        shared = [(ours[digest], place) for place, digest in enumerate(stats.digests) if digest in ours]
        counts.append(f"{len(shared):,} of {len(stats.digests):,} of {stats.name}")
        if shared:
            a, b = int(train.indices[shared[0][0]]), int(stats.indices[shared[0][1]])
            example = f"such as sample {b} of {stats.name}, which is {a} of train"
            worst = max(worst, (len(shared) / len(stats.digests), len(shared), stats.name, example))
    share, count, name, example = worst
    evidence = f"{', '.join(counts)} are also in train" + (f", {example}" if count else "")
    fix = f"remove them from train or from {name}: a score on them says nothing about unseen images"
    return graded(evidence, fix, fail=share > _FEW and count > 1, warn=count > 0)


def near_duplicates(context: CheckContext) -> Result:
    """Held-out images that nearly equal training images: mirrored, shifted, rescaled, brighter or compressed again."""
    train = context.train_stats
    if not context.held_out_stats or not len(train.thumbnails):
        return skipped("there is no other split")
    size = train.thumbnails.shape[1:]
    if size.numel() < 128:
        return skipped(f"images of {size.numel()} values are too small to compare")
    own = {train.digests[row] for row in train.thumbnail_rows.tolist()}
    rows = train.thumbnail_rows
    shown = (~train.constant[rows] & train.finite[rows]).nonzero().flatten()
    counts, worst = [], (0, 0, "", "")
    for stats in context.held_out_stats:
        pairs = enumerate(stats.thumbnail_rows.tolist())
        fresh = [place for place, row in pairs if stats.digests[row] not in own and not stats.constant[row]]
        if not fresh or not len(shown) or stats.thumbnails.shape[1:] != size:
            continue
        found = nearest_matches(stats.thumbnails[fresh], train.thumbnails[shown])
        near = found.same.nonzero().flatten().tolist()
        counts.append(f"{len(near):,} of {len(fresh):,} of {stats.name}")
        if near:
            b = int(stats.indices[stats.thumbnail_rows[fresh[near[0]]]])
            a = int(train.indices[rows[shown[found.place[near[0]]]]])
            example = f"such as sample {b} of {stats.name} and {a} of train, correlation {float(found.correlation[near[0]]):.4f}"
            worst = max(worst, (len(near), len(fresh), stats.name, example))
    count, of, name, example = worst
    evidence = f"{', '.join(counts) or 'none'} are nearly the same picture as one of train"
    if count > max(2, _NEARLY * of):
        return warned(f"{evidence}, {example}", f"keep pictures of the same object in one split; look at {name}")
    return passed(evidence)


def target_scale(context: CheckContext) -> Result:
    """Regression targets that are all equal, or whose scale is far from 1."""
    if context.classes:
        return skipped("there are classes")
    values = context.train_stats.targets.double()
    if not len(values) or not bool(values.isfinite().all()):
        return skipped("there are targets that are not finite")
    mean, std = float(values.mean()), float(values.std())
    low, high = values.aminmax()
    evidence = f"mean {mean:.4g}, standard deviation {std:.4g}, from {float(low):.4g} to {float(high):.4g}"
    if std < 1e-6 * max(1.0, abs(mean)):
        return failed(evidence, "other targets: there is nothing to predict")
    if std > 30 or std < 0.03 or abs(mean) > 30 * std:
        return warned(evidence, "scale the targets to mean 0 and standard deviation 1")
    most_common = Counter(values.flatten().tolist()).most_common(1)[0][1] / values.numel()
    if most_common > 0.9:
        return warned(f"{evidence}; {most_common:.0%} of them are equal", "check the targets")
    return passed(evidence)
