"""Comparisons of the splits: images and targets that come from another source."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.lab.check.checks.baselines import chance_level, image_features, linear_accuracy
from runner.lab.check.context import CheckContext
from runner.lab.check.result import NotApplicable, Result, check, graded, join_names, need
from runner.lab.check.split_stats import SplitStats, is_classes

_APART = 0.72  # chance that an image of one split has more of something than one of the other; equal splits have 0.5
_DEVIATIONS = 6.0  # standard errors of that chance
_FEWEST = 24
_BLOCKS = 4  # parts of a training split
_LEAST, _MOST = 60, 1000  # samples for fitting and scoring a linear model


def _measures(images: Tensor) -> dict[str, Tensor]:
    """Properties that depend on how images were read: by name one number for each image, (N,)."""
    flat, grey = images.flatten(1), images.mean(1, keepdim=True)
    found = {"brightness": flat.mean(1), "contrast": flat.std(1)}
    found |= {"darkest value": flat.amin(1), "brightest value": flat.amax(1)}
    if images.shape[1] == 3:
        red, green, blue = images.mean((2, 3)).unbind(1)
        found |= {"red against blue": red - blue, "green against red and blue": green - (red + blue) / 2}
        found["saturation"] = (images.amax(1) - images.amin(1)).mean((1, 2))
    height, width = images.shape[2:]
    if min(height, width) >= 16:
        scale = grey.flatten(1).std(1).clamp_min(1e-4)
        coarse = grey
        for name in ("detail of 1 pixel", "detail of 2 pixels", "detail of 4 pixels"):
            pooled = F.avg_pool2d(coarse, 2)
            upper = F.interpolate(pooled, coarse.shape[2:], mode="bilinear", align_corners=False)
            found[name] = (coarse - upper).flatten(1).std(1) / scale
            coarse = pooled
        jumps = (grey[..., 1:] - grey[..., :-1]).abs().mean((1, 2))
        found["edges of JPEG blocks"] = jumps[:, 7::8].mean(1) / jumps.mean(1).clamp_min(1e-4)
        edges = [grey[..., 0, :], grey[..., -1, :], grey[..., :, 0], grey[..., :, -1]]
        border = torch.cat([edge.flatten(1) for edge in edges], 1).mean(1)
        middle = grey[..., height // 4 : -height // 4, width // 4 : -width // 4].mean((1, 2, 3))
        found["border against middle"] = border - middle
        found["equal neighbors"] = (images[..., 1:] == images[..., :-1]).float().mean((1, 2, 3))
    return found


@check("splits")
def split_source(context: CheckContext) -> Result:
    """Held-out images that differ from training images in color, scale, sharpness, compression or decoding."""
    from sklearn.metrics import roc_auc_score

    samples = {name: images for name, (images, _) in context.sample_images.items() if len(images) >= _FEWEST}
    need("train" in samples, f"fewer than {_FEWEST} training images could be read")
    train = samples.pop("train")
    ours, limit = _measures(train), _APART
    shares: list[tuple[float, str, str, str]] = []
    for split, images in samples.items():
        if images.shape[1] != train.shape[1]:
            continue
        limit = max(limit, 0.5 + _DEVIATIONS * ((1 / len(images) + 1 / len(train)) / 12) ** 0.5)
        of_split = [0] * len(train) + [1] * len(images)
        for what, values in _measures(images).items():
            if what in ours:
                # The area under the ROC curve is the share of pairs in which an image of this split has more.
                above = float(roc_auc_score(of_split, torch.cat([ours[what], values]).nan_to_num().numpy()))
                shares.append((max(above, 1 - above), what, split, "more" if above > 0.5 else "less"))
    need(shares, f"there is no other split of {_FEWEST} images")
    worst = max(shares, key=lambda each: each[0])
    share, what, split, sign = worst
    evidence = f"{what}: {sign} in {split} than in train for {share:.0%} of all pairs of images"
    if others := [f"{each[1]} of {each[2]}" for each in shares if each[0] > limit and each is not worst]:
        evidence += f"; also {join_names(others)}"
    fix = "read every split in the same way: source, decoder, color, resizing and compression"
    return graded(evidence, fix, warn=share > limit)


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


@check("splits")
def target_blocks(context: CheckContext) -> Result:
    """One part of the training set whose targets do not match its images, while those of other parts do."""
    features, targets, indices = _train_features(context, _BLOCKS * _LEAST)
    order = indices.argsort()
    scores, chances = [], []
    for rows in order.tensor_split(_BLOCKS):
        # Fitted to its own other half: wrong targets elsewhere do no harm, and the blocks need not be alike.
        halves = [(features[part], targets[part]) for part in (rows[::2], rows[1::2])]
        scores.append((linear_accuracy(*halves[0], *halves[1]) + linear_accuracy(*halves[1], *halves[0])) / 2)
        chances.append(chance_level(targets[rows]))
    evidence = f"the accuracy of a linear model is {', '.join(f'{each:.0%}' for each in scores)}"
    evidence += f" on {_BLOCKS} parts of train, in the order of the data set"
    gain = [score - chance for score, chance in zip(scores, chances, strict=True)]
    fix = "check how images and targets of this part were paired, and where it comes from"
    return graded(evidence, fix, warn=max(chances) < 0.6 and max(gain) > 0.25 and min(gain) < 0.2 * max(gain))


@check("splits")
def target_shift(context: CheckContext) -> Result:
    """Held-out regression targets with another distribution than those of train, for example in another unit."""
    from scipy.stats import ks_2samp

    need(not context.classes, "there are classes")
    ours, found = context.train_stats.targets.float().flatten(), []
    for stats in context.held_out_stats:
        theirs = stats.targets.float().flatten()
        if min(len(ours), len(theirs)) < _FEWEST or not bool(theirs.isfinite().all() and ours.isfinite().all()):
            continue
        gap = float(ks_2samp(ours.numpy(), theirs.numpy(), method="asymp").statistic)
        evidence = f"mean {float(theirs.mean()):.4g} in {stats.name}, {float(ours.mean()):.4g} in train; "
        evidence += f"standard deviation {float(theirs.std()):.4g} and {float(ours.std()):.4g}"
        found.append((gap / (0.2 + 1.6 * (1 / len(ours) + 1 / len(theirs)) ** 0.5), evidence))
    need(found, f"there is no other split of {_FEWEST} samples")
    worst, evidence = max(found)
    return graded(evidence, "scale the targets of every split with the statistics of train", warn=worst > 1)
