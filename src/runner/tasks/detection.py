"""Boxes around objects, and their masks if there are any; the model computes its losses itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from runner.engine.metrics import Additive
from runner.engine.protocols import Metric
from runner.tasks.task import Derived, colour

_OF_OBJECTS = ("boxes", "labels", "masks")  # what models of torchvision are trained on
_SHOWN = 0.5  # least score of a box in a picture
_SCORES: dict[str, Any] = {"map": slice(None), "map_50": 0, "map_75": 5}  # which of the IoU 0.5, 0.55, ..., 0.95


class Detection:
    """Objects in images; samples are (image, target), as `runner.data.sources.detection.DetectionImages` has them.

    A batch is a list of B images, float (3, H, W) in [0, 1], and a list of B targets. The model is one of torchvision's, or is
    called as they are: in training, `model(images, targets)` gives a dict of losses; in evaluation, `model(images)` gives for
    each image a dict of `boxes` (N, 4), `labels` (N,), `scores` (N,) and perhaps `masks` (N, 1, H, W), probabilities.

    Args:
        num_classes: number of classes, without the background, which is class 0.
        masks: evaluate masks too.
    """

    monitor = "val/map"
    mode: Literal["min", "max"] = "max"
    formats = ("coco", "yolo")

    def __init__(self, num_classes: int, masks: bool = False) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes}")
        if importlib.util.find_spec("faster_coco_eval") is None:
            raise ValueError("faster-coco-eval is not installed: pip install 'runner[detection]'")
        self.num_classes, self._kinds = num_classes, ("bbox", "segm") if masks else ("bbox",)

    def outputs(self, classes: Sequence[str]) -> int:
        """The classes and the background."""
        return self.num_classes + 1

    @staticmethod
    def collate(samples: list[Any]) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Images and targets, each a list of plain tensors; `ValueError` for a label below 1, which is the background."""
        images = [image.as_subclass(Tensor) for image, _ in samples]
        plain: Any = lambda value: value.as_subclass(Tensor) if hasattr(value, "as_subclass") else value  # noqa: E731
        targets = (target if isinstance(target, Mapping) else {} for _, target in samples)  # 0 for files to predict
        rows = [{name: plain(value) for name, value in target.items()} for target in targets]
        if any(bool((row["labels"] < 1).any()) for row in rows if "labels" in row):
            raise ValueError("an object has a label below 1; labels begin at 1, and 0 is the background")
        return images, rows

    def training_step(self, modules: Mapping[str, nn.Module], batch: Any) -> dict[str, Tensor]:
        """The sum of the losses of the model, and each of them; boxes around crowds do not count."""
        images, targets = batch
        single = [each["iscrowd"] == 0 if "iscrowd" in each else slice(None) for each in targets]
        pairs = zip(targets, single, strict=True)
        kept = [{name: each[name][of] for name in _OF_OBJECTS if name in each} for each, of in pairs]
        losses: dict[str, Tensor] = modules["model"](images, kept)
        return {**losses, "loss": torch.stack(list(losses.values())).sum()}

    def evaluation_step(self, modules: Mapping[str, nn.Module], batch: Any) -> dict[str, Any]:
        """What the model finds, and the targets."""
        images, targets = batch
        found = [dict(each) for each in modules["model"](images)]
        for each in found:
            if "masks" in each:
                each["masks"] = each["masks"][:, 0] > 0.5
            elif "segm" in self._kinds:
                raise ValueError("the model gives no masks; use one that does, such as maskrcnn_*, or task.masks=false")
        return {"outputs": found, "targets": targets}

    def predict_step(self, modules: Mapping[str, nn.Module], batch: Any) -> dict[str, list[Tensor]]:
        """Boxes (N, 4), xyxy in pixels of the batch's images, labels (N,), scores (N,) and perhaps masks, bool (N, H, W)."""
        found = modules["model"](batch[0])
        made = {name: [each[name] for each in found] for name in ("boxes", "labels", "scores")}
        return made | ({"masks": [each["masks"][:, 0] > 0.5 for each in found]} if "masks" in found[0] else {})

    def shown(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What `draw` takes: objects as they are."""
        return values

    def draw(self, sample: Any, outputs: Mapping[str, Tensor], classes: Sequence[str] = ()) -> Tensor:
        """The image of a batch of one with objects, those with a score only above 0.5, uint8 (3, H, W)."""
        from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

        picture: Tensor = sample[0][0].cpu()
        labels = outputs["labels"].cpu()
        scores = outputs.get("scores", torch.ones(len(labels))).cpu()  # a truth has none
        kept = scores > _SHOWN
        numbers: list[int] = labels[kept].tolist()
        if not numbers:  # torchvision warns of images without a box
            return picture
        named = dict(enumerate(classes, 1))
        names, colours = [named.get(each, str(each)) for each in numbers], [*map(colour, numbers)]
        if "scores" in outputs:
            names = [f"{name} {score:.2f}" for name, score in zip(names, scores[kept].tolist(), strict=True)]
        if "masks" in outputs:
            picture = draw_segmentation_masks(picture, outputs["masks"].cpu()[kept].bool(), alpha=0.5, colors=colours)
        boxed: Tensor = draw_bounding_boxes(picture, outputs["boxes"].cpu()[kept], names, colours)
        return boxed

    def metric_names(self) -> list[str]:
        """COCO's mean average precision, with the IoU 0.5 and 0.75, and of masks (`segm_...`)."""
        return [("segm_" if kind == "segm" else "") + score for kind in self._kinds for score in _SCORES]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """The first of them keeps what is found, for all."""
        found = Found(self.num_classes, self._kinds)
        scores = [Derived(partial(found.score, kind, score)) for kind in self._kinds for score in _SCORES]
        return dict(zip(self.metric_names(), [found, *scores[1:]], strict=True))

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """The same for each class, NaN for one without objects."""
        found = Found(self.num_classes, self._kinds)
        scores = [Derived(partial(found.score, kind, score, each=True)) for kind in self._kinds for score in _SCORES]
        named = zip(self.metric_names(), scores, strict=True)
        return {"found": found, **{f"label_{name}": each for name, each in named}}


class Found(Additive):
    """What was found in the images of a split, and what is in them; evaluated as a whole, by the tool of COCO.

    Masks are kept as run lengths. `compute` is the mean average precision of boxes. `kinds` are `bbox`, and `segm` for masks.
    """

    def __init__(self, classes: int, kinds: Sequence[str]) -> None:
        self.classes, self._kinds = classes, kinds
        self.images: list[Any] = []
        super().__init__({"images": []})

    def reset(self) -> None:
        """Forget all images."""
        super().reset()
        self._precision: dict[str, Tensor] = {}

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        self.images += [(self._kept(one), self._kept(other)) for one, other in zip(targets, outputs, strict=True)]
        self._precision = {}

    def _kept(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: objects[name].cpu() for name in ("boxes", "labels", "scores", "iscrowd") if name in objects}
        if "segm" in self._kinds:
            kept["segmentation"] = run_lengths(objects["masks"])
        return kept

    def _entries(self, side: int) -> list[dict[str, Any]]:
        """What is in the images (0), or was found in them (1), in the format of COCO."""
        entries: list[dict[str, Any]] = []
        for number, image in enumerate(self.images):
            kept = image[side]
            left, top, right, bottom = kept["boxes"].double().unbind(1)
            boxes = torch.stack([left, top, right - left, bottom - top], 1)
            columns = {"bbox": boxes.tolist(), "area": boxes[:, 2:].prod(1).tolist()}
            columns |= {"category_id": kept["labels"].tolist()} | ({"score": kept["scores"].tolist()} if side else {})
            columns["iscrowd"] = kept["iscrowd"].tolist() if "iscrowd" in kept else [0] * len(boxes)
            columns |= {"segmentation": kept["segmentation"]} if "segmentation" in kept else {}
            for row in zip(*columns.values(), strict=True):
                entries.append({**dict(zip(columns, row, strict=True)), "image_id": number, "id": len(entries) + 1})
        return entries

    def precision(self, kind: str) -> Tensor:
        """(10, 101, C): at each IoU and recall, for each class; NaN for a class without objects."""
        if kind not in self._precision:
            from faster_coco_eval import COCO, COCOeval_faster

            images = [{"id": number, "height": 0, "width": 0} for number in range(len(self.images))]
            categories = [{"id": number} for number in range(1, self.classes + 1)]
            known = COCO({"images": images, "categories": categories, "annotations": self._entries(0)})
            evaluator = COCOeval_faster(known, known.loadRes(self._entries(1)), kind)
            evaluator.params.areaRng, evaluator.params.areaRngLbl = evaluator.params.areaRng[:1], ["all"]
            evaluator.evaluate()
            evaluator.accumulate()
            values = torch.as_tensor(evaluator.eval["precision"][:, :, :, 0, -1])
            self._precision[kind] = values.where(values >= 0, torch.nan)
        return self._precision[kind]

    def score(self, kind: str, score: str, each: bool = False) -> Tensor:
        """The mean over the recalls and the chosen IoU, float64 (), or (C,) with `each`."""
        values = self.precision(kind)[_SCORES[score]].reshape(-1, self.classes)
        return values.nanmean(0) if each else values.nanmean()

    def compute(self) -> Tensor:
        """Float64 ()."""
        return self.score("bbox", "map")


def run_lengths(masks: Tensor) -> list[dict[str, Any]]:
    """Masks (N, H, W) as COCO's run-length encodings, each a dict of `size`, height and width, and `counts`, bytes."""
    from faster_coco_eval.core import mask

    planes = masks.to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return mask.encode(np.asfortranarray(planes)) if planes.shape[2] else []
