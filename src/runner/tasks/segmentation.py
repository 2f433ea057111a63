"""One class per pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from runner.engine.metrics import PixelCounts
from runner.engine.protocols import Metric
from runner.tasks.task import Derived, colour


class Segmentation:
    """One class per pixel; samples are pairs of an image (C, H, W) and a mask (H, W) of class numbers, a `tv_tensors.Mask`.

    The model gives logits (B, num_classes, H, W), or a mapping with such logits as `out` and perhaps as `aux`, as those of
    torchvision do. The loss is the mean over all pixels that count.

    Args:
        num_classes: number of classes, the background included.
        ignore_index: value of pixels that count neither in the loss nor in the metrics.
        aux_weight: weight of the loss of `aux` beside that of `out`, in training.
    """

    monitor = "val/miou"
    mode: Literal["min", "max"] = "max"
    formats = ("masks",)
    export_description: ClassVar = {"postprocessing": {"mask": "largest logit of axis 1", "resize": "nearest"}}
    expected = "masks of class numbers from 0 on; data.dataset.values, where there is one, for other values"

    def __init__(self, num_classes: int, ignore_index: int = 255, aux_weight: float = 0.5) -> None:
        if not 2 <= num_classes <= 256:
            raise ValueError(f"num_classes must be 2 to 256, got {num_classes}; a background is a class too")
        if not 0 <= ignore_index <= 255:
            raise ValueError(f"ignore_index must be 0 to 255, as masks are bytes, got {ignore_index}")
        if aux_weight < 0:
            raise ValueError(f"aux_weight must not be negative, got {aux_weight}")
        self.num_classes, self.ignore_index, self.aux_weight = num_classes, ignore_index, aux_weight

    @staticmethod
    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and masks (B, H, W), of the integer type that they have.

        Raises:
            ValueError: if samples are something else, or their sizes differ.
        """
        from torchvision.tv_tensors import Mask  # takes a second, and most runs have no masks

        for image, mask in samples:
            # Transforms leave plain tensors beside an image alone: the mask would not move with it
            if not isinstance(image, Tensor) or not isinstance(mask, Mask | int):  # 0 beside image files without masks
                kinds = f"({type(image).__name__}, {type(mask).__name__})"
                raise ValueError(f"a sample is {kinds}, and (tv_tensors.Image, tv_tensors.Mask) is expected")
        images = [image.as_subclass(Tensor) for image, _ in samples]
        masks = [torch.as_tensor(mask).as_subclass(Tensor) for _, mask in samples]
        masks = [mask.squeeze(0) if mask.ndim == 3 else mask for mask in masks]
        shapes = sorted({(tuple(image.shape), tuple(mask.shape)) for image, mask in zip(images, masks, strict=True)})
        if len(shapes) > 1 or shapes[0][1] not in ((), shapes[0][0][1:]):
            given = " and ".join(f"{image} with {mask}" for image, mask in shapes[:2])
            cure = "transform=segmentation, or a resize or crop of both, gives one size"
            raise ValueError(f"images and masks have different shapes, such as {given}: {cure}")
        return default_collate(images), default_collate(masks)

    def outputs(self, classes: Sequence[str]) -> int:
        """One logit per class, for each pixel."""
        return self.num_classes

    def targets(self, targets: Tensor) -> Tensor:
        """Class numbers as int64."""
        return targets.long()

    def wrong_target(self, targets: Tensor, training: bool) -> tuple[int, str] | None:
        """The first mask with a value that is neither a class nor `ignore_index`; None if all are valid."""
        if targets.ndim != 3 or targets.is_floating_point():
            given = f"{str(targets.dtype).removeprefix('torch.')} values in shape {tuple(targets.shape[1:])}"
            return 0, f"has {given}, and a mask (H, W) of class numbers is expected"
        wrong = ((targets < 0) | (targets >= self.num_classes)) & (targets != self.ignore_index)
        if not bool(wrong.any()):
            return None
        place = wrong.nonzero()[0]
        value = int(targets[tuple(place)])
        classes = f"{self.num_classes} classes, 0 to {self.num_classes - 1}, and ignore_index={self.ignore_index}"
        return int(place[0]), f"has the value {value} in a pixel, and there are {classes}"

    def weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The number of pixels that count, which the loss is the mean over."""
        return (batch[1] != self.ignore_index).sum()

    def training_step(self, modules: Mapping[str, nn.Module], batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean loss over the pixels that count, with that of an auxiliary output if there is one."""
        masks = self.targets(batch[1])
        outputs = modules["model"](batch[0])
        loss: Tensor = modules["loss"](_main(outputs), masks)
        if isinstance(outputs, Mapping) and "aux" in outputs:
            loss = loss + self.aux_weight * modules["loss"](outputs["aux"], masks)
        return loss

    def evaluation_step(self, modules: Mapping[str, nn.Module], batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The loss, and as outputs the class of the largest logit of each pixel, int64 (B, H, W)."""
        masks = self.targets(batch[1])
        logits = _main(modules["model"](batch[0]))
        return {"loss": modules["loss"](logits, masks), "outputs": logits.argmax(1), "targets": masks}

    def predict_step(self, modules: Mapping[str, nn.Module], batch: Any, threshold: float = 0.0) -> dict[str, Tensor]:
        """The class of each pixel, uint8 (B, H, W), or `ignore_index` where its probability is below `threshold`."""
        logits = _main(modules["model"](batch[0]))
        mask = logits.argmax(1).to(torch.uint8)
        if threshold:
            mask[logits.float().softmax(1).amax(1) < threshold] = self.ignore_index
        return {"mask": mask}

    def shown(self, values: Tensor) -> dict[str, Tensor]:
        """What `draw` takes, of classes (H, W)."""
        return {"mask": values}

    def draw(self, sample: tuple[Tensor, Tensor], outputs: Mapping[str, Tensor], classes: Sequence[str] = ()) -> Tensor:
        """The image of a batch of one with its classes as colours, uint8 (3, H, W); a background as class 0 has none."""
        from torchvision.utils import draw_segmentation_masks

        picture, mask = sample[0][0].cpu(), outputs["mask"].cpu()
        numbers = sorted({*torch.unique(mask).tolist()} - {self.ignore_index, *range(_first_drawn(classes))})
        if numbers:  # torchvision warns of images without a mask
            masks = mask == torch.tensor(numbers)[:, None, None]
            picture = draw_segmentation_masks(picture, masks, alpha=0.5, colors=[colour(each) for each in numbers])
        return picture

    def legend(self, classes: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        """The colours of the classes that `draw` shows."""
        return {name: colour(number) for number, name in enumerate(classes) if number >= _first_drawn(classes)}

    def metric_names(self) -> list[str]:
        """Mean intersection over union of the classes, and share of pixels with the right class."""
        return ["miou", "pixel_accuracy"]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Both over all pixels of the split that count, from one confusion matrix."""
        miou = self._counts(device, "miou")
        return {"miou": miou, "pixel_accuracy": Derived(partial(_value, self._counts(device, "accuracy"), miou))}

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """IoU and accuracy of each class, and the confusion matrix, in pixels."""
        confusion = self._counts(device, "matrix")
        iou, recall = (partial(_value, self._counts(device, score), confusion) for score in ("iou", "recall"))
        return {"confusion": confusion, "label_iou": Derived(iou), "per_class": Derived(recall)}

    def _counts(self, device: torch.device, score: Any) -> PixelCounts:
        return PixelCounts(self.num_classes, self.ignore_index, device, score)


def _first_drawn(classes: Sequence[str]) -> int:
    """1 if class 0 is the background: its name says so, or is a number, or there are no names; else 0."""
    name = "".join(classes[:1]).strip("_ ").lower()
    return int(name in ("", "background", "bg", "void", "unlabeled", "unlabelled", "other", "none") or name.isdigit())


def _value(score: PixelCounts, counted: PixelCounts) -> Tensor:
    """A score of the pixels that another metric counted."""
    score.matrix = counted.matrix
    return score.compute()


def _main(outputs: Any) -> Tensor:
    """The logits (B, C, H, W) of what a model gives."""
    logits = outputs["out"] if isinstance(outputs, Mapping) else outputs
    if not isinstance(logits, Tensor) or logits.ndim != 4:
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the model must give logits (B, C, H, W), as model=torchvision_segmentation does, got {given}"
        )
    return logits
