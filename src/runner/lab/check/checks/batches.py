"""Checks of training batches, and scores that need no network: of the most frequent class, and of linear models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.lab.check.context import CheckContext, shared
from runner.lab.check.result import LIMITS, Result, check, failed, graded, join_names, need
from runner.lab.check.sample import digests_of, is_classes, thumbnails, unit_vectors
from runner.run.evaluation import Evaluator

_MOST = 1000  # samples of a split that a linear model is fitted to, and scored on
_PENALTY = 100.0  # of weights of standardized features, against features that are nearly alike
_CLOSE = 0.1  # deviations between two images of a batch that are the same
_EQUAL = 64  # samples of any kind that are compared


class TrainingBatches(NamedTuple):
    """Training batches, and the same samples as in an evaluation."""

    images: Tensor  # augmented, (N, C, H, W)
    plain: Tensor  # not augmented, (N, C, h, w)
    targets: Tensor  # of the batches, (N, ...)
    plain_targets: Tensor  # of the data set, (N, ...)
    batch: Tensor  # number of the batch of each sample, int64 (N,)


@shared
def first_batches(context: CheckContext) -> TrainingBatches:
    """The first training batches."""
    readable = not any(stats.unreadable for stats in context.stats.values())
    finite = context.train_stats.finite.all()
    need(readable and finite, "there are images that cannot be read or are not finite")
    split, most = context.splits.train, context.fitting(LIMITS.together, LIMITS.together_values)
    need(split.mix is None, "the samples of a batch are blended (transform.mix)")
    count = max(1, min(most // split.loader.batch_size, len(split.loader)))
    batches = [batch.first(most) for batch in split.loader.batches(0, 0, count)]
    fields = zip(*((batch.images, batch.targets, batch.indices) for batch in batches), strict=True)
    images, targets, indices = (torch.cat(field).cpu() for field in fields)
    numbers = torch.cat([torch.full((len(batch.indices),), number) for number, batch in enumerate(batches)])
    plain = context.read("train", indices.tolist())
    need(images.isfinite().all(), "there are images that are not finite")
    return TrainingBatches(images.float(), plain.images.float().cpu(), targets, plain.targets.cpu(), numbers)


@check("batches", any_task=True)
def batch_repeats(context: CheckContext) -> Result:
    """Batches with the same picture for several samples."""
    if context.whole:
        batch = next(context.splits.train.loader.batches(0, 0, 1)).first(_EQUAL)
        given, own = digests_of(batch), digests_of(context.read("train", batch.indices.tolist()))
        share = sum(given.count(a) > own.count(b) for a, b in zip(given, own, strict=True)) / len(own)
        evidence = f"{share:.0%} of {len(own)} samples equal another one"
    else:
        found = first_batches(context)
        small, plain = thumbnails(found.images).flatten(1), unit_vectors(thumbnails(found.plain))
        augmented, small = unit_vectors(small), small - small.mean(1, keepdim=True)
        # Padding of one width makes pages similar, but not equal.
        apart = torch.cdist(small, small) / small.shape[1] ** 0.5 / thumbnails(found.plain).std().clamp_min(1e-6)
        same = (augmented @ augmented.T > LIMITS.same_picture) & (plain @ plain.T < 0.99) & (apart < _CLOSE)
        same &= (found.images.flatten(1).std(1) > 1e-4)[:, None] & (found.batch[:, None] == found.batch[None, :])
        share = float(same.any(1).float().mean())
        evidence = f"{share:.0%} of {len(augmented)} samples look exactly like another sample of their batch"
    fix = "check the batch transforms and data.collate: each row must be computed from its own sample"
    return graded(evidence, fix, fail=share > LIMITS.repeated_fail, warn=share > LIMITS.repeated_warn)


@check("batches")
def batch_pairing(context: CheckContext) -> Result:
    """Images that are paired with the target of another sample of the batch."""
    found = first_batches(context)
    if found.targets.shape == found.plain_targets.shape:
        changed = int((found.targets != found.plain_targets).view(len(found.targets), -1).any(1).sum())
        if changed:
            evidence = f"{changed} of {len(found.targets)} targets in training batches differ from the data set"
            return failed(evidence, "keep the target of each sample with its image")
    augmented, plain = unit_vectors(thumbnails(found.images)), thumbnails(found.plain)
    need(augmented.shape[1] == plain[0].numel(), "augmented images have another shape than evaluated images")
    known = unit_vectors(plain)
    similar = torch.maximum(augmented @ known.T, augmented @ unit_vectors(plain.flip(-1)).T)
    own = similar.diagonal().clone()
    similar[known @ known.T > 0.9] = -1  # samples that show the same prove nothing
    best = similar.amax(1)
    share = float(((best > 0.9) & (best > own + 0.2)).float().mean())
    evidence = f"{share:.0%} of {len(augmented)} training images show the picture of another sample"
    fix = "a batch transform must keep the order of the images: the targets keep theirs"
    return graded(evidence, fix, fail=share > LIMITS.swapped)


def fit_linear(features: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Ridge regression of targets (N, K) on standardized features (N, D); the function takes other features."""
    features, targets = features.double(), targets.double()
    mean, std, middle = features.mean(0), features.std(0).clamp_min(1e-9), targets.mean(0)
    known = (features - mean) / std
    penalty = _PENALTY * torch.eye(known.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(known.T @ known + penalty, known.T @ (targets - middle))
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


class Baselines(NamedTuple):
    """Scores on held-out samples: accuracies for classes, root mean squared errors for regression."""

    split: str
    metric: str  # what the scores are called: `accuracy` or `rmse`
    constant: float  # of always predicting the most frequent class, or the mean
    linear: float  # of a linear model on the pixels of the thumbnails
    related: float  # standard errors by which its predictions have to do with the targets; about 0 by chance
    evidence: str  # both scores in words


@shared
def score_baselines(context: CheckContext) -> Baselines:
    """Fit and score both, on samples that were not fitted, as only that can be compared with the model."""
    splits = [stats for stats in context.held_out_stats if len(stats.thumbnails) >= LIMITS.scored]
    need(splits, f"there is no split of {LIMITS.scored} samples to score on")
    stats, most = splits[0], context.config.samples
    (pixels, targets), (theirs, right) = context.train_stats.pictures(most), stats.pictures(most)
    enough = min(len(targets), len(right)) >= LIMITS.scored and theirs.shape[1:] == pixels.shape[1:] and right.ndim == 1
    need(enough, "there are too few samples for a linear model")
    need(not context.classes or len(torch.unique(targets)) > 1, "there is only one class")
    classes = max(context.classes, 1 + int(max(targets.max(), right.max()))) if context.classes else 0
    wanted, truth = ((F.one_hot(y.long(), classes) if classes else y[:, None]).double() for y in (targets, right))
    guessed = fit_linear(pixels.flatten(1), wanted)(theirs.flatten(1))
    # Whether predictions have anything to do with the targets, also where the score is no better than a guess
    related = ((guessed - guessed.mean(0)) * (truth if classes else truth - truth.mean(0))).sum(1)
    if classes:
        guesses = targets.mode().values, guessed.argmax(1)
        constant, linear = (float((right == each).double().mean()) for each in guesses)
        metric, evidence = "accuracy", f"most frequent class {constant:.1%}, linear model {linear:.1%}"
    else:
        constant, linear = (float((truth - each).square().mean().sqrt()) for each in (wanted.mean(0), guessed))
        metric, evidence = "rmse", f"error of the mean {constant:.4g}, of a linear model {linear:.4g}"
    errors = float(related.mean() / (related.std() / math.sqrt(len(related))).clamp_min(1e-12))
    evidence += f", on {len(right):,} of {stats.name}"
    return Baselines(stats.name, metric, constant, linear, errors, evidence)


@check("baselines")
def learnable(context: CheckContext) -> Result:
    """Targets that a linear model cannot predict from the pixels at all: shuffled, or paired with the wrong images."""
    found = score_baselines(context)
    fix = "check how images and targets are paired; if the task is only hard, a larger `samples` shows it"
    evidence = f"{found.evidence}; predictions and targets are related by {found.related:.1f} standard errors"
    return graded(evidence, fix, warn=found.related < LIMITS.related)


@check("baselines")
def beats_baselines(context: CheckContext) -> Result:
    """A checkpoint (ckpt_path) that is not better than the most frequent class or a linear model."""
    need(context.found is not None, "ckpt_path names no run to compare")
    found = score_baselines(context)
    scores = Evaluator(context.training, warn=lambda line: None, interrupted=lambda: False).weights(found.split)
    name, sign = f"{found.split}/{found.metric}", 1 if found.metric == "accuracy" else -1
    need(name in scores, f"the run has no metric {name}")
    score, evidence = sign * scores[name], f"{name} {scores[name]:.4g}; {found.evidence}"
    if score <= sign * found.constant:
        return failed(evidence, "this run has learned nothing: see which other checks fail")
    fix = "train for longer, or check optimizer and model: a linear model is better"
    return graded(evidence, fix, warn=score < sign * found.linear)


@check("baselines")
def split_targets(context: CheckContext) -> Result:
    """A held-out split whose targets do not match its images, while those of train do."""
    need(context.classes, "there are no classes")
    pictures = {name: stats.pictures(_MOST) for name, stats in context.stats.items()}
    enough = {name: pair for name, pair in pictures.items() if len(pair[0]) >= LIMITS.fitted and is_classes(pair[1])}
    usable = {name: (image_features(images), right.long()) for name, (images, right) in enough.items()}
    need("train" in usable, f"fewer than {LIMITS.fitted} training images of one shape could be read")
    features, targets = usable.pop("train")
    need(len(torch.unique(targets)) > 1 and usable, f"there is one class, or no other split of {LIMITS.fitted} images")
    classes = 1 + int(torch.cat([targets, *(right for _, right in usable.values())]).max())
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
    plain = {f"turned by {turn} degrees": images.rot90(turn // 90, (2, 3)) for turn in turns}
    return plain | {f"mirrored and {name}": each.flip(-1) for name, each in plain.items()}


@check("baselines")
def orientation(context: CheckContext) -> Result:
    """Held-out images, as they are evaluated, that are turned or mirrored against training images."""
    train, found = thumbnails(first_batches(context).images), []
    need(len(train) >= LIMITS.fitted, f"fewer than {LIMITS.fitted} training images")
    parts = [image_features(each[::2]) for each in _turned(train).values()]
    upright = torch.cat([torch.full((len(part), 1), float(place == 0)) for place, part in enumerate(parts)])
    score = fit_linear(torch.cat(parts), upright)

    def better(images: Tensor) -> dict[str, float]:
        """For each orientation the share of images that look more like training images in it than as they are."""
        (_, plain), *others = ((name, score(image_features(each))) for name, each in _turned(images).items())
        return {name: float((each > plain).double().mean()) for name, each in others}

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
