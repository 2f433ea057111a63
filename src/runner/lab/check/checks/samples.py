"""Checks of samples with masks or boxes, which are recognised by the types of `torchvision.tv_tensors`."""

from __future__ import annotations

import torch

from runner.lab.check.context import CheckContext
from runner.lab.check.limits import LIMITS
from runner.lab.check.result import NotApplicable, Result, check, failed, graded, join_names, need, none_of
from runner.lab.check.sample import Annotated
from runner.run.model import num_classes_of


def _annotated(context: CheckContext) -> list[tuple[str, Annotated]]:
    """The samples with masks or boxes that were read, each with its split."""
    found = [(name, about) for name, stats in context.stats.items() for about in stats.annotated]
    need(found, "no sample has an image with masks or boxes of torchvision.tv_tensors")
    return found


@check("samples", any_task=True)
def class_ids(context: CheckContext) -> Result:
    """Class numbers that belong to no class: counted from 1 in masks, from 0 for boxes, whose background is 0, or colors."""
    some, count = _annotated(context), num_classes_of(context.training.task)
    labels = [about.labels for _, about in some if about.labels is not None]
    if any(len(each) for each in labels):
        low, high = int(torch.cat(labels).min()), int(torch.cat(labels).max())
        evidence = f"the labels of boxes are from {low} to {high}; task.num_classes={count}"
        fix = "number the classes of boxes from 1: 0 is the background" if low < 1 else "another task.num_classes"
        return graded(evidence, fix, fail=low < 1 or (count is not None and high > count))
    masks, ignored = (
        [about.values for _, about in some if about.values],
        getattr(context.training.task, "ignore_index", None),
    )
    values = sorted(set[int]().union(*masks) - {ignored})
    if count is None or not values:
        raise NotApplicable("there are no masks of classes, all pixels are ignored, or the task has no num_classes")
    evidence = (
        f"values {join_names(values, 12)} in {len(masks):,} masks; task.num_classes={count} and ignore_index={ignored}"
    )
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
    return graded(
        evidence,
        fix,
        fail=max(share, outside) > LIMITS.bad_boxes_fail,
        warn=share > 0 or outside > LIMITS.bad_boxes_warn,
    )
