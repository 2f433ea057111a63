"""Comparisons of the targets of the splits."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.lab.check.checks.baselines import chance_level, image_features, linear_accuracy
from runner.lab.check.context import CheckContext
from runner.lab.check.result import NotApplicable, Result, check, graded, join_names, need
from runner.lab.check.split_stats import SplitStats, is_classes

_LEAST, _MOST = 60, 1000  # samples for fitting and scoring a linear model


def _features(stats: SplitStats, least: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Features, classes and indices of the thumbnails of a split; None without classes, or if there are too few."""
    images, targets, indices = stats.pictures(_MOST)
    enough = len(images) >= least and is_classes(targets)
    return (image_features(images), targets.long(), indices) if enough else None


def _train_features(context: CheckContext, least: int) -> tuple[Tensor, Tensor, Tensor]:
    need(context.classes, "there are no classes")
    found = _features(context.train_stats, least)
    if found is None or len(torch.unique(found[1])) < 2:
        raise NotApplicable(f"fewer than {least} training images of one shape could be read")
    return found


@check("splits")
def split_targets(context: CheckContext) -> Result:
    """A held-out split whose targets do not match its images, while those of train do."""
    features, targets, _ = _train_features(context, _LEAST)
    known = linear_accuracy(features[::2], targets[::2], features[1::2], targets[1::2])
    scores, bad = [f"{known:.0%} on train"], []
    for stats in context.held_out_stats:
        theirs = _features(stats, _LEAST)
        if theirs is None or theirs[0].shape[1] != features.shape[1]:
            continue
        right, chance = linear_accuracy(features, targets, *theirs[:2]), chance_level(theirs[1])
        scores.append(f"{right:.0%} on {stats.name}")
        noise = (chance / len(theirs[1])) ** 0.5
        if known > chance + 0.25 and right < chance + max(0.2 * (known - chance), 2 * noise):
            bad.append(stats.name)
    need(len(scores) > 1, f"there is no other split of {_LEAST} images")
    fix = f"check how images and targets of {join_names(bad)} are paired, and its order of classes"
    return graded(f"the accuracy of a linear model is {', '.join(scores)}", fix, fail=bool(bad))
