"""Checks of the targets, and of images that occur more than once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from runner.lab.check.context import CheckContext
from runner.lab.check.result import LIMITS, Result, check, failed, graded, join_names, need, none_of, passed, warned
from runner.lab.check.sample import SplitStats, unit_vectors

_OTHERS = 3  # rank of that other picture, so that two copies of one picture do not hide each other
_SIDE = 9  # pixels of the smallest thumbnails that have detail


@check("labels")
def target_range(context: CheckContext) -> Result:
    """Class numbers that are out of range, or targets that are not finite."""
    if not context.classes or _label_shares(context):
        bad = sum(int((~stats.targets.float().isfinite()).sum()) for stats in context.stats.values())
        evidence = f"{bad:,} targets are not finite" if bad else "all are finite"
        return graded(evidence, "remove these samples", fail=bad > 0)
    need(context.labels, "the targets are not class numbers")
    top = context.classes - 1
    for name, targets in context.labels.items():
        if wrong := int(((targets < 0) | (targets > top)).sum()):
            evidence = f"{wrong:,} targets of {name} are outside 0 to {top}: "
            evidence += f"from {int(targets.min())} to {int(targets.max())}"
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
        return none_of(never, "labels have no training sample", "remove them, or add samples", otherwise, warn=True)
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
        if gone := ((theirs == 0) & (expected >= LIMITS.expected)).nonzero().flatten().tolist():
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
        warn = not LIMITS.rare_label <= low <= high <= 1 - LIMITS.rare_label
    else:
        counts = _class_counts(context)
        ours = counts["train"]
        least, most, largest = float(ours[ours > 0].min()), float(ours.max()), float(ours.max() / ours.sum())
        if int((ours > 0).sum()) == 1:
            evidence = f"every training sample is of class {int(ours.argmax())}"
            return failed(evidence, "use other data: there is nothing to distinguish")
        for name, theirs in counts.items():
            apart = float((theirs / theirs.sum() - ours / ours.sum()).abs().sum()) / 2
            samples = len(context.labels[name])
            # By chance alone the shares of C classes in n samples are about sqrt(C / n) / 2 apart.
            if samples > 50 and apart > LIMITS.shares_apart + (context.classes / samples) ** 0.5:
                moved = f"{apart:.0%} of the samples would have to move"
                fix = "data.split.stratified=true, or splits from the same source"
                return warned(f"the class shares of {name} differ from train: {moved}", fix)
        evidence = f"{least:,.0f} to {most:,.0f} training samples per class, the largest has {largest:.1%}"
        fix = "loss.class_weights=balanced, and other metrics than accuracy"
        warn = largest > LIMITS.frequent or most > LIMITS.imbalance * least
    return passed(f"{evidence}; handled by {' and '.join(handled)}") if handled else graded(evidence, fix, warn=warn)


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
    return graded(evidence, fix, fail=share > LIMITS.copies_fail, warn=share > LIMITS.copies_warn)


@check("labels", any_task=True)
def leakage(context: CheckContext) -> Result:
    """Held-out images that are also in the training split, bit for bit."""
    need(context.held_out_stats, "there is no other split")
    ours = {digest: int(context.train_stats.indices[place]) for place, digest in _digests(context.train_stats)}
    evidence, grades = [], []
    for stats in context.held_out_stats:
        shared = [place for place, digest in enumerate(stats.digests) if digest in ours]
        evidence.append(f"{len(shared):,} of {len(stats.digests):,} of {stats.name}")
        if shared:
            evidence[-1] += f" (sample {int(stats.indices[shared[0]])} is {ours[stats.digests[shared[0]]]} of train)"
        # Simple drawings, such as icons and digits, are alike now and then: a few of them are not leakage.
        share = len(shared) / max(1, len(stats.digests))
        fail, warn = len(shared) > 2 and share > LIMITS.leaked_fail, len(shared) > 1 and share > LIMITS.leaked_warn
        grades.append((fail, warn, stats.name))
    fail, warn, worst = max(grades)
    fix = f"remove them from train or from {worst}: a score on them says nothing about unseen images"
    return graded(f"{', '.join(evidence)} are also in train", fix, fail=fail, warn=warn)


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
        rows = torch.tensor(fresh[: LIMITS.compared], dtype=torch.int64)
        if not len(rows) or not len(ours) or stats.thumbnails.shape[1:] != size:
            continue
        grey = [each.mean(1, keepdim=True) for each in (stats.thumbnails[rows], train.thumbnails[ours])]
        correlation, place, same = nearest_matches(grey[0], grey[1])
        near = same.nonzero().flatten()
        counts.append(f"{len(near):,} of {len(rows):,} of {stats.name}")
        if len(near) > max(2, LIMITS.near * len(rows)):
            a, b = int(train.indices[ours[place[near[0]]]]), int(stats.indices[rows[near[0]]])
            found.append(f"sample {b} of {stats.name} and {a} of train, correlation {float(correlation[near[0]]):.4f}")
    evidence = f"{', '.join(counts) or 'none'} are nearly the same picture as one of train"
    evidence += f", such as {found[0]}" if found else ""
    return graded(evidence, "keep pictures of the same object in one split", warn=bool(found))


def nearest_matches(queries: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find grey thumbnails (Q, 1, h, w) among others (N, 1, h, w).

    Returns for each the correlation with the most similar picture, the place of that among the others, and whether both are
    the same picture, (Q,) each.

    Unrelated photographs can have a correlation of 0.9, and images of one pattern with noise 0.99, so a correlation alone
    does not decide. The same picture occurs once: other pictures are much less similar to it.
    """
    correlation, place = _correlations(unit_vectors, queries, known).max(1)
    same = correlation > LIMITS.same_thumbnail
    if min(known.shape[2:]) >= _SIDE and len(known) >= _OTHERS:
        best, order = _correlations(_detail, queries, known).topk(_OTHERS, 1)
        found = (best[:, 0] > LIMITS.same_detail) & (1 - best[:, 0] < LIMITS.nearer * (1 - best[:, -1])) & ~same
        correlation, place = torch.where(found, best[:, 0], correlation), torch.where(found, order[:, 0], place)
        same |= found
    return correlation, place, same


