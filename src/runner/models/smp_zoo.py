"""Models of segmentation-models-pytorch by name, with the classes of the data."""

from __future__ import annotations

from torch import nn

from runner.base.errors import UserError, first_line, require


def segmenter(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    encoder: str = "resnet34",
    encoder_weights: str | None = None,
    *,
    fetch_weights: bool = True,
) -> nn.Module:
    """Build a model for images (B, in_channels, H, W) that returns logits (B, num_classes, H, W).

    Arguments are those of `segmentation_models_pytorch.create_model`; without `fetch_weights`, `encoder_weights` is ignored.
    Raises `UserError` if the package is not installed, or there is no such model, encoder or weights.
    """
    require("model", "runner[smp]", "segmentation_models_pytorch")
    import segmentation_models_pytorch as smp

    try:
        weights = encoder_weights if fetch_weights else None
        model: nn.Module = smp.create_model(name, encoder, weights, in_channels, num_classes)
    except (KeyError, OSError, RuntimeError) as error:
        key = "name" if name.lower() not in smp.MODEL_ARCHITECTURES_MAPPING else "encoder, model.encoder_weights"
        raise UserError(f"model.{key}", f"cannot be built: {first_line(error)}") from error
    return model
