"""Checks of the samples: images that are readable, of one shape and of the usual range, and masks and boxes that fit them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from runner.config.targets import preferred_data
from runner.instrument.nested import leaves_of
from runner.lab.check.context import CheckContext
from runner.lab.check.result import LIMITS, Result, check, failed, graded, join_names, need, none_of, passed, warned
from runner.lab.check.sample import Annotated, digest_of
from runner.run.model import num_classes_of

_DRAWN, _DRAWS = 16, 4  # images, and how often each is augmented to find a transform that fails at times
_AUGMENTED = 128  # images that are augmented
_CHANNELS = 5  # whose orders are tried


@check("data", any_task=True)
def readable(context: CheckContext) -> Result:
    """Images that cannot be read, or that training transforms do not take in every random draw."""
    bad = [(index, name, why) for name, stats in context.stats.items() for index, why in stats.unreadable.items()]
    count = sum(stats.read for stats in context.stats.values())
    if not bad:
        drawn = context.readable("train", _DRAWN) if context.config.transform.sample_train else []
        for index in drawn:  # raises what a transform does
            context.splits.reader("train", True).items([(epoch, index) for epoch in range(1, 1 + _DRAWS)])
        return passed(f"{count:,} images read")
    index, name, reason = bad[0]
    evidence = f"{len(bad):,} of {count:,} images cannot be read; the first is sample {index} of {name}: {reason}"
    if context.config.data.on_error == "skip":
        return warned(evidence, "repair or remove them; data.on_error=skip replaces them with other samples")
    return failed(evidence, "repair or remove them, or set data.on_error=skip")


@check("data")
def image_shapes(context: CheckContext) -> Result:
    """Images of different shapes or dtypes, which cannot form a batch, or whose channels come last."""
    shapes = {shape: name for name, stats in reversed(context.stats.items()) for shape in stats.shapes}
    dtypes = [*dict.fromkeys(dtype for stats in reversed(context.stats.values()) for dtype in stats.dtypes)]
    if len(shapes) > 1:
        first, second = list(shapes)[:2]
        evidence = f"{len(shapes)} shapes, such as {first} in {shapes[first]} and {second} in {shapes[second]}"
        return failed(evidence, "data.image_size=..., or a transform that gives all images one shape")
    if len(dtypes) > 1:
        return failed(f"dtypes {', '.join(dtypes)}", "one dtype in every split: uint8, or float in [0, 1]")
    shape = next(iter(shapes), ())
    if shape and shape[-1] in (1, 3, 4) and min(shape[:-1]) > 4:
        fix = "image.permute(2, 0, 1) in the data set, if the channels come last"
        return warned(f"images of shape {tuple(shape)} are read as {shape[0]} channels of {shape[1]}x{shape[2]}", fix)
    return passed(f"{'x'.join(map(str, shape))} {''.join(dtypes)} in every split")


@check("data", any_task=True)
def finite_images(context: CheckContext) -> Result:
    """Images with NaN or infinite values."""
    found = {name: stats.indices[~stats.finite].tolist() for name, stats in context.stats.items()}
    bad = [f"sample {index} of {name}" for name, indices in found.items() for index in indices]
    fix = "repair the data set: one such image makes the gradient of its whole batch NaN"
    return none_of(bad, "images contain NaN or infinity", fix, "no NaN and no infinity")


@check("data")
def constant_images(context: CheckContext) -> Result:
    """Images with a single value, such as all zeros."""
    count, found = sum(len(stats.indices) for stats in context.stats.values()), []
    for name, stats in context.stats.items():
        rows = zip(stats.indices[stats.constant].tolist(), stats.low[stats.constant].tolist(), strict=True)
        found += [f"{index} of {name} ({value:g})" for index, value in rows]
    evidence = f"{len(found):,} of {count:,} images have a single value"
    evidence += f": samples {join_names(found)}" if found else ""
    fix = "check how the data set reads images, and remove empty ones"
    return graded(evidence, fix, fail=len(found) > LIMITS.accident * count, warn=bool(found))


@check("data")
def outlier_images(context: CheckContext) -> Result:
    """Images with values far from those of all others."""
    found: list[tuple[float, str]] = []
    for name, stats in context.stats.items():
        usable = stats.finite & ~stats.constant
        if int(usable.sum()) < LIMITS.fewest:
            continue
        peak = torch.maximum(stats.low.abs(), stats.high.abs())
        for what, values in (("mean", stats.means.mean(1)), ("largest value", peak)):
            median = values[usable].median()
            # If most images are equal, the median deviation is 0; then the size of the values is the scale.
            scale = max(float((values[usable] - median).abs().median()), 0.1 * float(median.abs()), 0.02)
            for place in (usable & ((values - median).abs() > LIMITS.outlier * scale)).nonzero().flatten().tolist():
                where = f"sample {int(stats.indices[place])} of {name} has a {what} of {float(values[place]):.4g}"
                found.append((float((values[place] - median).abs()) / scale, where))
    if not found:
        return passed(f"no mean and no peak is more than {LIMITS.outlier:g} median deviations from the median")
    distance, where = max(found)
    evidence = f"{len(found):,} found; {where}, {distance:.0f} median deviations from the median"
    return warned(evidence, "look at these images for another unit, another format, or damage")


@check("data")
def image_range(context: CheckContext) -> Result:
    """Values outside the range that the pipeline expects: uint8 up to 255, or float in [0, 1]."""
    stats = context.train_stats
    good = stats.finite
    need(good.any(), "no image is finite")
    low, high = float(stats.low[good].min()), float(stats.high[good].max())
    kind = next(iter(stats.dtypes), "")
    if kind == "uint8":
        top = round(high * 255)
        evidence = f"uint8 values from {round(low * 255)} to {top}"
        if top <= 1 and not bool(stats.constant.all()):
            return failed(evidence, "images in [0, 1] were cast to uint8: multiply by 255 first, or use float images")
        fix = f"spread the values over 0 to 255 (they are {255 / max(1, top):.0f} times too dark)"
        return graded(evidence, fix, warn=1 < top <= 31)
    evidence = f"{kind} values from {low:.4g} to {high:.4g}"
    if low >= 0 and 0 < high < 2 / 255:
        return failed(evidence, "the images were divided by 255 twice: use uint8, or divide once")
    if high > 2 and low >= 0 and not stats.fractions:
        return failed(evidence, "uint8 was cast to float without scaling: use uint8, or divide by 255")
    fix = "scale images to [0, 1] in the data set; data.normalize comes after that"
    return graded(evidence, fix, warn=high > 16 or low < -16)


def _numbers(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values.tolist()) + "]"


def _distance(moments: Tensor, others: Tensor) -> tuple[float, float]:
    """Largest distance of two means in deviations, and largest ratio of two deviations, over the channels."""
    (mean, std), (other_mean, other_std) = moments, others
    return float(((other_mean - mean).abs() / std).max()), float((other_std / std).log().abs().max().exp())


@check("data")
def normalization(context: CheckContext) -> Result:
    """Statistics in data.normalize that differ from those of the data, or splits with very different ones."""
    moments = context.train_stats.channel_statistics()
    need(moments[1].min() > 1e-6, "the images have no statistics to compare with")
    mean, std = context.splits.mean, context.splits.std
    given = torch.stack([torch.tensor(each, dtype=torch.float64).expand(moments.shape[1]) for each in (mean, std)])
    away, wide = _distance(moments, given)
    evidence = f"mean {_numbers(given[0])} std {_numbers(given[1])}, "
    evidence += f"measured {_numbers(moments[0])} and {_numbers(moments[1])}"
    wanted = preferred_data(context.config.model, grey=context.splits.channels == 1).get("normalize")
    if wanted == {"mean": list(mean), "std": list(std)}:
        return passed(f"{evidence}: as the pretrained weights of the model expect")
    if not given[0].any() and (given[1] == 1).all():
        return passed(f"{evidence}: nothing is normalized, as an autoencoder of pixels wants it")
    fix = f"data.normalize.mean={_numbers(moments[0])} data.normalize.std={_numbers(moments[1])}, or null to measure"
    if float(context.train_stats.low[context.train_stats.finite].min()) < -0.05 and (away > 0.4 or wide > 1.8):
        evidence += ": the images have values below 0, so they are already normalized"
        return failed(evidence, f"normalize once, in the data set or with {fix}")
    if away > LIMITS.mean_warn or wide > LIMITS.std_warn:
        return graded(evidence, fix, fail=away > LIMITS.mean_fail or wide > LIMITS.std_fail, warn=True)
    for stats in context.held_out_stats:
        others = stats.channel_statistics()
        if int(stats.finite.sum()) < LIMITS.fewest or others.shape != moments.shape:
            continue
        away, wide = _distance(moments, others)
        if away > LIMITS.mean_warn or wide > LIMITS.std_warn:
            evidence = f"mean {_numbers(others[0])} std {_numbers(others[1])} in {stats.name}, "
            evidence += f"{_numbers(moments[0])} and {_numbers(moments[1])} in train"
            return warned(evidence, f"read {stats.name} as train: the same source, unit and transforms")
    return passed(evidence)


def _better_permutation(moments: Tensor, others: Tensor) -> tuple[int, ...] | None:
    """A channel order in which `others` (2, C) is much closer to `moments` (2, C) than as it is, or None."""
    distance = (moments[:, :, None] - others[:, None, :]).abs().sum(0)
    rows = range(len(distance))
    if len(rows) > _CHANNELS:
        return None
    sums = {order: float(distance[rows, order].sum()) for order in itertools.permutations(rows)}
    same, best = sums[tuple(rows)], min(sums, key=sums.__getitem__)
    return best if same > 0.05 * len(rows) and sums[best] < 0.25 * same else None


@check("data")
def channel_order(context: CheckContext) -> Result:
    """Swapped channels: relative to data.normalize, or between splits."""
    need(context.splits.channels >= 2, "one channel")
    ours = context.train_stats.channel_statistics()
    need(ours.isfinite().all(), "no image is finite")
    evidence = f"the channel means are {_numbers(ours[0])}"
    if len(context.splits.mean) == len(ours[0]):
        given = torch.tensor([context.splits.mean, context.splits.std], dtype=torch.float64)
        if (order := _better_permutation(ours, given)) is not None:
            evidence += f"; data.normalize.mean={_numbers(given[0])} fits them in the order {order}"
            return failed(evidence, "swap the channels where images are read (BGR to RGB), or in data.normalize")
    for stats in context.held_out_stats:
        other = stats.channel_statistics()
        if int(stats.finite.sum()) >= LIMITS.fewest and (order := _better_permutation(ours, other)) is not None:
            evidence += f" in train and {_numbers(other[0])} in {stats.name}"
            return failed(evidence, f"read the channels of {stats.name} in the order {order}, as in train")
    return passed(f"channel means {_numbers(ours[0])}")


@check("data", any_task=True)
def evaluation_transform(context: CheckContext) -> Result:
    """Random augmentation in an evaluation: the same sample gives different images."""
    checked, transforms = 0, context.config.transform.sample_eval or context.config.transform.eval
    held_out = context.held_out_stats or [context.train_stats]  # training samples may be augmented by their data set
    for stats in held_out:
        indices = stats.indices[:: max(1, len(stats.indices) // 8)][:8].tolist()
        # One by one, as samples of different batches may not fit together
        batches = [[context.read(stats.name, [index], epoch).data for index in indices] for epoch in (0, 0, 1)]
        reads = [[[*map(digest_of, leaves_of(each))] for each in epoch] for epoch in batches]
        differ = [sum(a != b for a, b in zip(reads[0], again, strict=True)) for again in reads[1:]]
        count, of = differ[0] or differ[1], f"{len(indices)} samples of {stats.name}"
        if count and transforms:
            fix = "move random transforms from transform.eval to train, sample_eval to sample_train"
            return failed(f"{count} of {of} differ when they are read again", fix)
        # Views and noise are drawn as a whole, unlike an image whose target stays, or that is cropped with its mask
        fields = [{*zip(*epoch, strict=False)} for epoch in reads]
        if differ[0] or (count and (fields[0] & fields[2] or stats.annotated)):
            evidence = f"{count} of {of} differ when they are read again: the data set itself draws them"
            return warned(evidence, "nothing if it should: each evaluation draws the same samples")
        checked += len(indices)
    return passed(f"{checked} samples of {len(held_out)} splits are the same in each evaluation")


@check("data")
def augmentation(context: CheckContext) -> Result:
    """Training images that augmentation makes empty, or very different from evaluated images."""
    need(context.train_stats.finite.all(), "there are images that are not finite")
    plain = context.batch.images.float()
    batch = next(context.splits.train.loader.batches(0, 0, 1))
    augmented, where = batch.images[:_AUGMENTED].float(), "repair transform.train or sample_train"
    if not bool(augmented.isfinite().all()):
        return failed("a batch of augmented images contains NaN or infinity", where)
    # The same images with and without augmentation are compared where that is possible
    if context.splits.train.mix is None and not any(stats.unreadable for stats in context.stats.values()):
        plain = context.read("train", batch.indices[:_AUGMENTED].tolist()).images.float()
    ours, theirs = _moments_without_padding(context, plain, augmented)
    wide = ours[1].clamp_min(1e-6)
    factor = float((theirs[1] / wide).clamp_min(1e-6).log().abs().max().exp())
    away = float(((theirs[0] - ours[0]).abs() / wide).max())
    evidence = f"standard deviation {float(augmented.std()):.3g} with augmentation, {float(plain.std()):.3g} without; "
    evidence += f"the mean of a channel moves by up to {away:.2g} deviations"
    fix = f"{where}: its range, order or strength"
    if factor > LIMITS.scaled_fail or away > LIMITS.moved_fail:
        return failed(evidence, fix)
    if len(plain) == len(augmented):
        empty = float((augmented.flatten(1).std(1) < LIMITS.empty * plain.flatten(1).std(1)).float().mean())
        if empty > LIMITS.emptied:
            evidence = f"{empty:.0%} of the images have almost no contrast left after augmentation; {evidence}"
            return graded(evidence, fix, fail=empty > 0.5, warn=True)
    if (order := _better_permutation(ours, theirs)) is not None:
        return failed(f"{evidence}; the channels are in the order {order}", "keep the order of the channels (RGB)")
    return graded(evidence, fix, warn=factor > LIMITS.scaled_warn or away > LIMITS.moved_warn)


def _moments_without_padding(context: CheckContext, *batches: Tensor) -> list[Tensor]:
    """Mean and standard deviation of each channel of images (N, C, H, W) as the model takes them: (2, C) each.

    Black pixels do not count: shifts and rotations fill with them, whatever the background of the images is.
    """
    mean, std = (batches[0].new_tensor(each).view(1, -1, 1, 1) for each in (context.splits.mean, context.splits.std))
    shown = [((each + mean / std).abs() > 1e-4).any(1) for each in batches]
    left, all_shown = (int(part.sum()) / len(part) for part in reversed(shown))
    if left < 0.5 * all_shown:  # almost everything is gone
        shown = [torch.ones_like(each) for each in shown]
    pixels = [each.movedim(1, -1)[part] for each, part in zip(batches, shown, strict=True)]
    return [torch.stack([each.mean(0), each.std(0)]) for each in pixels]


def _annotated(context: CheckContext) -> list[tuple[str, Annotated]]:
    """The samples with masks or boxes that were read, each with its split."""
    found = [(name, about) for name, stats in context.stats.items() for about in stats.annotated]
    need(found, "no sample has an image with masks or boxes of torchvision.tv_tensors")
    return found


@check("samples", any_task=True)
def class_ids(context: CheckContext) -> Result:
    """Class numbers that belong to no class: counted from 1 in masks, from 0 for boxes, whose background is 0, or colors."""
    some, task = _annotated(context), context.training.task
    count, ignored = num_classes_of(task), getattr(task, "ignore_index", None)
    labels = [about.labels for _, about in some if about.labels is not None]
    if any(len(each) for each in labels):
        low, high = int(torch.cat(labels).min()), int(torch.cat(labels).max())
        evidence = f"the labels of boxes are from {low} to {high}; task.num_classes={count}"
        fix = "number the classes of boxes from 1: 0 is the background" if low < 1 else "another task.num_classes"
        return graded(evidence, fix, fail=low < 1 or (count is not None and high > count))
    masks = [about.values for _, about in some if about.values]
    values = sorted(set[int]().union(*masks) - {ignored})
    what = "there are no masks of classes, all pixels are ignored, or the task has no num_classes"
    need(count is not None and values, what)
    assert count is not None
    evidence = f"values {join_names(values, most=12)} in {len(masks):,} masks; "
    evidence += f"task.num_classes={count} and ignore_index={ignored}"
    if values[0] >= 1 and values[-1] == count:
        return failed(evidence, "subtract 1: classes of pixels are counted from 0")
    wrong = [value for value in values if not 0 <= value < count]
    fix = "classes as numbers from 0 on, not as colors or 0 and 255; task.ignore_index for pixels without a class"
    return graded(f"{evidence}: {join_names(wrong) or 'none'} belong to no class", fix, fail=bool(wrong))


@check("samples", any_task=True)
def mask_size(context: CheckContext) -> Result:
    """Masks of another size than their image."""
    masked = [(name, about) for name, about in _annotated(context) if about.masks]
    need(masked, "there are no masks")
    found = [f"sample {about.index} of {name}" for name, about in masked if about.masks != {about.size}]
    fix = "a transform of the whole sample, which resizes image and mask together"
    return none_of(found, "masks have another size than their image", fix, f"those of {len(masked):,} images fit")


@check("samples", any_task=True)
def box_format(context: CheckContext) -> Result:
    """Boxes in another format than they say: with a negative size, beyond the image, or in shares of its size."""
    some = [(about.boxes, about.size) for _, about in _annotated(context) if about.boxes is not None]
    need(any(len(each) for each, _ in some), "there are no boxes")
    boxes = torch.cat([each for each, _ in some])
    size = torch.cat([torch.tensor(size[::-1]).expand(len(each), 2) for each, size in some])
    low, high = boxes[:, :2], boxes[:, 2:]
    degenerate, beyond = (high <= low).any(1), ((low < -1) | (high > size + 1)).any(1)
    share, outside = float(degenerate.double().mean()), float(beyond.double().mean())
    evidence = f"{share:.1%} of {len(boxes):,} boxes have no positive size, {outside:.1%} reach beyond their image"
    fix = "tv_tensors.BoundingBoxes with the right format, such as XYWH for COCO, and the size of its own image"
    if bool((boxes.abs() <= 1).all()) and float(size.min()) > 2:
        return failed(f"all {len(boxes):,} boxes are from 0 to 1", f"pixels instead of shares of the image; {fix}")
    warn = share > 0 or outside > LIMITS.bad_boxes_warn
    return graded(evidence, fix, fail=max(share, outside) > LIMITS.bad_boxes_fail, warn=warn)
