"""Checks of training batches: each image belongs to its sample, and is paired with its target."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from runner.lab.check.checks.baselines import chance_level
from runner.lab.check.checks.data import moments_without_padding
from runner.lab.check.context import CheckContext
from runner.lab.check.near_duplicates import unit_vectors
from runner.lab.check.result import NotApplicable, Result, check, failed, graded, need, passed
from runner.lab.check.split_stats import digests_of, thumbnails

_SAME, _CLOSE = 0.9999, 0.1  # correlation of two images of a batch that are the same, and most deviations apart
_WRAPPED = 1.0  # jumps over the whole range for each jump over half of it; 0.1 in photographs
_EQUAL = 64  # samples of any kind that are compared


class TrainingBatches(NamedTuple):
    """Training batches, and the same samples as in an evaluation."""

    images: Tensor  # augmented, (N, C, H, W)
    plain: Tensor  # not augmented, (N, C, h, w)
    targets: Tensor  # of the batches, (N, ...)
    plain_targets: Tensor  # of the data set, (N, ...)
    batch: Tensor  # number of the batch of each sample, int64 (N,)


def first_batches(context: CheckContext) -> TrainingBatches:
    """The first training batches."""
    readable = not any(stats.unreadable for stats in context.stats.values())
    finite = context.train_stats.finite.all()
    need(readable and finite, "there are images that cannot be read or are not finite")
    split, most = context.splits.train, context.most_samples
    need(split.mix is None, "the samples of a batch are blended (transform.mix)")
    count = max(1, min(most // split.loader.batch_size, math.ceil(split.samples / split.loader.batch_size)))
    batches = [batch.first(most) for batch in split.loader.batches(0, 0, count)]
    images, targets, indices = (
        torch.cat([getattr(batch, field).cpu() for batch in batches]) for field in ("images", "targets", "indices")
    )
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
        fix = "check the transforms and data.collate: each row must be computed from its own sample"
        return graded(f"{share:.0%} of {len(own)} samples equal another one", fix, fail=share > 0.2, warn=share > 0.02)
    found = context.cached(first_batches)
    small, plain = thumbnails(found.images).flatten(1), unit_vectors(thumbnails(found.plain))
    augmented, small = unit_vectors(small), small - small.mean(1, keepdim=True)
    # Padding of one width makes pages similar, but not equal.
    apart = torch.cdist(small, small) / small.shape[1] ** 0.5 / thumbnails(found.plain).std().clamp_min(1e-6)
    same = (augmented @ augmented.T > _SAME) & (plain @ plain.T < 0.99) & (apart < _CLOSE)
    same &= (found.images.flatten(1).std(1) > 1e-4)[:, None] & (found.batch[:, None] == found.batch[None, :])
    share = float(same.any(1).float().mean())
    evidence = f"{share:.0%} of {len(augmented)} samples look exactly like another sample of their batch"
    fix = "check the batch transforms: each image must be computed from its own sample"
    return graded(evidence, fix, fail=share > 0.2, warn=share > 0.02)


@check("batches")
def batch_pairing(context: CheckContext) -> Result:
    """Images that are paired with the target of another sample of the batch."""
    found = context.cached(first_batches)
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
    return graded(evidence, fix, fail=share > 0.1)


@check("batches")
def shuffling(context: CheckContext) -> Result:
    """Batches with a single class each: samples sorted by class that are not shuffled."""
    split = context.splits.train
    usable = context.classes and "train" in context.labels and split.mix is None
    need(usable, "there are no classes, or samples are blended")
    labels, size = context.labels["train"], split.loader.batch_size
    need(len(labels) >= 4 * size and size >= 4, "fewer than four batches, or of fewer than four samples")
    overall = chance_level(labels)
    batches = [batch.targets for batch in split.loader.batches(0, 0, 4)][:4]
    need(all(targets.ndim == 1 for targets in batches), "the targets are not class numbers")
    share = sum(chance_level(targets.long()) for targets in batches) / len(batches)
    evidence = f"the largest class has {share:.0%} of each of the first batches, {overall:.0%} of all samples"
    fix = "data.shuffle=true: otherwise each step forgets the other classes"
    return graded(evidence, fix, fail=share > overall + 0.6 * (1 - overall))


@check("batches")
def model_input(context: CheckContext) -> Result:
    """Images that reach the model with another scale than data.normalize gives: normalized twice, or not at all."""
    found, measured = context.cached(first_batches), context.train_stats.channel_statistics()
    splits = context.splits
    mean, std = (torch.tensor(each).expand(splits.channels) for each in (splits.mean, splits.std))
    expected, trained = moments_without_padding(context, found.plain, found.images)
    evaluated = torch.stack([found.plain.mean((0, 2, 3)), found.plain.std((0, 2, 3))])
    for name, (ours, theirs), (wanted, wide) in (
        ("an evaluation", evaluated, torch.stack([(measured[0] - mean) / std, measured[1] / std])),
        ("training", trained, expected),
    ):
        wide = wide.clamp_min(1e-6)
        ratio = float((theirs.clamp_min(1e-6) / wide).log().mean().exp())
        away = float(((ours - wanted).abs() / wide).max())
        evidence = f"in {name}, the model input has mean {ours.mean():.3g} and standard deviation {theirs.mean():.3g}; "
        evidence += f"data.normalize gives {wanted.mean():.3g} and standard deviation {wide.mean():.3g}"
        if ratio > 2.2 or ratio < 0.3 or away > 2:
            return failed(evidence, "normalize only in data.normalize: transforms return uint8 or values in [0, 1]")
    return passed(evidence)


def _jumps(values: Tensor) -> tuple[float, int]:
    """Neighbors nearly the whole range apart: how many for each pair that is half of it apart, and how many in all."""
    whole, half = 0, 0
    for first, second in ((values[..., 1:], values[..., :-1]), (values[..., 1:, :], values[..., :-1, :])):
        # Saturated pixels do not count: drawings and masks also jump from black to white.
        inside = (first > 0.5) & (first < 254.5) & (second > 0.5) & (second < 254.5)
        apart = (first - second).abs()
        whole += int((inside & (apart > 192)).sum())
        half += int((inside & (apart > 96) & (apart < 160)).sum())
    return whole / max(1, half), whole


@check("batches")
def wrap_around(context: CheckContext) -> Result:
    """Pixel values that overflowed 255 and wrapped around to 0, as in uint8 arithmetic."""
    sources = {f"{name} as the data set returns it": images for name, (images, _) in context.sample_images.items()}
    std, mean = (torch.tensor(each).view(1, -1, 1, 1) for each in (context.splits.std, context.splits.mean))
    try:
        found = context.cached(first_batches)
        sources |= {"training batches": found.images * std + mean, "evaluated batches": found.plain * std + mean}
    except NotApplicable:
        pass
    for name, images in sources.items():
        values = (images * 255).clamp(0, 255)
        extreme = float(((values < 16) | (values > 239)).float().mean())
        ratio, count = _jumps(values)
        if extreme < 0.6 and ratio > _WRAPPED and count > 1e-3 * values.numel():
            evidence = f"in {name}, {count:,} neighbors are almost 255 apart, {ratio:.0f} times as many as half of it"
            return failed(evidence, "compute in float or int16 and clamp to 0 to 255 before the cast to uint8")
    return passed(f"{len(sources)} sources of images have no such jumps")