def _correlations(vectors: Callable[[Tensor], Tensor], queries: Tensor, known: Tensor) -> Tensor:
    """The correlation of each query, turned and mirrored as it fits best, with each of the others: (Q, N)."""
    turns = range(4) if queries.shape[2] == queries.shape[3] else (0, 2)
    copies = [copy for turn in turns for copy in (queries.rot90(turn, (2, 3)), queries.rot90(turn, (2, 3)).flip(-1))]
    others = vectors(known).T
    return torch.stack([vectors(copy) @ others for copy in copies]).amax(0)


def _detail(images: Tensor) -> Tensor:
    """Unit vectors without smooth gradients, which any two photographs have in common: polynomials of degree 2."""
    down, right = torch.meshgrid(*(torch.linspace(-1, 1, side) for side in images.shape[2:]), indexing="ij")
    terms = [torch.ones_like(down), down, right, down * right, down.square(), right.square()]
    basis, flat = torch.linalg.qr(torch.stack(terms).flatten(1).T).Q, images.flatten(1)
    return unit_vectors(flat - flat @ basis @ basis.T)


@check("labels")
def target_scale(context: CheckContext) -> Result:
    """Regression targets that are all equal, whose scale is far from 1, or that another split has in another unit."""
    need(not context.classes, "there are classes")
    from scipy.stats import ks_2samp

    values = context.train_stats.targets.double()
    need(len(values) and values.isfinite().all(), "there are targets that are not finite")
    mean, std = float(values.mean()), float(values.std())
    low, high = float(values.min()), float(values.max())
    evidence = f"mean {mean:.4g}, standard deviation {std:.4g}, from {low:.4g} to {high:.4g}"
    if std < 1e-6 * max(1.0, abs(mean)):
        return failed(evidence, "other targets: there is nothing to predict")
    scale = LIMITS.target_scale
    if not 1 / scale <= std <= scale or abs(mean) > scale * std:
        return warned(evidence, "scale the targets to mean 0 and standard deviation 1")
    most_common = Counter(values.flatten().tolist()).most_common(1)[0][1] / values.numel()
    if most_common > LIMITS.frequent:
        return warned(f"{evidence}; {most_common:.0%} of them are equal", "check the targets")
    for stats in context.held_out_stats:
        theirs = stats.targets.double()
        if min(len(values), len(theirs)) >= LIMITS.fewest and bool(theirs.isfinite().all()):
            gap = float(ks_2samp(values.flatten().numpy(), theirs.flatten().numpy(), method="asymp").statistic)
            if gap > LIMITS.shifted + 1.6 * (1 / len(values) + 1 / len(theirs)) ** 0.5:
                other = f"mean {float(theirs.mean()):.4g}, standard deviation {float(theirs.std()):.4g} in {stats.name}"
                return warned(f"{evidence}; {other}", "scale the targets of every split with the statistics of train")
    return passed(evidence)
