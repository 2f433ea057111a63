"""What can be reached without the model: the commonest class, and a linear model on the pixels."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.build.metrics import build_metrics
from runner.engine.evaluation import evaluate
from runner.verbs.check.context import CheckContext, NotApplicable
from runner.verbs.check.result import Result, check, failed, passed, skipped, warned
from runner.verbs.check.split_stats import SplitStats

_ITERATIONS = 100
_FEWEST = 30  # held-out samples that a score is made of


@dataclass
class Baselines:
    """Scores on held-out samples: accuracies of classes, or roots of mean squared errors of numbers.

    Attributes:
        split: that they are of.
        samples: of it.
        constant: of always giving the commonest class, or the mean.
        linear: of a linear model on the pixels of the small copies.
        linear_train: the same on the samples that it was fitted to.
        confusion: how often class i was taken for class j, (C, C); None for numbers.
    """

    split: str
    samples: int
    constant: float
    linear: float
    linear_train: float
    confusion: np.ndarray | None


def _rows(look: SplitStats) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (N, D) and targets (N, ...) of the small copies, without those that are not finite."""
    good = look.finite[look.rows]
    return look.small[good].flatten(1).double().numpy(), look.targets[look.rows][good].numpy()


def _baselines(context: CheckContext) -> Baselines:
    """Fit and score both.

    Raises:
        NotApplicable: if there is nothing to fit or to score.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.preprocessing import StandardScaler

    held_out = [seen for seen in context.held_out_stats if len(seen.rows) >= _FEWEST]
    pixels, targets = _rows(context.train_stats)
    if not held_out:
        raise NotApplicable(f"there is no split of {_FEWEST} samples to score on")
    seen = held_out[0]
    theirs, right = _rows(seen)
    if len(targets) < _FEWEST or len(right) < _FEWEST or theirs.shape[1:] != pixels.shape[1:] or right.ndim != 1:
        raise NotApplicable("there are too few samples for a linear model")
    scaler = StandardScaler().fit(pixels)
    pixels, theirs = scaler.transform(pixels), scaler.transform(theirs)
    if not context.classes:
        mean = float(targets.mean())
        ridge = Ridge(alpha=1.0).fit(pixels, targets)
        errors = (mean - right, ridge.predict(theirs) - right, ridge.predict(pixels) - targets)
        constant, linear, linear_train = (float(np.sqrt(np.mean(error**2))) for error in errors)
        return Baselines(seen.name, len(right), constant, linear, linear_train, None)
    if len(np.unique(targets)) < 2:
        raise NotApplicable("there is one class only")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a baseline need not be the best there is
        model = LogisticRegression(max_iter=_ITERATIONS, C=0.1).fit(pixels, targets)
    guessed = model.predict(theirs)
    commonest = np.bincount(targets).argmax()
    confusion = np.zeros((context.classes, context.classes), dtype=np.int64)
    inside = (right >= 0) & (right < context.classes) & (guessed >= 0) & (guessed < context.classes)
    np.add.at(confusion, (right[inside], guessed[inside]), 1)
    constant, linear, linear_train = (
        float(np.mean(hit)) for hit in (right == commonest, guessed == right, model.predict(pixels) == targets)
    )
    return Baselines(seen.name, len(right), constant, linear, linear_train, confusion)


def _describe(found: Baselines) -> str:
    where = f"on {found.samples:,} of {found.split}"
    if found.confusion is None:
        return f"error of the mean {found.constant:.4g}, of ridge regression {found.linear:.4g}, {where}"
    return f"commonest class {found.constant:.1%}, logistic regression {found.linear:.1%}, {where}"


@check
def learnable(context: CheckContext) -> Result:
    """Targets that have nothing to do with the pixels, as far as a linear model can tell: shuffled, or put together wrongly."""
    found = context.cached(_baselines)
    evidence = _describe(found)
    if found.confusion is None:
        better = found.linear < found.constant * (1 - 1 / math.sqrt(found.samples))
    else:
        chance = max(found.constant, 1 / context.classes)
        better = found.linear > chance + 2 * math.sqrt(chance * (1 - chance) / found.samples)
    if better:
        return passed(f"{evidence}: scores to beat")
    fix = "check how images and targets are put together; if the task is only hard, a larger `samples` shows it"
    return warned(evidence, fix)


@check
def class_meaning(context: CheckContext) -> Result:
    """Classes that are numbered otherwise in the held-out split: a linear model takes one for another throughout."""
    from scipy.optimize import linear_sum_assignment

    found = context.cached(_baselines)
    if found.confusion is None:
        return skipped("there are no classes")
    ours, theirs = linear_sum_assignment(-found.confusion)
    renamed = float(found.confusion[ours, theirs].sum() / max(1, found.confusion.sum()))
    evidence = f"{found.linear:.1%} right in {found.split}, {renamed:.1%} if its classes are renamed as fits best"
    moved = [(int(a), int(b)) for a, b in zip(ours, theirs, strict=True) if a != b and found.confusion[a, b]]
    if renamed > found.linear + 0.2 and found.linear < 0.7 * found.linear_train:
        swaps = ", ".join(f"{a} is {b} in train" for a, b in moved[:3])
        return failed(f"{evidence}: {swaps}", f"number the classes of {found.split} as in train")
    return passed(evidence)


@check
def beats_baselines(context: CheckContext) -> Result:
    """A checkpoint (ckpt_path) that is no better than the commonest class or a linear model."""
    if context.found is None:
        return skipped("ckpt_path names no run to compare")
    found, training = context.cached(_baselines), context.training
    split = training.splits.eval_split(found.split)
    assert split is not None
    metrics: dict[str, Any] = build_metrics(context.config, training.task, training.device)
    limit = context.config.limit.eval_batches
    arguments = (training.model, split.loader, training.task.targets, training.loss, metrics)
    scores = evaluate(*arguments, training.precision.autocast, limit)
    name = "accuracy" if found.confusion is not None else "rmse"
    if name not in scores:
        return skipped(f"the run has no metric {name}")
    score = scores[name]
    evidence = f"{name} {score:.4g}; {_describe(found)}"
    sign = 1 if found.confusion is not None else -1
    if sign * score <= sign * found.constant:
        return failed(evidence, "this run has learned nothing: see what else fails here")
    if sign * score < sign * found.linear:
        return warned(evidence, "train for longer, or look at optimizer and model: a linear model does better")
    return passed(evidence)
