"""Checks of training batches: whether each image is its own, beside its own target, and still shows what it is of."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from runner.verbs.check.context import CheckContext, NotApplicable
from runner.verbs.check.result import Result, check, failed, passed, skipped, warned
from runner.verbs.check.sample_images import accuracy, features, sample_images, small, unit_vectors

_SAMPLES = 256
_VALUES = 2**24  # pixels and channels of these samples
_SAME = 0.9999  # correlation of two images of a batch that are the same one
_WRAPPED = 1.0  # how many times as frequent jumps over the whole range are as jumps over half of it; 0.1 in photographs
_FEWEST = 160  # samples that a linear model is fitted to and scored on


class TrainingBatches(NamedTuple):
    """Training batches, and the same samples as they are evaluated.

    Attributes:
        images: as the model is given them in training, (N, C, H, W).
        plain: as it is given them in an evaluation, (N, C, h, w).
        targets: of the batches, (N, ...).
        right: of the data set, (N, ...).
        batch: number of the batch that each sample is of, int64 (N,).
    """

    images: Tensor
    plain: Tensor
    targets: Tensor
    right: Tensor
    batch: Tensor


def first_batches(context: CheckContext) -> TrainingBatches:
    """The first training batches.

    Raises:
        NotApplicable: if images are missing or not finite, or if samples are blended.
    """
    if any(seen.unreadable for seen in context.stats.values()) or not bool(context.train_stats.finite.all()):
        raise NotApplicable("there are images that cannot be read or are not finite")
    split = context.splits.train
    if split.mix is not None:
        raise NotApplicable("the samples of a batch are blended (transform.mix)")
    size = context.splits.channels * context.splits.image_size[0] * context.splits.image_size[1]
    most = max(16, min(_SAMPLES, _VALUES // size))
    count = max(1, min(most // split.loader.batch_size, math.ceil(split.samples / split.loader.batch_size)))
    batches = [
        (each.images[:most].float(), each.targets[:most], each.indices[:most])
        for each in split.loader.batches(0, 0, count)
    ]
    numbers = torch.cat([torch.full((len(each[0]),), number) for number, each in enumerate(batches)])
    images, targets, indices = (torch.cat(parts) for parts in zip(*batches, strict=True))
    plain = context.read("train", indices.tolist())
    if not bool(images.isfinite().all()):
        raise NotApplicable("there are images that are not finite")
    return TrainingBatches(images.cpu(), plain.images.float().cpu(), targets.cpu(), plain.targets.cpu(), numbers)


@check
def batch_repeats(context: CheckContext) -> Result:
    """Batches that hold the same picture under several sample numbers."""
    found = context.cached(first_batches)
    ours, before = unit_vectors(small(found.images)), unit_vectors(small(found.plain))
    alike = (ours @ ours.T > _SAME) & (before @ before.T < 0.99)
    alike &= (found.images.flatten(1).std(1) > 1e-4)[:, None] & (found.batch[:, None] == found.batch[None, :])
    share = float(alike.any(1).float().mean())
    evidence = f"{share:.0%} of {len(ours)} samples look exactly like another one of their batch"
    fix = "look at the transforms of a batch: each image has to be made from its own"
    if share > 0.2:
        return failed(evidence, fix)
    return warned(evidence, fix) if share > 0.02 else passed(evidence)


@check
def batch_pairing(context: CheckContext) -> Result:
    """Images that stand beside the target of another sample of the batch."""
    found = context.cached(first_batches)
    if found.targets.shape == found.right.shape:
        changed = (
            (found.targets != found.right).flatten(1).any(1) if found.targets.ndim > 1 else found.targets != found.right
        )
        if bool(changed.any()):
            evidence = (
                f"{int(changed.sum())} of {len(changed)} targets in training batches are not those of the data set"
            )
            return failed(evidence, "give each sample its own target")
    ours, plain = unit_vectors(small(found.images)), small(found.plain)
    if ours.shape[1] != plain[0].numel():
        return skipped("training images and evaluated ones have different shapes")
    known = [unit_vectors(plain), unit_vectors(plain.flip(-1))]
    alike = torch.maximum(ours @ known[0].T, ours @ known[1].T)
    own = alike.diagonal().clone()
    pictures_alike = known[0] @ known[0].T > 0.9  # no evidence: another sample that shows the same
    alike[pictures_alike] = -1
    best = alike.amax(1)
    moved = (best > 0.9) & (best > own + 0.2)
    share = float(moved.float().mean())
    evidence = f"{share:.0%} of {len(ours)} training images show the picture of another sample"
    if share > 0.1:
        return failed(evidence, "a batch transform must not change the order of the images, as the targets stay")
    return passed(evidence)


@check
def shuffling(context: CheckContext) -> Result:
    """Batches of one class each, as from samples in the order of their classes that are not shuffled."""
    if not context.classes or "train" not in context.labels or context.splits.train.mix is not None:
        return skipped("there are no classes, or samples are blended")
    labels, size = context.labels["train"], context.splits.train.loader.batch_size
    if len(labels) < 4 * size or size < 4:
        return skipped("fewer than four batches, or of fewer than four samples")
    overall = float(torch.bincount(labels.clamp_min(0)).max()) / len(labels)
    shares = []
    for number, batch in enumerate(context.splits.train.loader.batches(0, 0, 4)):
        if number >= 4 or batch.targets.ndim != 1:
            break
        shares.append(float(torch.bincount(batch.targets.long().clamp_min(0)).max()) / len(batch.targets))
    if not shares:
        return skipped("the targets are not class numbers")
    evidence = f"the largest class has {sum(shares) / len(shares):.0%} of each of the first batches, {overall:.0%} of all samples"
    if sum(shares) / len(shares) > overall + 0.6 * (1 - overall):
        return failed(evidence, "data.shuffle=true: each step would forget the other classes")
    return passed(evidence)


@check
def model_input(context: CheckContext) -> Result:
    """Images that reach the model on another scale than data.normalize gives: normalised twice, or not at all."""
    seen, found = context.train_stats, context.cached(first_batches)
    mean = torch.tensor(context.splits.mean).expand(context.splits.channels)
    std = torch.tensor(context.splits.std).expand(context.splits.channels)
    if seen.means.shape[1] != len(mean):
        return skipped("the images have other channels than data.normalize")
    means, stds = seen.means[seen.finite], seen.stds[seen.finite]
    overall = ((stds**2 + means**2).mean(0) - means.mean(0) ** 2).clamp_min(0).sqrt()
    wanted, wide = (means.mean(0) - mean) / std, (overall / std).clamp_min(1e-6)
    for name, images in (("an evaluation", found.plain), ("training", found.images)):
        ours, theirs = images.mean((0, 2, 3)), images.std((0, 2, 3))
        ratio = float((theirs.clamp_min(1e-6) / wide).log().mean().exp())
        away = float(((ours - wanted).abs() / wide).max())
        numbers = f"mean {float(ours.mean()):.3g} and deviation {float(theirs.mean()):.3g}"
        told = f"the model is given {numbers} in {name}, where data.normalize should give "
        told += f"{float(wanted.mean()):.3g} and {float(wide.mean()):.3g}"
        if ratio > 2.2 or ratio < 0.3 or away > 2:
            return failed(
                told, "normalise once: transforms give uint8 or values in [0, 1], data.normalize does the rest"
            )
    return passed(told)


def _jumps(values: Tensor) -> tuple[float, int]:
    """How often neighbours are nearly the whole range apart, for each time they are half of it; and how many those are."""
    whole, half = 0, 0
    for first, second in (
        (values[..., :, 1:], values[..., :, :-1]),
        (values[..., 1:, :], values[..., :-1, :]),
    ):
        # Saturated pixels are left out: drawings and masks jump from black to white, too.
        inside = (first > 0.5) & (first < 254.5) & (second > 0.5) & (second < 254.5)
        apart = (first - second).abs()
        whole += int((inside & (apart > 192)).sum())
        half += int((inside & (apart > 96) & (apart < 160)).sum())
    return whole / max(1, half), whole


@check
def wrap_around(context: CheckContext) -> Result:
    """Pixel values that went over 255 and began again at 0, as in arithmetic with uint8."""
    sources = {f"{name} as the data set gives it": each.images for name, each in context.cached(sample_images).items()}
    std, mean = (torch.tensor(each).view(1, -1, 1, 1) for each in (context.splits.std, context.splits.mean))
    try:
        found = context.cached(first_batches)
        for name, images in (("training batches", found.images), ("evaluated batches", found.plain)):
            sources[name] = images * std + mean
    except NotApplicable:
        pass
    for name, images in sources.items():
        values = (images * 255).clamp(0, 255)
        extreme = float(((values < 16) | (values > 239)).float().mean())
        ratio, count = _jumps(values)
        if extreme < 0.6 and ratio > _WRAPPED and count > 1e-3 * values.numel():
            told = (
                f"in {name}, neighbours are {count:,} times almost 255 apart, {ratio:.0f} times as often as half of it"
            )
            return failed(told, "compute with float or int16 and clamp to 0 to 255 before the cast to uint8")
    return passed(f"{len(sources)} sources of images have no such jumps")


@check
def augmented_classes(context: CheckContext) -> Result:
    """Augmentation that takes away what the classes can be told by, such as crops that miss the object."""
    if not context.classes:
        return skipped("there are no classes")
    found = context.cached(first_batches)
    if (
        found.right.ndim != 1
        or len(found.right) < max(_FEWEST, 12 * context.classes)
        or len(torch.unique(found.right)) < 2
    ):
        return skipped("there are too few samples for a linear model")
    if found.images.shape[1:] != found.plain.shape[1:]:
        return skipped("training images and evaluated ones have different shapes")
    side = 64 if min(found.images.shape[2:]) > 64 else min(found.images.shape[2:])
    plain, ours = features(small(found.plain, side)), features(small(found.images, side))
    fit = torch.arange(len(found.right)) % 2 == 0
    scores: dict[str, list[float]] = {"plain": [], "augmented": [], "remembered": []}
    for part in (fit, ~fit):
        right, theirs = found.right[part], found.right[~part]
        scores["plain"].append(accuracy(plain[part], right, plain[~part], theirs))
        scores["augmented"].append(accuracy(ours[part], right, ours[~part], theirs))
        scores["remembered"].append(accuracy(plain[part], right, ours[part], right))
    plainly, augmented, remembered = (sum(each) / 2 for each in scores.values())
    chance = float(torch.bincount(found.right.clamp_min(0)).max()) / len(found.right)
    best = max(augmented, remembered)
    evidence = (
        f"a linear model is right on {best:.0%} of augmented images, on {plainly:.0%} of others; chance {chance:.0%}"
    )
    noise = 2 * math.sqrt(chance * (1 - chance) / len(found.right))
    if plainly > chance + 0.2 and best < chance + max(noise, 0.25 * (plainly - chance)):
        return warned(evidence, "milder transforms: larger crops, smaller shifts; look at a few augmented images")
    return passed(evidence)
