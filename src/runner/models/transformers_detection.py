"""Detectors of transformers (RT-DETR, D-FINE, DETR and others) by name, called as those of torchvision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from runner.base.errors import UserError, require
from runner.models.checks import at_least_1
from runner.models.precision import keep_digits
from runner.models.transformers_zoo import pretrained_or_new

_FAMILIES = {  # with weights under Apache-2.0
    "rt_detr": "RTDetrForObjectDetection",
    "rt_detr_v2": "RTDetrV2ForObjectDetection",
    "d_fine": "DFineForObjectDetection",
    "detr": "DetrForObjectDetection",
    "conditional_detr": "ConditionalDetrForObjectDetection",
    "deformable_detr": "DeformableDetrForObjectDetection",
}
_PROCESSORS = {  # which normalise images and read the outputs; others have that of RT-DETR
    "detr": "DetrImageProcessor",
    "conditional_detr": "ConditionalDetrImageProcessor",
    "deformable_detr": "DeformableDetrImageProcessor",
}
_FLOAT32 = ("d_fine", "detr")  # whose losses mix float32 and float64
_POSITIONS = (
    r".*(bbox|class|score|decoder_input)_\w+(\.\d+)?"  # heads, and the maps of features that say where anchors are
)
_STRIDE = 32  # the largest of a backbone: sides of padded images are multiples of it


def detector(
    name: str,
    num_classes: int,
    weights: str | None = None,
    size: int | None = 640,
    options: Mapping[str, Any] = {},
    *,
    train_backbone: bool = False,
    fetch_weights: bool = True,
) -> nn.Module:
    """Build a `Detector`.

    Args:
        name: a family such as "rt_detr_v2", or a folder or id on the hub with config.json.
        num_classes: number of classes, and one for the background.
        weights: a folder or id on the hub with model.safetensors; layers that depend on the number of classes start from
            random weights if it differs. None for random weights, also of the backbone.
        size: edge in pixels of the square that each image is resized to; None pads the images of a batch to one size.
        options: arguments of the class of the config, such as `num_queries`.
        train_backbone: with random weights, the whole backbone is trained, with BatchNorm as torch begins it. transformers
            freezes layers and norms as suits trained backbones, and begins norms of RT-DETR with scales of about 0.01.
        fetch_weights: False builds the same model without its trained weights, to load those of a checkpoint.

    Raises:
        UserError: if transformers is not installed, or there is no such model, weights or option.
        ValueError: if a number is out of range.
    """
    require("model", "runner[transformers]", "transformers", otherwise=", or experiment=detection_torchvision")
    at_least_1(size=1 if size is None else size)
    model = pretrained_or_new(
        _FAMILIES, name, weights, options, num_labels=num_classes - 1, fetch_weights=fetch_weights
    )
    if weights is None and train_backbone:
        _train_backbone(model)
    return Detector(model, size)


def _train_backbone(net: Any) -> None:
    """Let the whole backbone of a model learn, in place, and begin all BatchNorm again."""
    net.model.backbone.requires_grad_(True)
    for name, module in [*net.named_modules()]:
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif type(module).__name__.endswith("FrozenBatchNorm2d"):
            net.set_submodule(name, nn.BatchNorm2d(len(module.weight)))


class Detector(nn.Module):
    """A detector of transformers that is called as those of torchvision.

    In training, `detector(images, targets)` gives the weighted losses, of which the sum is that of transformers; in
    evaluation, `detector(images)` gives a dict of `boxes` (N, 4), `labels` (N,) and `scores` (N,) for each image. Images are
    float (C, H, W) in [0, 1]; boxes are xyxy in pixels of the image; labels begin at 1.
    """

    def __init__(self, net: Any, size: int | None) -> None:
        """Wrap a model of `AutoModelForObjectDetection`; for `size` see `detector`."""
        import transformers

        super().__init__()
        self.net, self.size = net, size
        keep_digits(net, _POSITIONS)
        self._processor = getattr(transformers, _PROCESSORS.get(net.config.model_type, "RTDetrImageProcessor"))()
        self.channels = next(module.in_channels for module in net.modules() if isinstance(module, nn.Conv2d))
        if self.channels != 3:  # the mean over the colours is for any channel
            self._processor.image_mean = [fmean(self._processor.image_mean)]
            self._processor.image_std = [fmean(self._processor.image_std)]

    def forward(self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]] | None = None) -> Any:
        """Losses in training, objects in evaluation; see the class."""
        graph = torch.is_grad_enabled()  # as leaving inference mode enables it
        # Tensors that transformers caches in inference mode could not be used in training
        with torch.inference_mode(False), torch.set_grad_enabled(graph):
            if not self.training:
                return self._found(images)
            return self._losses(images, targets or [])

    def loss_count(self, batch: tuple[Any, Sequence[Mapping[str, Tensor]]]) -> Tensor:
        """What the losses of a batch are means over: its boxes but those around crowds, at least 1 as in transformers; int64 ()."""
        single = [(each.get("iscrowd", torch.zeros_like(each["labels"])) == 0).sum() for each in batch[1]]
        return torch.stack(single).sum().clamp(min=1)

    def export_model(self) -> Raw:
        """What `export` writes; raises `UserError` if images are padded."""
        if self.size is None:
            raise UserError("model.size", "is null, and exported images have one size", "a number of pixels")
        return Raw(self.net, self.channels, self.size, self._processor).eval()

    def _losses(self, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        config, (given, scales) = self.net.config, self._batch(images)
        if images[0].dtype == torch.float64 and config.model_type in _FLOAT32:
            raise UserError("dtype", f"the losses of {config.model_type} in transformers need float32", "float32")
        labels = [
            {"class_labels": each["labels"] - 1, "boxes": box_convert(each["boxes"], "xyxy", "cxcywh") / scale}
            for each, scale in zip(targets, scales, strict=True)
        ]
        try:
            found = self.net(**given, labels=labels).loss_dict
        except ValueError as error:
            if "corner" not in str(error):
                raise
            # transformers refuses boxes that are not numbers; the loss is not either, so that training says it diverged
            found = {"loss_bbox": torch.stack([weight.sum() for weight in self.net.parameters()]).sum() * torch.nan}
        # Without a box nothing is denoised, and ranks expect a gradient of each weight
        unused = sum(0 * weight.sum() for label, weight in self.net.named_parameters() if "denoising" in label)
        losses = dict[str, Tensor]()
        for term, value in found.items():
            kind, name, *_ = term.split("_")  # of the last layer of the decoder or another: loss_bbox, loss_bbox_dn_0
            if kind == "loss":  # others are for logging
                weighted = value * getattr(config, f"{name}_loss_coefficient", 1)
                losses[f"loss_{name}"] = losses.get(f"loss_{name}", unused) + weighted
        return losses

    def _found(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        given, scales = self._batch(images)
        sizes = torch.stack(scales)[:, [1, 0]]
        found = self._processor.post_process_object_detection(self.net(**given), -1.0, sizes)
        return [{**each, "labels": each["labels"] + 1} for each in found]

    def _batch(self, images: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Arguments of the model, and for each image (4,): what its boxes are fractions of, in its own pixels."""
        edges = [image.shape[-2:] for image in images]
        height, width = (-(-max(each) // _STRIDE) * _STRIDE for each in zip(*edges, strict=True))
        padded, edge = self.size is None, self.size or 1
        given = self._processor(
            [*images], return_tensors="pt", input_data_format="channels_first", do_rescale=False, do_resize=not padded,
            size={"height": edge, "width": edge}, do_pad=padded, pad_size={"height": height, "width": width},
        )  # fmt: skip
        given["pixel_values"] = given["pixel_values"].to(images[0])  # float32, also of float64
        sides = [(height, width)] * len(edges) if padded else edges
        return given, [images[0].new_tensor([w, h, w, h]) for h, w in sides]


class Raw(nn.Module):
    """A detector of transformers without the resizing before it and the selection of boxes after it.

    It takes images (B, C, size, size) in [0, 1], and returns `logits` (B, Q, C) and `boxes` (B, Q, 4), cxcywh as fractions.
    """

    def __init__(self, net: Any, channels: int, size: int, processor: Any) -> None:
        """Wrap the model of a `Detector`."""
        super().__init__()
        self.net, self.channels, self.image_size = net, channels, (size, size)
        self._mean = list(processor.image_mean) if processor.do_normalize else [0.0]
        self._std = list(processor.image_std) if processor.do_normalize else [1.0]
        family, softmax = net.config.model_type, net.config.model_type == "detr"
        self.strict_export = family not in _PROCESSORS
        self.export_description = {
            "activation": "softmax" if softmax else "sigmoid",
            "threshold": 0.5,
            "postprocessing": {
                "box_format": "cxcywh",
                "box_unit": "fraction of the image",
                "background": "last logit" if softmax else None,
                "kept": net.config.num_queries if softmax or self.strict_export else 100,  # the default of transformers
                "first_label": 1,
            },
        }
        """What `model.json` says of the way from the outputs to objects."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Logits and boxes of all queries."""
        mean, std = (images.new_tensor(each)[:, None, None] for each in (self._mean, self._std))
        found = self.net(pixel_values=(images - mean) / std)
        return {"logits": found.logits, "boxes": found.pred_boxes}

    def match_queries(self, expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs `got` with their queries in the order of `expected`: one-to-one, with the least sum of differences.

        Queries of almost the same score may swap places; a query that has no partner of its own remains a difference.
        """
        from scipy.optimize import linear_sum_assignment

        own, other = (torch.cat([each["logits"], each["boxes"]], -1) for each in (expected, got))
        costs = torch.cdist(own, other, p=torch.inf).nan_to_num()
        places = torch.stack([torch.from_numpy(linear_sum_assignment(each)[1]) for each in costs])
        return {name: tensor.take_along_dim(places[..., None], 1) for name, tensor in got.items()}
