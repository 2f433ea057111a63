"""Scores that need no network: of the most frequent class, and of linear models of images and targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.lab.check.checks.batches import first_batches
from runner.lab.check.context import CheckContext
from runner.lab.check.limits import LIMITS
from runner.lab.check.result import Result, check, failed, graded, join_names, need
from runner.lab.check.sample import is_classes, thumbnails
from runner.run.evaluation import Evaluator

_MOST = 1000  # samples of a split that a linear model is fitted to, and scored on
_PENALTY = 100.0  # of weights of standardized features, against features that are nearly alike


def fit_linear(features: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Ridge regression of targets (N, K) on standardized features (N, D); the function takes other features."""
    features, targets = features.double(), targets.double()
    mean, std, middle = features.mean(0), features.std(0).clamp_min(1e-9), targets.mean(0)
    known = (features - mean) / std
    weights = torch.linalg.solve(
        known.T @ known + _PENALTY * torch.eye(known.shape[1], dtype=torch.float64), known.T @ (targets - middle)
    )
    return lambda others: ((others.double() - mean) / std) @ weights + middle


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


@dataclass
class Baselines:
    """Scores on held-out samples: accuracies for classes, root mean squared errors for regression."""

    split: str
    samples: int
    constant: float  # of always predicting the most frequent class, or the mean
    linear: float  # of a linear model on the pixels of the thumbnails
    related: float  # standard errors by which its predictions have to do with the targets; about 0 by chance
    of_classes: bool  # or of numbers

    def __str__(self) -> str:
        where = f"on {self.samples:,} of {self.split}"
        if self.of_classes:
            return f"most frequent class {self.constant:.1%}, linear model {self.linear:.1%}, {where}"
        return f"error of the mean {self.constant:.4g}, of a linear model {self.linear:.4g}, {where}"


def score_baselines(context: CheckContext) -> Baselines:
    """Fit and score both, on samples that were not fitted, as only that can be compared with the model."""
    stats = next((stats for stats in context.held_out_stats if len(stats.thumbnails) >= LIMITS.scored), None)
    need(stats, f"there is no split of {LIMITS.scored} samples to score on")
    assert stats is not None
    (pixels, targets), (theirs, right) = (
        each.pictures(context.config.samples) for each in (context.train_stats, stats)
    )
    enough = min(len(targets), len(right)) >= LIMITS.scored and theirs.shape[1:] == pixels.shape[1:] and right.ndim == 1
    need(enough, "there are too few samples for a linear model")
    need(not context.classes or len(torch.unique(targets)) > 1, "there is only one class")
    classes = max(context.classes, 1 + int(max(targets.max(), right.max()))) if context.classes else 0
    wanted, truth = ((F.one_hot(y.long(), classes) if classes else y[:, None]).double() for y in (targets, right))
    guessed = fit_linear(pixels.flatten(1), wanted)(theirs.flatten(1))
    # Whether predictions have anything to do with the targets, also where the score is no better than a guess
    related = ((guessed - guessed.mean(0)) * (truth if classes else truth - truth.mean(0))).sum(1)
    if classes:
        constant, linear = (
            float((right == targets.mode().values).double().mean()),
            float((guessed.argmax(1) == right).double().mean()),
        )
    else:
        constant, linear = (float((truth - each).square().mean().sqrt()) for each in (wanted.mean(0), guessed))
    errors = float(related.mean() / (related.std() / math.sqrt(len(related))).clamp_min(1e-12))
    return Baselines(stats.name, len(right), constant, linear, errors, bool(classes))


@check("baselines")
def learnable(context: CheckContext) -> Result:
    """Targets that a linear model cannot predict from the pixels at all: shuffled, or paired with the wrong images."""
    found = context.cached(score_baselines)
    fix = "check how images and targets are paired; if the task is only hard, a larger `samples` shows it"
    evidence = f"{found}; predictions and targets are related by {found.related:.1f} standard errors"
    return graded(evidence, fix, warn=found.related < LIMITS.related)


