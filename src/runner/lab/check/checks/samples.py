"""Checks of samples with masks or boxes, which are recognised by the types of `torchvision.tv_tensors`."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from runner.data.module import callables
from runner.data.sample_rng import preserved_rng, seed_generators
from runner.data.samples import as_tensor
from runner.instrument.nested import leaves_of, mapped_items
from runner.lab.check.context import CheckContext
from runner.lab.check.result import NotApplicable, Result, check, failed, graded, join_names, need, none_of
from runner.lab.check.split_stats import XYXY, Annotated, is_boxes, is_image
from runner.run.model import num_classes_of

_BAD, _MANY_BAD = 0.01, 0.2  # shares of boxes
_EMPTY = 0.5  # share of images without an object
_CELLS, _DRAWS, _TRIED = 6, 8, 4  # of a marked picture: cells a side, draws of a transform, samples
_RELATED = 0.5  # correlation of a drawn picture with its mask


def _annotated(context: CheckContext) -> list[tuple[str, Annotated]]:
    """The samples with masks or boxes that were read, each with its split."""
    found = [(name, about) for name, stats in context.stats.items() for about in stats.annotated]
    need(found, "no sample has an image with masks or boxes of torchvision.tv_tensors")
    return found


def _values(context: CheckContext) -> tuple[list[int], str, int]:
    """The values in masks of classes that are not ignored, a sentence about them, and the number of classes."""
    masks = [about.values for _, about in _annotated(context) if about.values]
    ignored, count = getattr(context.training.task, "ignore_index", None), num_classes_of(context.training.task)
    values = sorted(set[int]().union(*masks) - {ignored})
    need(masks, "there are no masks of classes")
    if count is None or not values:
        raise NotApplicable("all pixels are ignored, or the task has no num_classes")
    said = f"values {join_names(values, 12)} in {len(masks):,} masks; task.num_classes={count}"
    return values, f"{said} and task.ignore_index={ignored}", count


@check("samples", any_task=True)
def class_ids(context: CheckContext) -> Result:
    """Class numbers that are counted from 1 in masks, or from 0 for boxes, whose background is 0."""
    labels = [about.labels for _, about in _annotated(context) if about.labels is not None]
    if any(len(each) for each in labels):
        count = num_classes_of(context.training.task)
        low, high = int(torch.cat(labels).min()), int(torch.cat(labels).max())
        evidence = f"the labels of boxes are from {low} to {high}; task.num_classes={count}"
        fix = "number the classes of boxes from 1: 0 is the background" if low < 1 else "another task.num_classes"
        return graded(evidence, fix, fail=low < 1 or (count is not None and high > count))
    values, evidence, count = _values(context)
    from_one = values[0] >= 1 and values[-1] == count
    return graded(evidence, "subtract 1: classes of pixels are counted from 0", fail=from_one)


@check("samples", any_task=True)
def mask_values(context: CheckContext) -> Result:
    """Values of masks that belong to no class of the task, and are not ignored."""
    values, evidence, count = _values(context)
    need(values[0] < 1 or values[-1] != count, "class-ids says more")
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
    return graded(evidence, fix, fail=max(share, outside) > _MANY_BAD, warn=share > 0 or outside > _BAD)


@check("samples", any_task=True)
def objects(context: CheckContext) -> Result:
    """More images without any object than with one."""
    found, background = _annotated(context), {0, getattr(context.training.task, "ignore_index", None)}
    empty = [not len(each.boxes) if each.boxes is not None else each.values <= background for _, each in found]
    share = sum(empty) / len(found)
    fix = "check how the annotations are found: file names, ids of images, filters"
    return graded(f"{share:.0%} of {len(found):,} images have no object", fix, warn=share > _EMPTY)


def _marked(sample: Any, seed: int) -> Any:
    """A sample with a drawn picture instead of its image, and masks and boxes of what it shows.

    Masks of classes have cells of two values, boxes and their masks a bright rectangle in a corner: no flip or turn of them
    looks like the picture itself.
    """
    leaves = leaves_of(sample)
    height, width = F.get_size(next(filter(is_image, leaves)))
    box = torch.tensor([width * 0.05, height * 0.1, width * 0.4, height * 0.45])
    shown = _inside(box, (height, width))
    if not any(is_boxes(leaf) for leaf in leaves):
        drawn = torch.rand(1, 1, _CELLS, _CELLS, generator=torch.Generator().manual_seed(seed)) > 0.5
        shown = torch.nn.functional.interpolate(drawn.float(), (height, width))[0, 0] > 0.5
    picture = shown * 160 + 48

    def marked(leaf: Any) -> Any:
        if isinstance(leaf, PIL.Image.Image):
            return PIL.Image.fromarray(picture.byte().numpy()).convert(leaf.mode)
        values: Tensor
        if is_boxes(leaf):
            values = F.convert_bounding_box_format(box.expand(len(leaf), 4), XYXY, leaf.format)
        elif isinstance(leaf, tv_tensors.Image):
            values = (picture if leaf.dtype == torch.uint8 else picture / 255).expand(leaf.shape)
        elif _is_mask(leaf, (height, width)):
            values = shown.expand(leaf.shape)
        else:
            return leaf
        values = values.to(leaf.dtype).clone()
        return tv_tensors.wrap(values, like=leaf) if isinstance(leaf, tv_tensors.TVTensor) else values

    return mapped_items(sample, object, marked)


def _is_mask(leaf: Any, size: tuple[int, int]) -> bool:
    """True for a mask; also for one that lacks its type, by which transforms know it: whole numbers, one for each pixel."""
    plain = type(leaf) is Tensor and not leaf.is_floating_point() and leaf.ndim in (2, 3)
    return isinstance(leaf, tv_tensors.Mask) or (plain and tuple(leaf.shape[-2:]) == size)


def _inside(box: Tensor, size: Sequence[int]) -> Tensor:
    """Where a box (4,), XYXY, is in an image of a size: bool (H, W)."""
    left, top, right, bottom = box.round().int().clamp_min(0).tolist()
    inside = torch.zeros(*size, dtype=torch.bool)
    inside[top:bottom, left:right] = True
    return inside


def _correlations(before: Any, after: Any) -> list[float]:
    """How much the picture has to do with each mask and the box after a transform: 1 for all, and about 0 for nothing."""
    leaves, now, found = leaves_of(before), leaves_of(after), []
    if len(leaves) != len(now):
        return []
    place = next(place for place, leaf in enumerate(leaves) if is_image(leaf))
    size, image = tuple(F.get_size(leaves[place])), as_tensor(now[place]).float().mean(0)
    for leaf, given in zip(leaves, now, strict=True):
        if is_boxes(leaf) and len(given):
            boxes = F.convert_bounding_box_format(
                given.as_subclass(Tensor), getattr(given, "format", leaf.format), XYXY
            )
            mask = _inside(boxes[0], image.shape)
        elif _is_mask(leaf, size) and given.numel() and given.shape[-2:] == image.shape:
            mask = given.as_subclass(Tensor).reshape(-1, *image.shape)[0]
        else:
            continue
        values, counts = torch.unique(mask, return_counts=True)
        if len(values) > 1:
            a, b = values[counts.topk(2).indices]  # a third value is what fills the border
            pairs = torch.stack([image, (mask == a).float()])[:, (mask == a) | (mask == b)]
            found.append(float(torch.corrcoef(pairs)[0, 1].abs().nan_to_num(1.0)))
    return found


@check("samples", any_task=True)
def joint_transform(context: CheckContext) -> Result:
    """A transform of training that moves an image and not its mask or boxes, or the reverse."""
    nodes, dataset = context.config.transform.sample_train, context.splits.parts["train"][0]
    need(context.whole and nodes, "there is no transform.sample_train of whole samples")
    transforms, compared = callables("transform.sample_train", nodes), []
    without = {
        about.index for about in context.train_stats.annotated if about.boxes is not None and not len(about.boxes)
    }
    indices = [index for index in context.readable("train", len(without) + _TRIED) if index not in without]
    for index, epoch in itertools.product(indices[:_TRIED], range(_DRAWS)):
        with preserved_rng():
            seed_generators(context.config.seed, epoch, index)
            sample = dataset[index]
            if any(map(is_image, leaves_of(sample))):
                before = _marked(sample, index)
                after = functools.reduce(lambda value, transform: transform(value), transforms, copy.deepcopy(before))
                compared += [min(each) for each in [_correlations(before, after)] if each]
    need(compared, "no mask and no box is left to compare")
    apart = sum(each < _RELATED for each in compared)
    evidence = f"in {apart} of {len(compared)} draws of the transforms, a drawn image and its mask or boxes differ"
    fix = "torchvision.transforms.v2 on the whole sample, with masks and boxes of torchvision.tv_tensors"
    return graded(evidence, fix, fail=apart > 1, warn=apart > 0)
