"""Scores that need no network: of the most frequent class, and of linear models on pixels and on their features."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runner.lab.check.context import CheckContext
from runner.lab.check.result import NotApplicable, Result, check, failed, graded, need, passed
from runner.run.evaluation import Evaluator

_FEWEST = 30  # held-out samples of a score
_ERRORS = 3.0  # standard errors beyond chance


def image_features(images: Tensor) -> Tensor:
    """Features that tell classes apart wherever the object is: (N, D).

    Mean and deviation of each channel over the whole image and its parts, and histograms of edge directions.
    """
    parts = []
    for grid in (1, 2, 4):
        mean = F.adaptive_avg_pool2d(images, grid)
        square = F.adaptive_avg_pool2d(images.square(), grid)
        parts += [mean.flatten(1), (square - mean.square()).clamp_min(0).sqrt().flatten(1)]
    grey = images.mean(1)
    if min(grey.shape[1:]) > 2:
        down, right = (grey[:, 2:, 1:-1] - grey[:, :-2, 1:-1]), (grey[:, 1:-1, 2:] - grey[:, 1:-1, :-2])
        size, angle = (down.square() + right.square()).sqrt(), torch.atan2(down, right)
        bins = ((angle / torch.pi + 1) * 4).long().clamp(0, 7)
        edges = torch.stack([torch.where(bins == each, size, 0.0) for each in range(8)], 1)
        parts += [F.adaptive_avg_pool2d(edges, grid).flatten(1) for grid in (1, 2, 4)]
    return torch.cat(parts, 1)


def linear_accuracy(features: Tensor, targets: Tensor, others: Tensor, other_targets: Tensor) -> float:
    """Accuracy on other samples of a linear model that is fitted to features (N, D) and classes (N,)."""
    from sklearn.linear_model import RidgeClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about singular matrices
        model = make_pipeline(StandardScaler(), RidgeClassifier(alpha=100.0)).fit(features.numpy(), targets.numpy())
        return float(model.score(others.numpy(), other_targets.numpy()))


def chance_level(targets: Tensor) -> float:
    """Accuracy of always predicting the most frequent class."""
    return float(torch.bincount(targets.clamp_min(0)).max()) / len(targets)


@dataclass
class Baselines:
    """Scores on held-out samples: accuracies for classes, root mean squared errors for regression."""

    split: str
    samples: int
    constant: float  # of always predicting the most frequent class, or the mean
    linear: float  # of a linear model on the pixels of the thumbnails
    linear_train: float  # the same on the samples that it was fitted to
    related: float  # standard errors by which its predictions have to do with the targets; about 0 by chance
    confusion: np.ndarray | None  # how often class i was predicted as class j, (C, C); None for regression

    def __str__(self) -> str:
        where = f"on {self.samples:,} of {self.split}"
        if self.confusion is None:
            return f"error of the mean {self.constant:.4g}, of ridge regression {self.linear:.4g}, {where}"
        return f"most frequent class {self.constant:.1%}, logistic regression {self.linear:.1%}, {where}"


def score_baselines(context: CheckContext) -> Baselines:
    """Fit and score both."""
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.metrics import accuracy_score, confusion_matrix, root_mean_squared_error
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # Scored on data that were not fitted, as only that can be compared with the model
    stats = next((stats for stats in context.held_out_stats if len(stats.thumbnails) >= _FEWEST), None)
    if stats is None:
        raise NotApplicable(f"there is no split of {_FEWEST} samples to score on")
    samples = [each.pictures(context.config.samples)[:2] for each in (context.train_stats, stats)]
    (pixels, targets), (theirs, right) = ((images.flatten(1).double().numpy(), y.numpy()) for images, y in samples)
    enough = min(len(targets), len(right)) >= _FEWEST and theirs.shape[1:] == pixels.shape[1:] and right.ndim == 1
    need(enough, "there are too few samples for a linear model")
    need(not context.classes or len(np.unique(targets)) > 1, "there is only one class")
    constant, linear, score = (
        (DummyClassifier(), LogisticRegression(max_iter=100, C=0.1), accuracy_score)
        if context.classes
        else (DummyRegressor(), Ridge(alpha=1.0), root_mean_squared_error)
    )
    # Standardised pixels, as the penalty of a linear model depends on their scale
    model = make_pipeline(StandardScaler(), linear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a baseline need not be optimal
        model.fit(pixels, targets)
    guessed, trivial = model.predict(theirs), constant.fit(pixels, targets).predict(theirs)
    # Whether predictions have anything to do with the targets, also where the score is no better than a guess
    related = (guessed - guessed.mean()) * (right - right.mean())
    if context.classes:  # how much more probable each class is for its samples than for all
        probable = model.predict_proba(theirs) - model.predict_proba(theirs).mean(0)
        related = (probable * (right[:, None] == model.classes_)).sum(1)
    return Baselines(
        stats.name,
        samples=len(right),
        constant=float(score(right, trivial)),
        linear=float(score(right, guessed)),
        linear_train=float(score(targets, model.predict(pixels))),
        related=float(related.mean() / max(1e-12, related.std() / math.sqrt(len(related)))),
        confusion=confusion_matrix(right, guessed, labels=range(context.classes)) if context.classes else None,
    )


@check("baselines")
def learnable(context: CheckContext) -> Result:
    """Targets that a linear model cannot predict from the pixels at all: shuffled, or paired with the wrong images."""
    found = context.cached(score_baselines)
    fix = "check how images and targets are paired; if the task is only hard, a larger `samples` shows it"
    evidence = f"{found}; predictions and targets are related by {found.related:.1f} standard errors"
    return graded(evidence, fix, warn=found.related < _ERRORS)


@check("baselines")
def class_meaning(context: CheckContext) -> Result:
    """Classes with other numbers in the held-out split: a linear model confuses them systematically."""
    from scipy.optimize import linear_sum_assignment

    found = context.cached(score_baselines)
    if found.confusion is None:
        raise NotApplicable("there are no classes")
    ours, theirs = linear_sum_assignment(-found.confusion)
    renamed = float(found.confusion[ours, theirs].sum() / max(1, found.confusion.sum()))
    evidence = f"accuracy {found.linear:.1%} on {found.split}, {renamed:.1%} if its classes are renamed to fit best"
    if renamed > found.linear + 0.2 and found.linear < 0.7 * found.linear_train:
        moved = [(int(a), int(b)) for a, b in zip(ours, theirs, strict=True) if a != b and found.confusion[a, b]]
        swaps = ", ".join(f"{a} is {b} in train" for a, b in moved[:3])
        return failed(f"{evidence}: {swaps}", f"number the classes of {found.split} as in train")
    return passed(evidence)


@check("baselines")
def beats_baselines(context: CheckContext) -> Result:
    """A checkpoint (ckpt_path) that is not better than the most frequent class or a linear model."""
    need(context.found is not None, "ckpt_path names no run to compare")
    found = context.cached(score_baselines)
    scores = Evaluator(context.training, warn=lambda line: None, interrupted=lambda: False).weights(found.split)
    name, sign = (f"{found.split}/accuracy", 1) if found.confusion is not None else (f"{found.split}/rmse", -1)
    need(name in scores, f"the run has no metric {name}")
    score, evidence = sign * scores[name], f"{name} {scores[name]:.4g}; {found}"
    if score <= sign * found.constant:
        return failed(evidence, "this run has learned nothing: see which other checks fail")
    fix = "train for longer, or check optimizer and model: a linear model is better"
    return graded(evidence, fix, warn=score < sign * found.linear)
