"""Checks of the targets, and of images that occur more than once."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor

from runner.lab.check.context import CheckContext
from runner.lab.check.near_duplicates import nearest_matches
from runner.lab.check.result import Result, check, failed, graded, join_names, need, none_of, passed, warned
from runner.lab.check.split_stats import SplitStats

_LEAKED, _SOME = 0.005, 0.001  # shares of a held-out split that are also in train
_FEW = 0.005  # share of a split above which repeated images are not an accident
_NEARLY = 0.01  # share of a split above which similar pictures are not an accident
_COMPARED = 256  # random images of a split that are compared with all training images
_MOSTLY = 0.5  # share of copies that no collection of pictures has
_EXPECTED = 10  # expected samples of a class above which their absence is not an accident


@check("labels")
def target_range(context: CheckContext) -> Result:
    """Class numbers that are out of range, or targets that are not finite."""
    if not context.classes or _label_shares(context):
        bad = sum(int((~stats.targets.float().isfinite()).sum()) for stats in context.stats.values())
        return failed(f"{bad:,} targets are not finite", "remove these samples") if bad else passed("all are finite")
    need(context.labels, "the targets are not class numbers")
    top = context.classes - 1
    for name, targets in context.labels.items():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high > top:
            wrong = int(((targets < 0) | (targets > top)).sum())
            evidence = f"{wrong:,} targets of {name} are outside 0 to {top}: from {low} to {high}"
            return failed(evidence, "number the classes from 0: subtract 1 if they are counted from 1")
    return passed(f"0 to {top} in {', '.join(context.labels)}")


def _label_shares(context: CheckContext) -> dict[str, Tensor]:
    """By split, the share of the samples that have each label, float64 (L,), where targets are vectors for the classes."""
    if context.labels:  # class numbers, known without reading samples
        return {}
    found = {name: stats.targets for name, stats in context.stats.items()}
    vectors = all(each.ndim == 2 and each.shape[1] == context.classes for each in found.values())
    return {name: (each > 0.5).double().mean(0) for name, each in found.items()} if vectors and context.classes else {}


def _class_counts(context: CheckContext) -> dict[str, Tensor]:
    """Number of samples of each class, by split, float64 (C,)."""
    need(context.classes and "train" in context.labels, "the targets are not class numbers")
    count = context.classes
    kept = {name: each[(each >= 0) & (each < count)] for name, each in context.labels.items()}
    return {name: torch.bincount(each, minlength=count).double() for name, each in kept.items()}


@check("labels")
def missing_classes(context: CheckContext) -> Result:
    """Classes without training samples, for example because labels count from 1, or with one name."""
    if shares := _label_shares(context):
        never = (shares["train"] == 0).nonzero().flatten().tolist()
        otherwise = f"training samples have each of {context.classes} labels"
        return none_of(never, "labels have no training sample", "remove them, or add samples", otherwise, "warn")
    counts = _class_counts(context)
    ours = counts["train"]
    if empty := (ours == 0).nonzero().flatten().tolist():
        evidence = f"no training sample of {len(empty)} of {context.classes} classes: {join_names(empty)}"
        if empty == [0]:
            evidence += f"; labels run from 1 to {int(context.labels['train'].max())}"
            return failed(evidence, "count classes from 0: subtract 1")
        others = [name for name, theirs in counts.items() if bool(theirs[empty].any())]
        evidence += f"; {', '.join(others)} has samples of them" if others else ""
        fix = "data.split.stratified=true, other data, or fewer classes"
        return graded(evidence, fix, fail=bool(others), warn=True)
    for name, theirs in counts.items():
        expected = ours / ours.sum() * len(context.labels[name])
        if gone := ((theirs == 0) & (expected >= _EXPECTED)).nonzero().flatten().tolist():
            evidence = f"no sample of {name} is of class {join_names(gone)}"
            evidence += f"; with the class shares of train there would be {float(expected[gone[0]]):.0f}"
            return warned(evidence, f"data.split.stratified=true, or samples of every class in {name}")
    names = Counter(context.splits.classes)
    if twins := [name for name, count in names.items() if count > 1]:
        return warned(f"several classes are called {join_names(twins)}", "different names, or one class of them")
    return passed(f"all {context.classes} classes have training samples")


@check("labels")
def class_balance(context: CheckContext) -> Result:
    """A single class, or classes of very different sizes, within a split or between splits."""
    config = context.config
    keys = {f"loss.{key}": config.loss.get(key) for key in ("class_weights", "pos_weight", "weight")}
    keys["data.sampler"] = config.data.sampler
    handled = [f"{key}={value}" for key, value in keys.items() if value not in (None, "", 1)]
    if shares := _label_shares(context):
        low, high = float(shares["train"].min()), float(shares["train"].max())
        evidence, fix = f"{low:.1%} to {high:.1%} of the training samples have each label", "loss.pos_weight=auto"
        warn = low < 0.02 or high > 0.98
    else:
        counts = _class_counts(context)
        ours = counts["train"]
        least, most, largest = float(ours[ours > 0].min()), float(ours.max()), float(ours.max() / ours.sum())
        if int((ours > 0).sum()) == 1:
            evidence = f"every training sample is of class {int(ours.argmax())}"
            return failed(evidence, "use other data: there is nothing to distinguish")
        for name, theirs in counts.items():
            apart = float((theirs / theirs.sum() - ours / ours.sum()).abs().sum()) / 2
            # By chance alone the shares of C classes in n samples are about sqrt(C / n) / 2 apart.
            samples = len(context.labels[name])
            if samples > 50 and apart > 0.15 + (context.classes / samples) ** 0.5:
                evidence = (
                    f"the class shares of {name} differ from train: {apart:.0%} of the samples would have to move"
                )
                return warned(evidence, "data.split.stratified=true, or splits from the same source")
        evidence = f"{least:,.0f} to {most:,.0f} training samples per class, the largest has {largest:.1%}"
        fix = "loss.class_weights=balanced, and other metrics than accuracy"
        warn = largest > 0.9 or most > 50 * least
    return passed(f"{evidence}; handled by {' and '.join(handled)}") if handled else graded(evidence, fix, warn=warn)


@check("labels")
def class_order(context: CheckContext) -> Result:
    """Splits that list their classes in another order, so that class numbers have another meaning."""
    named = {name: [*map(str, getattr(each.dataset, "classes", None) or ())] for name, each in context.stats.items()}
    ours = named["train"]
    need(ours, "the data set names no classes")
    for name, theirs in named.items():
        if theirs and theirs != ours:
            pairs = enumerate(itertools.zip_longest(ours, theirs))
            unlike = [f"class {place} is {a!r} and {b!r} in train and {name}" for place, (a, b) in pairs if a != b]
            return failed(join_names(unlike), f"give {name} the classes of train, in their order")
    return passed("the same in every split")


def _digests(stats: SplitStats) -> list[tuple[int, bytes]]:
    """Position and digest of each image; constant images are skipped, because all of them are the same picture."""
    return [(place, stats.digests[place]) for place in (~stats.constant).nonzero().flatten().tolist()]


@check("labels", any_task=True)
def duplicates(context: CheckContext) -> Result:
    """The same image several times in a split."""
    found = []
    for stats in context.stats.values():
        first: dict[bytes, int] = {}
        pairs = [(first.setdefault(digest, place), place) for place, digest in _digests(stats)]
        copies = [stats.indices[list(pair)].tolist() for pair in pairs if pair[0] != pair[1]]
        found.append((len(copies) / max(1, len(stats.indices)), stats, copies))
    share, stats, copies = max(found, key=lambda each: each[0])
    evidence = f"{len(copies):,} of {len(stats.indices):,} images of {stats.name} are exact copies of others"
    evidence += f", such as samples {copies[0][0]} and {copies[0][1]}" if copies else ""
    fix = "remove copies, which count several times; check how the data set maps an index to an image"
    return graded(evidence, fix, fail=share > _MOSTLY, warn=share > _FEW)


@check("labels")
def conflicting_labels(context: CheckContext) -> Result:
    """The same image with different targets."""
    known: dict[bytes, tuple[str, object]] = {}
    conflicts = []
    for name, stats in context.stats.items():
        targets = stats.targets.tolist()
        for place, digest in _digests(stats):
            sample, target = known.setdefault(digest, (f"{int(stats.indices[place])} of {name}", targets[place]))
            if target != targets[place]:
                conflicts.append(f"{sample} is {target}, {int(stats.indices[place])} of {name} {targets[place]}")
    if not conflicts:
        return passed("no image has two targets")
    total = sum(len(stats.digests) for stats in context.stats.values())
    evidence = f"{len(conflicts):,} images have another target than an exact copy: {join_names(conflicts)}"
    fix = "decide which target is right; if there are many, check how images and targets are paired"
    return graded(evidence, fix, fail=len(conflicts) > _FEW * total, warn=True)


@check("labels", any_task=True)
def leakage(context: CheckContext) -> Result:
    """Held-out images that are also in the training split, bit for bit."""
    need(context.held_out_stats, "there is no other split")
    ours = {digest: int(context.train_stats.indices[place]) for place, digest in _digests(context.train_stats)}
    evidence, worst, most = [], "", (False, False)
    for stats in context.held_out_stats:
        shared = [place for place, digest in enumerate(stats.digests) if digest in ours]
        evidence.append(f"{len(shared):,} of {len(stats.digests):,} of {stats.name}")
        if shared:
            evidence[-1] += f" (sample {int(stats.indices[shared[0]])} is {ours[stats.digests[shared[0]]]} of train)"
        # Simple drawings, such as icons and digits, are alike now and then: a few of them are not leakage.
        share = len(shared) / max(1, len(stats.digests))
        grade = len(shared) > 2 and share > _LEAKED, len(shared) > 1 and share > _SOME
        most, worst = max((most, worst), (grade, stats.name))
    fix = f"remove them from train or from {worst}: a score on them says nothing about unseen images"
    return graded(f"{', '.join(evidence)} are also in train", fix, fail=most[0], warn=most[1])


@check("labels")
def near_duplicates(context: CheckContext) -> Result:
    """Held-out images that nearly equal training images: mirrored, turned, rescaled, brighter or compressed again."""
    train = context.train_stats
    need(context.held_out_stats and len(train.thumbnails), "there is no other split")
    size = train.thumbnails.shape[1:]
    need(size.numel() >= 128, f"images of {size.numel()} values are too small to compare")
    known, ours = set(train.digests), (~train.constant & train.finite).nonzero().flatten()
    found, counts = [], []
    for stats in context.held_out_stats:
        fresh = [place for place, digest in _digests(stats) if digest not in known and bool(stats.finite[place])]
        rows = torch.tensor(fresh[:_COMPARED], dtype=torch.int64)
        if not len(rows) or not len(ours) or stats.thumbnails.shape[1:] != size:
            continue
        grey = [each.mean(1, keepdim=True) for each in (stats.thumbnails[rows], train.thumbnails[ours])]
        correlation, place, same = nearest_matches(grey[0], grey[1])
        near = same.nonzero().flatten()
        counts.append(f"{len(near):,} of {len(rows):,} of {stats.name}")
        if len(near) > max(2, _NEARLY * len(rows)):
            a, b = int(train.indices[ours[place[near[0]]]]), int(stats.indices[rows[near[0]]])
            found.append(f"sample {b} of {stats.name} and {a} of train, correlation {float(correlation[near[0]]):.4f}")
    evidence = f"{', '.join(counts) or 'none'} are nearly the same picture as one of train"
    evidence += f", such as {found[0]}" if found else ""
    return graded(evidence, "keep pictures of the same object in one split", warn=bool(found))


@check("labels")
def target_scale(context: CheckContext) -> Result:
    """Regression targets that are all equal, or whose scale is far from 1."""
    need(not context.classes, "there are classes")
    values = context.train_stats.targets.double()
    need(len(values) and values.isfinite().all(), "there are targets that are not finite")
    mean, std = float(values.mean()), float(values.std())
    low, high = float(values.min()), float(values.max())
    evidence = f"mean {mean:.4g}, standard deviation {std:.4g}, from {low:.4g} to {high:.4g}"
    if std < 1e-6 * max(1.0, abs(mean)):
        return failed(evidence, "other targets: there is nothing to predict")
    if std > 30 or std < 0.03 or abs(mean) > 30 * std:
        return warned(evidence, "scale the targets to mean 0 and standard deviation 1")
    most_common = Counter(values.flatten().tolist()).most_common(1)[0][1] / values.numel()
    if most_common > 0.9:
        return warned(f"{evidence}; {most_common:.0%} of them are equal", "check the targets")
    return passed(evidence)