@check("baselines")
def beats_baselines(context: CheckContext) -> Result:
    """A checkpoint (ckpt_path) that is not better than the most frequent class or a linear model."""
    need(context.found is not None, "ckpt_path names no run to compare")
    found = context.cached(score_baselines)
    scores = Evaluator(context.training, warn=lambda line: None, interrupted=lambda: False).weights(found.split)
    name, sign = (f"{found.split}/accuracy", 1) if found.of_classes else (f"{found.split}/rmse", -1)
    need(name in scores, f"the run has no metric {name}")
    score, evidence = sign * scores[name], f"{name} {scores[name]:.4g}; {found}"
    if score <= sign * found.constant:
        return failed(evidence, "this run has learned nothing: see which other checks fail")
    fix = "train for longer, or check optimizer and model: a linear model is better"
    return graded(evidence, fix, warn=score < sign * found.linear)


@check("baselines")
def split_targets(context: CheckContext) -> Result:
    """A held-out split whose targets do not match its images, while those of train do."""
    need(context.classes, "there are no classes")
    pictures = {name: stats.pictures(_MOST) for name, stats in context.stats.items()}
    usable = {
        name: (image_features(x), y.long())
        for name, (x, y) in pictures.items()
        if len(x) >= LIMITS.fitted and is_classes(y)
    }
    need("train" in usable, f"fewer than {LIMITS.fitted} training images of one shape could be read")
    features, targets = usable.pop("train")
    need(len(torch.unique(targets)) > 1 and usable, f"there is one class, or no other split of {LIMITS.fitted} images")
    classes = 1 + max(int(y.max()) for y in (targets, *(y for _, y in usable.values())))
    wanted = F.one_hot(targets, classes)

    def accuracy(rows: slice, images: Tensor, right: Tensor) -> float:
        return float((fit_linear(features[rows], wanted[rows])(images).argmax(1) == right).double().mean())

    known = accuracy(slice(0, None, 2), features[1::2], targets[1::2])
    scores, bad = [f"{known:.0%} on train"], []
    for name, (theirs, right) in usable.items():
        if theirs.shape[1] == features.shape[1]:
            score, chance = accuracy(slice(None), theirs, right), float(torch.bincount(right).max()) / len(right)
            scores.append(f"{score:.0%} on {name}")
            noise = (chance / len(right)) ** 0.5
            if known > chance + 0.25 and score < chance + max(LIMITS.gain * (known - chance), 2 * noise):
                bad.append(name)
    fix = f"check how images and targets of {join_names(bad)} are paired, and its order of classes"
    return graded(f"the accuracy of a linear model is {', '.join(scores)}", fix, fail=bool(bad))


def _turned(images: Tensor) -> dict[str, Tensor]:
    """Images (N, C, H, W) as they are, and in all other orientations of the same shape."""
    turns = (0, 90, 180, 270) if images.shape[2] == images.shape[3] else (0, 180)
    turned = {turn: images.rot90(turn // 90, (2, 3)) for turn in turns}
    plain = {f"turned by {turn} degrees": each for turn, each in turned.items()}
    return plain | {f"mirrored and turned by {turn} degrees": each.flip(-1) for turn, each in turned.items()}


@check("baselines")
def orientation(context: CheckContext) -> Result:
    """Held-out images, as they are evaluated, that are turned or mirrored against training images."""
    train, found = thumbnails(context.cached(first_batches).images), []
    need(len(train) >= LIMITS.fitted, f"fewer than {LIMITS.fitted} training images")
    parts = [image_features(each[::2]) for each in _turned(train).values()]
    upright = torch.cat([torch.full((len(part), 1), float(place == 0)) for place, part in enumerate(parts)])
    score = fit_linear(torch.cat(parts), upright)

    def better(images: Tensor) -> dict[str, float]:
        """For each orientation the share of images that look more like training images in it than as they are."""
        plain, *others = (score(image_features(each)) for each in _turned(images).values())
        return {
            name: float((each > plain).double().mean())
            for name, each in zip([*_turned(images)][1:], others, strict=True)
        }

    known = better(train[1::2])
    for stats in context.held_out_stats:
        indices = context.readable(stats.name, LIMITS.together)
        if len(indices) >= LIMITS.scored:
            images = thumbnails(context.read(stats.name, indices).images.float().cpu())
            if images.shape[1:] == train.shape[1:]:
                found += [(share - known[name], share, name, stats.name) for name, share in better(images).items()]
    need(found, f"there is no other split of {LIMITS.scored} images of the size of training images")
    _, share, name, split = max(found)
    evidence = f"{share:.0%} of {split} look more like training images when they are {name}, {known[name]:.0%} of train"
    warn = share > LIMITS.turned and known[name] < 1 - LIMITS.turned
    return graded(evidence, f"read and transform {split} as train; see transform.eval", warn=warn)
