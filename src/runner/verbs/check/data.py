"""Checks of the images: readable, alike, of the range and the statistics that a model expects."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from runner.config.targets import preferred_data
from runner.verbs.check.context import CheckContext, few
from runner.verbs.check.result import Result, check, failed, join_names, passed, skipped, warned

_FAR = 20.0  # how many times the usual distance from the median an outlier is away
_AUGMENTED = 128  # images that are augmented
_EMPTIED = 0.15  # share of an image's contrast below which it shows nothing
_MANY = 0.01  # share of images above which a fault is no accident


@check
def readable(context: CheckContext) -> Result:
    """Images that cannot be read."""
    bad = {name: seen.unreadable for name, seen in context.stats.items() if seen.unreadable}
    count = sum(len(seen.indices) + len(seen.unreadable) for seen in context.stats.values())
    if not bad:
        return passed(f"{count:,} images read")
    name, reasons = next(iter(bad.items()))
    index, reason = next(iter(reasons.items()))
    total = sum(len(reasons) for reasons in bad.values())
    evidence = f"{total:,} of {count:,} images cannot be read; the first is sample {index} of {name}: {reason}"
    if context.config.data.on_error == "skip":
        return warned(evidence, "repair or remove them; data.on_error=skip takes others in their places")
    return failed(evidence, "repair or remove them, or data.on_error=skip")


@check
def image_shapes(context: CheckContext) -> Result:
    """Images of different shapes or types, which no batch can be made of."""
    shapes = {shape: name for name, seen in reversed(context.stats.items()) for shape in seen.shapes}
    dtypes = {dtype: name for name, seen in reversed(context.stats.items()) for dtype in seen.dtypes}
    if len(shapes) > 1:
        first, second = list(shapes)[:2]
        where = f"{first} in {shapes[first]} and {second} in {shapes[second]}"
        return failed(
            f"{len(shapes)} shapes, such as {where}", "data.image_size=..., or a transform that makes them equal"
        )
    if len(dtypes) > 1:
        return failed(
            f"types {', '.join(dtypes)}", "one type in every split of the data set: uint8, or float in [0, 1]"
        )
    return passed(f"{'x'.join(map(str, next(iter(shapes), ())))} {next(iter(dtypes), '')} in every split")


@check
def finite_images(context: CheckContext) -> Result:
    """Images with NaN or infinite values."""
    for name, seen in context.stats.items():
        bad = seen.indices[~seen.finite].tolist()
        if bad:
            names = join_names([str(index) for index in bad])
            evidence = f"{len(bad):,} of {len(seen.indices):,} images of {name} hold NaN or infinity: samples {names}"
            return failed(evidence, "mend the data set: such an image turns the whole batch's gradient into NaN")
    return passed("no NaN and no infinity")


@check
def constant_images(context: CheckContext) -> Result:
    """Images that hold one and the same value, such as all zeros."""
    count = sum(len(seen.indices) for seen in context.stats.values())
    bad = {name: seen.indices[seen.constant].tolist() for name, seen in context.stats.items()}
    total = sum(map(len, bad.values()))
    if not total:
        return passed(f"none of {count:,}")
    name = max(bad, key=lambda name: len(bad[name]))
    seen, samples = context.stats[name], join_names([str(index) for index in bad[name]])
    value = float(seen.low[seen.constant][0])
    evidence = f"{total:,} of {count:,} images are one value (such as {value:g}): samples {samples} of {name}"
    fix = "look at what the data set reads, and remove what is empty"
    return failed(evidence, fix) if total > _MANY * count else warned(evidence, fix)


@check
def outlier_images(context: CheckContext) -> Result:
    """Images whose values are far from those of all others."""
    worst: tuple[float, str, int, str] | None = None
    total = 0
    for name, seen in context.stats.items():
        if len(seen.indices) < 16:
            continue
        peak = torch.maximum(seen.low.abs(), seen.high.abs())
        for what, values in (("mean", seen.means.mean(1)), ("largest value", peak)):
            usable = seen.finite & ~seen.constant
            if int(usable.sum()) < 16:
                continue
            middle = values[usable].median()
            # Where most are exactly alike, the median deviation is 0: then of the size of the values themselves.
            usual = max(float((values[usable] - middle).abs().median()), 0.1 * float(middle.abs()), 0.02)
            away = torch.where(usable, (values - middle).abs() / usual, torch.zeros_like(values))
            total += int((away > _FAR).sum())
            place = int(away.argmax())
            if float(away[place]) > _FAR and (worst is None or float(away[place]) > worst[0]):
                worst = (float(away[place]), name, int(seen.indices[place]), f"{what} {float(values[place]):.4g}")
    if worst is None:
        return passed(f"no mean and no peak over {_FAR:g} times the usual distance from the median")
    away_by, name, index, value = worst
    evidence = f"{total:,} found; sample {index} of {name} has a {value}, {away_by:.0f} times the usual distance"
    return warned(evidence, "look at these images: another unit, another format, or damage")


@check
def image_range(context: CheckContext) -> Result:
    """Values that are not scaled to what the pipeline takes: uint8 up to 255, or float in [0, 1]."""
    seen = context.train_stats
    good = seen.finite
    if not bool(good.any()):
        return skipped("no image could be looked at")
    low, high = float(seen.low[good].min()), float(seen.high[good].max())
    kind = next(iter(seen.dtypes), "")
    if kind == "uint8":
        top = round(high * 255)
        evidence = f"uint8 values from {round(low * 255)} to {top}"
        if top <= 1 and not bool(seen.constant.all()):
            return failed(evidence, "images in [0, 1] were cast to uint8: multiply by 255 first, or give them as float")
        if 1 < top <= 31:
            return warned(evidence, f"spread the values over 0 to 255 (now {255 / top:.0f} times too dark)")
        return passed(evidence)
    evidence = f"{kind} values from {low:.4g} to {high:.4g}"
    if low >= 0 and 0 < high < 2 / 255:
        return failed(evidence, "divided by 255 twice: give uint8, or divide once")
    if high > 2 and low >= 0 and seen.whole_numbers:
        return failed(evidence, "uint8 was made float without scaling: give uint8, or divide by 255")
    if high > 16 or low < -16:
        return warned(evidence, "scale images to [0, 1] in the data set; data.normalize comes after that")
    return passed(evidence)


def _measured(context: CheckContext, split: str) -> tuple[Tensor, Tensor] | None:
    """Mean and standard deviation of each channel over a split, or None where there is nothing to measure."""
    seen = context.stats[split]
    good = seen.finite
    if not bool(good.any()):
        return None
    means, stds = seen.means[good].double(), seen.stds[good].double()
    mean = means.mean(0)
    return mean, ((stds**2 + means**2).mean(0) - mean**2).clamp_min(0).sqrt()


def _numbers(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values.tolist()) + "]"


@check
def normalization(context: CheckContext) -> Result:
    """Statistics of data.normalize that are not those of the data."""
    measured = _measured(context, "train")
    if measured is None or float(measured[1].min()) < 1e-6:
        return skipped("the images have no statistics to compare with")
    mean, std = measured
    set_mean = torch.tensor(context.splits.mean, dtype=torch.float64).expand_as(mean)
    set_std = torch.tensor(context.splits.std, dtype=torch.float64).expand_as(std)
    away, wide = float(((set_mean - mean).abs() / std).max()), float((set_std / std).log().abs().max().exp())
    evidence = f"mean {_numbers(set_mean)} std {_numbers(set_std)}, measured {_numbers(mean)} and {_numbers(std)}"
    wanted = preferred_data(context.config.model, grey=context.splits.channels == 1).get("normalize")
    if wanted == {"mean": list(context.splits.mean), "std": list(context.splits.std)}:
        return passed(f"{evidence}: as the trained weights of the model want them")
    fix = f"data.normalize.mean={_numbers(mean)} data.normalize.std={_numbers(std)}, or null to measure them"
    if float(context.train_stats.low[context.train_stats.finite].min()) < -0.05 and (away > 0.4 or wide > 1.8):
        told = "the images have values below 0, so they are normalised already"
        return failed(f"{evidence}: {told}", f"normalise once, in the data set or by {fix}")
    if not (away <= 2 and wide <= 4):
        return failed(evidence, fix)
    return warned(evidence, fix) if away > 0.75 or wide > 2 else passed(evidence)


def _other_order(values: Tensor, others: Tensor) -> tuple[int, ...] | None:
    """The order of channels in which `others` (S, C) are much closer to `values` (S, C) than as they are, or None."""
    channels = values.shape[1]
    if not 2 <= channels <= 4:
        return None
    distance = {
        order: float((values - others[:, list(order)]).abs().sum()) for order in itertools.permutations(range(channels))
    }
    same = distance[tuple(range(channels))]
    best = min(distance, key=lambda order: distance[order])
    return best if same > 0.05 * channels and distance[best] < 0.25 * same else None


@check
def channel_order(context: CheckContext) -> Result:
    """Channels swapped: against the statistics of data.normalize, or between splits."""
    if context.splits.channels < 2:
        return skipped("one channel")
    measured = _measured(context, "train")
    if measured is None:
        return skipped("no image could be looked at")
    mean, std = measured
    if len(context.splits.mean) == len(mean):
        given = torch.tensor([context.splits.mean, context.splits.std], dtype=torch.float64)
        order = _other_order(torch.stack([mean, std]), given)
        if order is not None:
            fits = f"data.normalize.mean={_numbers(given[0])} fits them in the order {order}"
            evidence = f"channel means are {_numbers(mean)}, {fits}"
            return failed(
                evidence, "swap the channels where images are read (BGR to RGB), or the values of data.normalize"
            )
    for seen in context.held_out_stats:
        other = _measured(context, seen.name)
        if other is None:
            continue
        order = _other_order(torch.stack([mean, std]), torch.stack(other))
        if order is not None:
            evidence = f"channel means are {_numbers(mean)} in train and {_numbers(other[0])} in {seen.name}"
            return failed(evidence, f"read {seen.name} with its channels in the order {order}, like train")
    return passed(f"channel means {_numbers(mean)}")


@check
def splits_alike(context: CheckContext) -> Result:
    """Held-out images of other brightness or contrast than those trained on."""
    measured = _measured(context, "train")
    if measured is None or float(measured[1].min()) < 1e-6:
        return skipped("the images have no statistics to compare")
    mean, std = measured
    found = []
    for seen in context.held_out_stats:
        other = _measured(context, seen.name)
        if other is None or len(seen.indices) < 16:
            continue
        away, wide = float(((other[0] - mean).abs() / std).max()), float((other[1] / std).log().abs().max().exp())
        found.append((max(away / 0.5, wide / 1.5), seen.name, away, wide))
    if not found:
        return skipped("there is no other split of 16 images")
    worst, name, away, wide = max(found)
    evidence = f"{name} is {away:.2f} deviations away in its mean, its contrast {wide:.2f} times apart"
    if worst > 1:
        return warned(evidence, f"read {name} as train is read: the same source, unit and transforms")
    return passed(evidence)


@check
def evaluation_transform(context: CheckContext) -> Result:
    """Augmentation in an evaluation: the same sample comes out differently."""
    checked = 0
    for name, indices in few(list(context.stats.values()), 8).items():
        if not indices:
            continue
        first = context.read(name, indices)
        for epoch in (0, 1):
            again = context.read(name, indices, epoch)
            differ = (first.images != again.images).flatten(1).any(1) & first.images.isfinite().flatten(1).all(1)
            if bool(differ.any()):
                evidence = f"{int(differ.sum())} of {len(indices)} samples of {name} differ when they are read again"
                return failed(
                    evidence, "move what is random from transform.eval and sample_eval to train and sample_train"
                )
        checked += len(indices)
    return passed(f"{checked} samples of {len(context.stats)} splits are the same at each reading")


@check
def augmentation(context: CheckContext) -> Result:
    """Training images that augmentation has emptied, or taken far from those that are evaluated on."""
    if not bool(context.train_stats.finite.all()):
        return skipped("there are images that are not finite")
    images = context.batch.images
    batch = next(context.splits.train.loader.batches(0, 0, 1))
    augmented = batch.images[:_AUGMENTED].float()
    if not bool(augmented.isfinite().all()):
        return failed("a batch of augmented images holds NaN or infinity", "mend transform.train or sample_train")
    plain = images.float()
    if context.splits.train.mix is None and not any(seen.unreadable for seen in context.stats.values()):
        plain = context.read("train", batch.indices[:_AUGMENTED].tolist()).images.float()
    ours, theirs = augmented.transpose(0, 1).flatten(1), plain.transpose(0, 1).flatten(1)
    if len(ours) != len(theirs):
        return failed(
            f"{len(ours)} channels with augmentation, {len(theirs)} without", "mend transform.train or sample_train"
        )
    ratio = (ours.std(1) / theirs.std(1).clamp_min(1e-6)).clamp_min(1e-6)
    factor = float(ratio.log().abs().max().exp())
    away = float(((ours.mean(1) - theirs.mean(1)).abs() / theirs.std(1).clamp_min(1e-6)).max())
    evidence = f"deviation {float(augmented.std()):.3g} with augmentation, {float(plain.std()):.3g} without; "
    evidence += f"the mean of a channel moves by up to {away:.2g} deviations"
    fix = "mend transform.train or sample_train: range, order, or strength"
    if factor > 5 or away > 3:
        return failed(evidence, fix)
    if len(plain) == len(augmented):
        empty = float((augmented.flatten(1).std(1) < _EMPTIED * plain.flatten(1).std(1)).float().mean())
        if empty > 0.2:
            told = f"{empty:.0%} of the images have almost no contrast left with augmentation"
            return (failed if empty > 0.5 else warned)(f"{told}; {evidence}", fix)
    order = _other_order(_statistics(plain), _statistics(augmented)) if len(ours) > 1 else None
    if order is not None:
        return failed(f"{evidence}; the channels are in the order {order}", "keep the order of the channels (RGB)")
    return warned(evidence, fix) if factor > 2 or away > 1 else passed(evidence)


def _statistics(images: Tensor) -> Tensor:
    """Mean and deviation of each channel, (2, C)."""
    flat = images.transpose(0, 1).flatten(1)
    return torch.stack([flat.mean(1), flat.std(1)])
