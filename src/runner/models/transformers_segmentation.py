"""Segmentation models of transformers by family, folder or id on the hub, with the classes of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from runner.models.transformers_zoo import pretrained_or_new

_SEGMENTERS = {"segformer": "SegformerForSemanticSegmentation", "upernet": "UperNetForSemanticSegmentation"}
_BACKBONES = {  # whose patches get a head of UperNet
    "dinov2": "Dinov2Backbone",
    "dinov2_with_registers": "Dinov2WithRegistersBackbone",
    "dinov3_vit": "DINOv3ViTBackbone",
}
_WIDEST = 256  # channels of that head


class Segmenter(nn.Module):
    """A segmentation model of transformers, with the logits of each pixel.

    `model` takes `pixel_values` (B, C, H, W), and returns `logits` (B, num_classes, h, w) of any size.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes, H, W) of images (B, C, H, W), enlarged bilinearly."""
        logits = self.model(pixel_values=images).logits
        return nn.functional.interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=False)


def segmenter(
    name: str,
    num_classes: int,
    weights: str | None = None,
    options: Mapping[str, Any] = {},
    *,
    fetch_weights: bool = True,
) -> Segmenter:
    """Build a model for images (B, C, H, W) that returns logits (B, num_classes, H, W).

    A backbone gets a new head of UperNet (Xiao et al., arXiv:1807.10221) on its last layer, or on those of `out_indices`.

    Args:
        name: "segformer" or "upernet", or "dinov2", "dinov2_with_registers" or "dinov3_vit" for a backbone; or a folder or id
            on the hub with the config.json of one.
        num_classes: number of classes, the background included.
        weights, options, fetch_weights: see `pretrained_or_new`.

    Raises:
        UserError: transformers is not installed, a name, weights or options are wrong, or cannot be loaded.
    """
    model = pretrained_or_new(
        _SEGMENTERS | _BACKBONES, name, weights, options, num_labels=num_classes, fetch_weights=fetch_weights
    )
    if model.config.model_type in _BACKBONES:
        from transformers import UperNetConfig, UperNetForSemanticSegmentation

        backbone, width = model, min(_WIDEST, model.channels[-1])
        shape = {"backbone_config": backbone.config, "hidden_size": width, "num_labels": num_classes}
        model = UperNetForSemanticSegmentation(UperNetConfig(**shape, use_auxiliary_head=False))
        model.backbone, backbone.embeddings.mask_token = backbone, None
    # Like the mask token, it does not change the logits, and several processes would wait for its gradients
    model.auxiliary_head = None
    return Segmenter(model)
