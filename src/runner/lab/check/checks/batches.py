"""Checks of training batches: each image belongs to its sample, and is paired with its target."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from runner.lab.check.context import CheckContext
from runner.lab.check.limits import LIMITS
from runner.lab.check.near_duplicates import unit_vectors
from runner.lab.check.result import Result, check, failed, graded, need
from runner.lab.check.sample import digests_of, thumbnails

_CLOSE = 0.1  # deviations between two images of a batch that are the same
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
    split, most = context.splits.train, context.fitting(LIMITS.together, LIMITS.together_values)
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
        return graded(
            f"{share:.0%} of {len(own)} samples equal another one",
            fix,
            fail=share > LIMITS.repeated_fail,
            warn=share > LIMITS.repeated_warn,
        )
    found = context.cached(first_batches)
    small, plain = thumbnails(found.images).flatten(1), unit_vectors(thumbnails(found.plain))
    augmented, small = unit_vectors(small), small - small.mean(1, keepdim=True)
    # Padding of one width makes pages similar, but not equal.
    apart = torch.cdist(small, small) / small.shape[1] ** 0.5 / thumbnails(found.plain).std().clamp_min(1e-6)
    same = (augmented @ augmented.T > LIMITS.same_picture) & (plain @ plain.T < 0.99) & (apart < _CLOSE)
    same &= (found.images.flatten(1).std(1) > 1e-4)[:, None] & (found.batch[:, None] == found.batch[None, :])
    share = float(same.any(1).float().mean())
    evidence = f"{share:.0%} of {len(augmented)} samples look exactly like another sample of their batch"
    fix = "check the batch transforms: each image must be computed from its own sample"
    return graded(evidence, fix, fail=share > LIMITS.repeated_fail, warn=share > LIMITS.repeated_warn)


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
    return graded(evidence, fix, fail=share > LIMITS.swapped)
