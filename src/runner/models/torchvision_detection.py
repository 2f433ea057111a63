"""Any torchvision detection model by name, with the classes of the data."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from runner.models.precision import keep_digits
from runner.models.torchvision_zoo import fetched, require_model, weights_entry

_POSITIONS = r"backbone|head|rpn\.head|roi_heads\.box_predictor"  # what anchors and boxes are computed from


def detector(
    name: str,
    num_classes: int,
    weights: str | None = None,
    weights_backbone: str | None = None,
    options: Mapping[str, Any] = {},
    *,
    fetch_weights: bool = True,
) -> nn.Module:
    """Build a model that gives losses in training, and boxes, labels, scores and perhaps masks in evaluation.

    Args:
        name: one of `torchvision.models.list_models(module=torchvision.models.detection)`, but for keypoints.
        num_classes: number of classes, and one for the background.
        weights: trained on COCO, "DEFAULT" or a name; layers that depend on the number of classes start from random weights.
        weights_backbone: of the backbone alone, trained on ImageNet.
        options: more arguments of torchvision's function.
        fetch_weights: False builds the same model without its trained weights, to load those of a checkpoint.

    Raises:
        UserError: if there is no such model or weights, or they cannot be fetched.
    """
    from torchvision import models

    names = [each for each in models.list_models(module=models.detection) if "keypoint" not in each]
    require_model(name, names, "detection")
    size = {"num_classes": num_classes, **options}
    backbone = max((each for each in models.list_models(module=models) if each in name), key=len)
    entry = weights_entry(name, weights) or weights_entry(backbone, weights_backbone, "model.weights_backbone")
    if weights is None:
        build = functools.partial(models.get_model, name, weights=None, weights_backbone=entry, **size)
        return keep_digits(fetched(build, entry, fetch_weights, "model.weights_backbone"), _POSITIONS)
    trained = fetched(lambda: models.get_model(name, weights=entry, **options), entry, fetch_weights, "model.weights")
    # Frozen layers and norms of the backbone depend on whether it is trained; the rest differs in its shapes alone
    with warnings.catch_warnings(action="ignore"):
        model: nn.Module = models.get_model(name, weights=None, weights_backbone=None, **size)
    model.backbone, own = trained.backbone, model.state_dict()
    fitting = {key: value for key, value in trained.state_dict().items() if own[key].shape == value.shape}
    model.load_state_dict({**own, **fitting})
    return keep_digits(model, _POSITIONS)
