"""Checks of the splits against each other: images and targets that come from another source."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import Result, check, failed, join_names, passed, skipped, warned
from runner.verbs.check.sample_images import accuracy, features, sample_images
from runner.verbs.check.split_stats import SplitStats

_APART = 0.72  # chance that an image of one split has more of something than one of the other; 0.5 is alike
_DEVIATIONS = 6.0  # of what that chance is by accident
_FEWEST = 24
_BLOCKS = 4  # parts of a training split
_LEAST, _MOST = 60, 1000  # samples that a linear model is fitted to and scored on


def _share_above(ours: Tensor, theirs: Tensor) -> float:
    """Chance that a value of `theirs` is above one of `ours`, counting ties half."""
    sign = (theirs[:, None] - ours[None, :]).sign()
    return float(sign.mean()) / 2 + 0.5


def _measures(images: Tensor) -> dict[str, Tensor]:
    """What can differ when images are read in another way: by name a number for each image, (N,)."""
    grey = images.mean(1, keepdim=True)
    found = {
        "brightness": images.flatten(1).mean(1),
        "contrast": images.flatten(1).std(1),
        "darkest value": images.flatten(1).amin(1),
        "brightest value": images.flatten(1).amax(1),
    }
    if images.shape[1] == 3:
        means = images.mean((2, 3))
        found["red against blue"] = means[:, 0] - means[:, 2]
        found["green against red and blue"] = means[:, 1] - (means[:, 0] + means[:, 2]) / 2
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
        at_blocks = jumps[:, 7::8].mean(1)
        found["edges of JPEG blocks"] = at_blocks / jumps.mean(1).clamp_min(1e-4)
        found["border against middle"] = _border(grey) - grey[
            ..., height // 4 : -height // 4, width // 4 : -width // 4
        ].mean((1, 2, 3))
        found["equal neighbours"] = (images[..., 1:] == images[..., :-1]).float().mean((1, 2, 3))
    return found


def _border(grey: Tensor) -> Tensor:
    edges = [grey[..., 0, :], grey[..., -1, :], grey[..., :, 0], grey[..., :, -1]]
    return torch.cat([edge.flatten(1) for edge in edges], 1).mean(1)


@check
def split_source(context: CheckContext) -> Result:
    """Held-out images that can be told from those trained on: other colours, scale, sharpness, compression or decoding."""
    found = context.cached(sample_images)
    if "train" not in found or len(found["train"].images) < _FEWEST:
        return skipped(f"fewer than {_FEWEST} training images could be looked at")
    ours = _measures(found["train"].images)
    worst, others, limit = (0.5, "", ""), [], _APART
    for name, seen in found.items():
        if name == "train" or len(seen.images) < _FEWEST or seen.images.shape[1] != found["train"].images.shape[1]:
            continue
        by_chance = ((1 / len(seen.images) + 1 / len(found["train"].images)) / 12) ** 0.5
        limit = max(limit, 0.5 + _DEVIATIONS * by_chance)
        for what, values in _measures(seen.images).items():
            if what in ours:
                above = _share_above(ours[what], values)
                share = max(above, 1 - above)
                if share > limit:
                    others.append(f"{what} of {name}")
                if share > worst[0]:
                    worst = (share, what, f"{'more' if above > 0.5 else 'less'} in {name}")
    if not worst[1]:
        return skipped(f"there is no other split of {_FEWEST} images")
    share, what, where = worst
    evidence = f"{what}: {where} than in train for {share:.0%} of all pairs of images"
    if share <= limit:
        return passed(evidence)
    more = (
        f"; also {join_names([each for each in others if each != f'{what} of {where.split()[-1]}'])}"
        if len(others) > 1
        else ""
    )
    return warned(
        f"{evidence}{more}", "read every split in the same way: source, decoder, colour, resizing and compression"
    )


@check
def split_targets(context: CheckContext) -> Result:
    """A held-out split whose targets do not go with its images, while those of train do."""
    if not context.classes:
        return skipped("there are no classes")
    ours = _described(context.train_stats)
    if ours is None or len(ours[1]) < _LEAST or len(torch.unique(ours[1])) < 2:
        return skipped(f"fewer than {_LEAST} training images of one shape could be looked at")
    images, targets = ours
    half = torch.arange(len(targets)) % 2 == 0
    known = accuracy(images[half], targets[half], images[~half], targets[~half])
    told, bad = [f"{known:.0%} of train"], []
    for seen in context.held_out_stats:
        theirs = _described(seen)
        if theirs is None or len(theirs[1]) < _LEAST or theirs[0].shape[1] != images.shape[1]:
            continue
        right = accuracy(images, targets, *theirs)
        chance = float(torch.bincount(theirs[1].clamp_min(0)).max()) / len(theirs[1])
        told.append(f"{right:.0%} of {seen.name}")
        if known > chance + 0.25 and right < chance + max(0.2 * (known - chance), 2 * (chance / len(theirs[1])) ** 0.5):
            bad.append(seen.name)
    if len(told) == 1:
        return skipped(f"there is no other split of {_LEAST} images")
    evidence = f"a linear model is right for {', '.join(told)}"
    if bad:
        return failed(
            evidence, f"check how images and targets of {join_names(bad)} are put together, and its order of classes"
        )
    return passed(evidence)


def _described(seen: SplitStats) -> tuple[Tensor, Tensor] | None:
    """Features and classes of the small copies of a split, or None."""
    good = seen.finite[seen.rows]
    targets = seen.targets[seen.rows][good]
    if not len(targets) or targets.ndim != 1 or targets.is_floating_point():
        return None
    return features(seen.small[good][:_MOST]), targets[:_MOST].long()


@check
def target_blocks(context: CheckContext) -> Result:
    """Training samples in one part of the data set whose targets do not go with their images, while those of others do."""
    if not context.classes:
        return skipped("there are no classes")
    known = _described(context.train_stats)
    if known is None or len(known[1]) < _BLOCKS * _LEAST or len(torch.unique(known[1])) < 2:
        return skipped(f"fewer than {_BLOCKS * _LEAST} training images of one shape could be looked at")
    images, targets = known
    order = context.train_stats.indices[context.train_stats.rows][context.train_stats.finite[context.train_stats.rows]][
        : len(targets)
    ].argsort()
    images, targets = images[order], targets[order]
    block = torch.arange(len(targets)) * _BLOCKS // len(targets)
    scores, chances = [], []
    for number in range(_BLOCKS):
        # Fitted to its own other half: wrong targets elsewhere do no harm, and no block has to be like another.
        inside = (block == number).nonzero().flatten()
        first, second = inside[::2], inside[1::2]
        right = accuracy(images[first], targets[first], images[second], targets[second])
        back = accuracy(images[second], targets[second], images[first], targets[first])
        scores.append((right + back) / 2)
        chances.append(float(torch.bincount(targets[inside].clamp_min(0)).max()) / len(inside))
    evidence = "a linear model is right for " + ", ".join(f"{each:.0%}" for each in scores)
    evidence += f" of {_BLOCKS} parts of train in the order of the data set"
    gain = [score - chance for score, chance in zip(scores, chances, strict=True)]
    if max(chances) < 0.6 and max(gain) > 0.25 and min(gain) < 0.2 * max(gain):
        return warned(
            evidence, "look at how images and targets of this part were put together, and where it comes from"
        )
    return passed(evidence)


@check
def target_shift(context: CheckContext) -> Result:
    """Held-out numbers to predict that are distributed otherwise than those trained on, as in another unit."""
    if context.classes:
        return skipped("there are classes")
    ours = context.train_stats.targets.float().flatten()
    worst = (0.0, "")
    for seen in context.held_out_stats:
        theirs = seen.targets.float().flatten()
        if min(len(ours), len(theirs)) < _FEWEST or not bool(theirs.isfinite().all() and ours.isfinite().all()):
            continue
        points = torch.cat([ours, theirs]).sort().values
        gap = torch.searchsorted(ours.sort().values, points, right=True) / len(ours)
        gap = (gap - torch.searchsorted(theirs.sort().values, points, right=True) / len(theirs)).abs()
        usual = (1 / len(ours) + 1 / len(theirs)) ** 0.5
        means = f"mean {float(theirs.mean()):.4g} in {seen.name}, {float(ours.mean()):.4g} in train"
        told = f"{means}; deviation {float(theirs.std()):.4g} and {float(ours.std()):.4g}"
        worst = max(worst, (float(gap.max()) / (0.2 + 1.6 * usual), told))
    if not worst[1]:
        return skipped(f"there is no other split of {_FEWEST} samples")
    if worst[0] > 1:
        return warned(worst[1], "scale the targets of every split in the same way, with the statistics of train")
    return passed(worst[1])
