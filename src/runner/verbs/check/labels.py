"""Checks of the targets, and of images that occur more than once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from runner.verbs.check.context import CheckContext
from runner.verbs.check.near_duplicates import nearest_matches
from runner.verbs.check.result import Result, check, failed, join_names, passed, skipped, warned
from runner.verbs.check.split_stats import SplitStats

_FEW = 0.005  # share of a split above which images that occur twice are no accident
_NEARLY = 0.01  # share of a split above which pictures that are nearly alike are no accident
_MOSTLY = 0.5  # share of copies that no collection of pictures has
_EXPECTED = 10  # samples of a class that a split should have by the shares of train, where none is no accident


@check
def target_range(context: CheckContext) -> Result:
    """Class numbers that there are no classes for, or targets that are not finite."""
    if not context.classes:
        bad = sum(int((~seen.targets.float().isfinite()).sum()) for seen in context.stats.values())
        if bad:
            return failed(f"{bad:,} targets are not finite", "remove these samples")
        return passed("every target is finite")
    for name, targets in context.labels.items():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= context.classes:
            wrong = (targets < 0) | (targets >= context.classes)
            evidence = (
                f"{int(wrong.sum()):,} targets of {name} are outside 0 to {context.classes - 1}: from {low} to {high}"
            )
            one_off = low == 1 and high == context.classes
            return failed(evidence, "count classes from 0: subtract 1" if one_off else "number the classes from 0 on")
    if not context.labels:
        return skipped("the targets are not class numbers")
    return passed(f"0 to {context.classes - 1} in {', '.join(context.labels)}")


@check
def missing_classes(context: CheckContext) -> Result:
    """Classes without a training sample, such as those of labels that count from 1."""
    if not context.classes or "train" not in context.labels:
        return skipped("the targets are not class numbers")
    present = {name: set(targets.tolist()) for name, targets in context.labels.items()}
    empty = [index for index in range(context.classes) if index not in present["train"]]
    if not empty:
        counts = torch.bincount(context.labels["train"].clamp_min(0), minlength=context.classes).double()
        for name, targets in context.labels.items():
            expected = counts / counts.sum() * len(targets)
            gone = [n for n in range(context.classes) if n not in present[name] and float(expected[n]) >= _EXPECTED]
            if gone:
                told = f"no sample of {name} is of class {join_names([str(each) for each in gone])}"
                told += f", where the shares of train give {float(expected[gone[0]]):.0f}"
                return warned(told, f"data.split.stratified=true, or samples of every class in {name}")
        return passed(f"all {context.classes} classes have training samples")
    evidence = (
        f"no training sample of {len(empty)} of {context.classes} classes: {join_names([str(each) for each in empty])}"
    )
    if empty == [0]:
        return failed(f"{evidence}; labels run from 1 to {max(present['train'])}", "count classes from 0: subtract 1")
    others = [name for name, found in present.items() if name != "train" and found & set(empty)]
    if others:
        return failed(
            f"{evidence}; {', '.join(others)} has samples of them", "data.split.stratified=true, or other data"
        )
    return warned(evidence, "leave these classes out, or add samples")


@check
def class_balance(context: CheckContext) -> Result:
    """One class only, or classes of very different sizes, in one split or between splits."""
    if not context.classes or "train" not in context.labels:
        return skipped("the targets are not class numbers")
    counts = torch.bincount(context.labels["train"].clamp_min(0), minlength=context.classes).double()
    shares = counts / counts.sum()
    low, high = float(counts[counts > 0].min()), float(counts.max())
    evidence = f"{low:,.0f} to {high:,.0f} training samples a class, the largest is {float(shares.max()):.1%}"
    if int((counts > 0).sum()) == 1:
        return failed(
            f"every training sample is of class {int(counts.argmax())}", "other data: there is nothing to tell apart"
        )
    for name, targets in context.labels.items():
        theirs = torch.bincount(targets.clamp_min(0), minlength=context.classes).double()[: context.classes]
        apart = float((theirs / theirs.sum() - shares[: context.classes]).abs().sum()) / 2
        # By chance alone the shares of C classes in n samples are about sqrt(C / n) / 2 apart.
        if len(targets) > 50 and apart > 0.15 + (context.classes / len(targets)) ** 0.5:
            evidence = f"the classes of {name} are distributed otherwise: {apart:.0%} of the samples would have to move"
            return warned(evidence, "data.split.stratified=true, or splits of the same source")
    if float(shares.max()) > 0.9 or high > 50 * low:
        return warned(evidence, "loss.class_weights=balanced, and other metrics than accuracy")
    return passed(evidence)


@check
def class_order(context: CheckContext) -> Result:
    """Splits that list their classes in another order, so that numbers mean something else."""
    named = {
        name: tuple(map(str, getattr(seen.dataset, "classes", None) or ())) for name, seen in context.stats.items()
    }
    ours = named["train"]
    for name, theirs in named.items():
        if ours and theirs and theirs != ours:
            place = next(
                (n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(theirs)
            )
            first = (
                f"class {place} is {' and '.join(repr(c[place]) if place < len(c) else 'none' for c in (ours, theirs))}"
            )
            return failed(f"{first} in train and {name}", f"give {name} the classes of train, in their order")
    return passed("the same in every split") if ours else skipped("the data set names no classes")


def _pictures(look: SplitStats) -> list[tuple[int, bytes]]:
    """Place and digest of each image that shows something: all constant ones are the same picture."""
    return [(place, look.digests[place]) for place in (~look.constant).nonzero().flatten().tolist()]


def _repeats(look: SplitStats) -> tuple[int, list[int]]:
    """How many images are copies of earlier ones, and the identities of the first pair; constant images do not count."""
    first: dict[bytes, int] = {}
    copies = 0
    pair: list[int] = []
    for place, digest in _pictures(look):
        if digest in first:
            copies += 1
            pair = pair or [int(look.indices[first[digest]]), int(look.indices[place])]
        else:
            first[digest] = place
    return copies, pair


@check
def duplicates(context: CheckContext) -> Result:
    """The same image several times in a split."""
    found = {name: _repeats(seen) for name, seen in context.stats.items()}
    name = max(found, key=lambda each: found[each][0] / max(1, len(context.stats[each].indices)))
    copies, pair = found[name]
    count = len(context.stats[name].indices)
    evidence = f"{copies:,} of {count:,} images of {name} are exact copies of others"
    if copies > _MOSTLY * count:
        fix = "look at how the data set finds an image by its number: most samples are the same pictures"
        return failed(f"{evidence}, such as samples {pair[0]} and {pair[1]}", fix)
    if copies > _FEW * count:
        return warned(f"{evidence}, such as samples {pair[0]} and {pair[1]}", "remove copies: they count several times")
    return passed(evidence)


@check
def conflicting_labels(context: CheckContext) -> Result:
    """The same image with different targets."""
    known: dict[bytes, tuple[str, int, Any]] = {}
    clashes, example = 0, ""
    for name, seen in context.stats.items():
        targets = seen.targets.tolist()
        for place, digest in _pictures(seen):
            target = targets[place]
            before = known.setdefault(digest, (name, int(seen.indices[place]), target))
            if before[2] != target:
                clashes += 1
                where = f"{before[1]} of {before[0]} and {int(seen.indices[place])} of {name}"
                example = example or f"samples {where} are {before[2]} and {target}"
    if not clashes:
        return passed("no image has two targets")
    total = sum(len(seen.digests) for seen in context.stats.values())
    evidence = f"{clashes:,} images have another target than an exact copy: {example}"
    if clashes > _FEW * total:
        return failed(evidence, "settle which target is right; check how images and targets are put together")
    return warned(evidence, "settle which target is right")


@check
def leakage(context: CheckContext) -> Result:
    """Held-out images that are trained on as well, bit for bit."""
    if not context.held_out_stats:
        return skipped("there is no other split")
    ours = {digest: place for place, digest in _pictures(context.train_stats)}
    worst = (0.0, 0, "", "")
    counts = []
    for seen in context.held_out_stats:
        shared = [(ours[digest], place) for place, digest in enumerate(seen.digests) if digest in ours]
        counts.append(f"{len(shared):,} of {len(seen.digests):,} of {seen.name}")
        if shared:
            a, b = int(context.train_stats.indices[shared[0][0]]), int(seen.indices[shared[0][1]])
            example = f"such as sample {b} of {seen.name}, which is {a} of train"
            worst = max(worst, (len(shared) / len(seen.digests), len(shared), seen.name, example))
    evidence = f"{', '.join(counts)} are in train as well"
    share, count, name, example = worst
    fix = f"remove them from train or from {name}: scores on them are not of unseen images"
    if share > _FEW and count > 1:
        return failed(f"{evidence}, {example}", fix)
    return warned(f"{evidence}, {example}", fix) if count else passed(evidence)


@check
def near_duplicates(context: CheckContext) -> Result:
    """Held-out images that are nearly those of the training split: mirrored, shifted, rescaled, brighter or compressed again."""
    if not context.held_out_stats or not len(context.train_stats.small):
        return skipped("there is no other split")
    train = context.train_stats
    if train.small.shape[1:].numel() < 128:
        return skipped(f"images of {train.small.shape[1:].numel()} values are too small to tell pictures apart")
    own = {train.digests[row] for row in train.rows.tolist()}
    shown = (~train.constant[train.rows] & train.finite[train.rows]).nonzero().flatten()
    counts, worst = [], (0, 0, "", "")
    for seen in context.held_out_stats:
        fresh = [
            n for n, row in enumerate(seen.rows.tolist()) if seen.digests[row] not in own and not seen.constant[row]
        ]
        if not fresh or not len(shown) or seen.small.shape[1:] != train.small.shape[1:]:
            continue
        found = nearest_matches(seen.small[fresh], train.small[shown])
        near = found.same.nonzero().flatten().tolist()
        counts.append(f"{len(near):,} of {len(fresh):,} of {seen.name}")
        if near:
            b = int(seen.indices[seen.rows[fresh[near[0]]]])
            a = int(train.indices[train.rows[shown[found.place[near[0]]]]])
            told = f"correlation {float(found.correlation[near[0]]):.4f}"
            worst = max(
                worst, (len(near), len(fresh), seen.name, f"such as sample {b} of {seen.name} and {a} of train, {told}")
            )
    count, of, name, example = worst
    evidence = f"{', '.join(counts) or 'none'} are nearly the same picture as one of train"
    if count > max(2, _NEARLY * of):
        return warned(f"{evidence}, {example}", f"keep pictures of the same thing in one split; look at {name}")
    return passed(evidence)


@check
def target_scale(context: CheckContext) -> Result:
    """Numbers to predict that are far from a spread of 1, or all the same."""
    if context.classes:
        return skipped("there are classes")
    values = context.train_stats.targets.double()
    if not len(values) or not bool(values.isfinite().all()):
        return skipped("there are targets that are not finite")
    mean, std = float(values.mean()), float(values.std())
    evidence = f"mean {mean:.4g}, deviation {std:.4g}, from {float(values.min()):.4g} to {float(values.max()):.4g}"
    if std < 1e-6 * max(1.0, abs(mean)):
        return failed(evidence, "other targets: there is nothing to predict")
    most_common = Counter(values.flatten().tolist()).most_common(1)[0][1] / values.numel()
    if std > 30 or std < 0.03 or abs(mean) > 30 * std:
        return warned(evidence, "scale the targets to a mean of 0 and a deviation of 1")
    if most_common > 0.9:
        return warned(f"{evidence}; {most_common:.0%} of them are the same", "check the targets")
    return passed(evidence)
