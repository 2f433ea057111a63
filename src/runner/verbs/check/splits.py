"""Comparisons of the splits: images and targets that come from another source."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import NotApplicable, Result, graded, join_names, skipped
from runner.verbs.check.sample_images import chance_level, image_features, linear_accuracy, sample_images
from runner.verbs.check.split_stats import SplitStats

_APART = 0.72  # chance that an image of one split has more of something than one of the other; equal splits have 0.5
_DEVIATIONS = 6.0  # standard errors of that chance
_FEWEST = 24
_BLOCKS = 4  # parts of a training split
_LEAST, _MOST = 60, 1000  # samples for fitting and scoring a linear model


def _measures(images: Tensor) -> dict[str, Tensor]:
    """Properties that depend on how images were read: by name one number for each image, (N,)."""
    flat, grey = images.flatten(1), images.mean(1, keepdim=True)
    found = {
        "brightness": flat.mean(1),
        "contrast": flat.std(1),
        "darkest value": flat.amin(1),
        "brightest value": flat.amax(1),
    }
    if images.shape[1] == 3:
        red, green, blue = images.mean((2, 3)).unbind(1)
        found["red against blue"] = red - blue
        found["green against red and blue"] = green - (red + blue) / 2
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


def split_source(context: CheckContext) -> Result:
    """Held-out images that differ from training images in color, scale, sharpness, compression or decoding."""
    from sklearn.metrics import roc_auc_score

    found = context.cached(sample_images)
    if "train" not in found or len(found["train"].images) < _FEWEST:
        return skipped(f"fewer than {_FEWEST} training images could be read")
    train = found["train"].images
    ours = _measures(train)
    share, worst, sign, limit = 0.5, ("", ""), "", _APART
    others: list[tuple[str, str]] = []
    for split, (images, _) in found.items():
        if split == "train" or len(images) < _FEWEST or images.shape[1] != train.shape[1]:
            continue
        by_chance = ((1 / len(images) + 1 / len(train)) / 12) ** 0.5
        limit = max(limit, 0.5 + _DEVIATIONS * by_chance)
        of_split = [0] * len(train) + [1] * len(images)
        for what, values in _measures(images).items():
            if what in ours:
                # The area under the ROC curve is the share of pairs in which an image of this split has more.
                above = float(roc_auc_score(of_split, torch.cat([ours[what], values]).nan_to_num().numpy()))
                if max(above, 1 - above) > limit:
                    others.append((what, split))
                if max(above, 1 - above) > share:
                    share, worst, sign = max(above, 1 - above), (what, split), "more" if above > 0.5 else "less"
    if not sign:
        return skipped(f"there is no other split of {_FEWEST} images")
    evidence = f"{worst[0]}: {sign} in {worst[1]} than in train for {share:.0%} of all pairs of images"
    if len(others) > 1:
        evidence += f"; also {join_names([f'{what} of {split}' for what, split in others if (what, split) != worst])}"
    fix = "read every split in the same way: source, decoder, color, resizing and compression"
    return graded(evidence, fix, warn=share > limit)


def _features(stats: SplitStats) -> tuple[Tensor, Tensor, Tensor] | None:
    """Features, classes and indices of the thumbnails of a split; None without classes."""
    rows = stats.thumbnail_rows[stats.finite[stats.thumbnail_rows]][:_MOST]
    targets = stats.targets[rows]
    if not len(targets) or targets.ndim != 1 or targets.is_floating_point():
        return None
    images = stats.thumbnails[stats.finite[stats.thumbnail_rows]][:_MOST]
    return image_features(images), targets.long(), stats.indices[rows]


def _train_features(context: CheckContext, least: int) -> tuple[Tensor, Tensor, Tensor]:
    context.require_classes()
    found = _features(context.train_stats)
    if found is None or len(found[1]) < least or len(torch.unique(found[1])) < 2:
        raise NotApplicable(f"fewer than {least} training images of one shape could be read")
    return found


def split_targets(context: CheckContext) -> Result:
    """A held-out split whose targets do not match its images, while those of train do."""
    features, targets, _ = _train_features(context, _LEAST)
    half = torch.arange(len(targets)) % 2 == 0
    known = linear_accuracy(features[half], targets[half], features[~half], targets[~half])
    scores, bad = [f"{known:.0%} on train"], []
    for stats in context.held_out_stats:
        theirs = _features(stats)
        if theirs is None or len(theirs[1]) < _LEAST or theirs[0].shape[1] != features.shape[1]:
            continue
        right, chance = linear_accuracy(features, targets, *theirs[:2]), chance_level(theirs[1])
        scores.append(f"{right:.0%} on {stats.name}")
        noise = (chance / len(theirs[1])) ** 0.5
        if known > chance + 0.25 and right < chance + max(0.2 * (known - chance), 2 * noise):
            bad.append(stats.name)
    if len(scores) == 1:
        return skipped(f"there is no other split of {_LEAST} images")
    evidence = f"the accuracy of a linear model is {', '.join(scores)}"
    fix = f"check how images and targets of {join_names(bad)} are paired, and its order of classes"
    return graded(evidence, fix, fail=bool(bad))


def target_blocks(context: CheckContext) -> Result:
    """One part of the training set whose targets do not match its images, while those of other parts do."""
    features, targets, indices = _train_features(context, _BLOCKS * _LEAST)
    order = indices.argsort()
    features, targets = features[order], targets[order]
    block = torch.arange(len(targets)) * _BLOCKS // len(targets)
    scores, chances = [], []
    for number in range(_BLOCKS):
        # Fitted to its own other half: wrong targets elsewhere do no harm, and the blocks need not be alike.
        inside = (block == number).nonzero().flatten()
        halves = [(features[part], targets[part]) for part in (inside[::2], inside[1::2])]
        scores.append((linear_accuracy(*halves[0], *halves[1]) + linear_accuracy(*halves[1], *halves[0])) / 2)
        chances.append(chance_level(targets[inside]))
    evidence = f"the accuracy of a linear model is {', '.join(f'{each:.0%}' for each in scores)}"
    evidence += f" on {_BLOCKS} parts of train, in the order of the data set"
    gain = [score - chance for score, chance in zip(scores, chances, strict=True)]
    fix = "check how images and targets of this part were paired, and where it comes from"
    return graded(evidence, fix, warn=max(chances) < 0.6 and max(gain) > 0.25 and min(gain) < 0.2 * max(gain))


def target_shift(context: CheckContext) -> Result:
    """Held-out regression targets with another distribution than those of train, for example in another unit."""
    from scipy.stats import ks_2samp

    if context.classes:
        return skipped("there are classes")
    ours = context.train_stats.targets.float().flatten()
    worst = (0.0, "")
    for stats in context.held_out_stats:
        theirs = stats.targets.float().flatten()
        if min(len(ours), len(theirs)) < _FEWEST or not bool(theirs.isfinite().all() and ours.isfinite().all()):
            continue
        gap = float(ks_2samp(ours.numpy(), theirs.numpy(), method="asymp").statistic)
        usual = (1 / len(ours) + 1 / len(theirs)) ** 0.5
        evidence = f"mean {float(theirs.mean()):.4g} in {stats.name}, {float(ours.mean()):.4g} in train; "
        evidence += f"standard deviation {float(theirs.std()):.4g} and {float(ours.std()):.4g}"
        worst = max(worst, (gap / (0.2 + 1.6 * usual), evidence))
    if not worst[1]:
        return skipped(f"there is no other split of {_FEWEST} samples")
    fix = "scale the targets of every split in the same way, with the statistics of train"
    return graded(worst[1], fix, warn=worst[0] > 1)
