"""Torchvision's models for classification and semantic segmentation by name, with the channels and classes of the data."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.models.checks import at_least_1, reachable, unknown
from runner.models.heads import new_layers


def classifier(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    weights: str | None = None,
    *,
    image_size: tuple[int, int] | None = None,
    fetch_weights: bool = True,
) -> nn.Module:
    """Build a torchvision classification model for images (B, in_channels, H, W) that returns logits.

    With weights, the last layer is replaced if `num_classes` differs from that of the weights. If `in_channels` is not 3, the
    first convolution is replaced: with weights, its kernels are those of the colours, see `widened`.

    Args:
        name: one of `torchvision.models.list_models(module=torchvision.models)`.
        weights: None (random), "DEFAULT" (the best ones) or a name such as "IMAGENET1K_V1".
        image_size: (height, width) of the images, in pixels. If given, it is checked, and the `vit_*` models are built for
            it if they start from random weights.
        fetch_weights: False builds the same model without its trained weights, to load those of a checkpoint.

    Raises:
        UserError: the name or the weights do not exist, the weights cannot be fetched, or the model does not support the
            image size.
        ValueError: a number is out of range.
    """
    from torchvision import models

    at_least_1(num_classes=num_classes, in_channels=in_channels)
    require_model(name, models.list_models(module=models), "classification")
    entry = weights_entry(name, weights)
    with_aux_heads = name in ("googlenet", "inception_v3")  # which would make the output a tuple in training
    if entry is None:
        # Without init_weights torchvision warns
        options: dict[str, Any] = {"aux_logits": False, "init_weights": True} if with_aux_heads else {}
        if name.startswith("vit_") and image_size is not None and image_size[0] == image_size[1]:
            options["image_size"] = image_size[0]
        try:
            model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
        except AssertionError as error:
            raise _wrong_size(name, image_size, error) from error
    else:
        model = fetched(lambda: models.get_model(name, weights=entry), entry, fetch_weights, "model.weights")
        if name == "inception_v3":  # only the builder of googlenet removes the auxiliary head of the weights itself
            model.aux_logits, model.AuxLogits = False, None  # type: ignore[assignment]
        # Squeezenet classifies with a 1x1 convolution
        path, old = [each for each in model.named_modules() if isinstance(each[1], nn.Linear | nn.Conv2d)][-1]
        if len(old.weight) != num_classes:
            model.set_submodule(path, new_layers(old, [num_classes]))
    if in_channels != 3:
        _replace_stem(model, in_channels, pretrained=entry is not None)
    if image_size is not None:
        _try_size(model, name, in_channels, image_size)
    return model


def segmenter(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    weights_backbone: str | None = None,
    aux_loss: bool = False,
    *,
    fetch_weights: bool = True,
) -> nn.Module:
    """Build a torchvision segmentation model, which returns logits (B, num_classes, H, W) as `out`, and maybe others as `aux`.

    Args:
        name: one of `torchvision.models.list_models(module=torchvision.models.segmentation)`.
        in_channels, fetch_weights: see `classifier`.
        weights_backbone: weights of the classification model that it is built on: None (random), "DEFAULT" or a name.
        aux_loss: whether there is an auxiliary output.

    Raises:
        UserError: the name or the weights do not exist, the weights cannot be fetched, or the model has no such output.
    """
    from torchvision import models

    at_least_1(num_classes=num_classes, in_channels=in_channels)
    require_model(name, models.list_models(module=models.segmentation), "segmentation")
    key, backbone = "model.weights_backbone", name.partition("_")[2]
    entry = weights_entry(backbone, weights_backbone, key)
    options: dict[str, Any] = {"weights_backbone": entry, "num_classes": num_classes, "aux_loss": aux_loss}
    try:
        model = fetched(lambda: models.get_model(name, weights=None, **options), entry, fetch_weights, key)
    except NotImplementedError as error:
        raise UserError("model.aux_loss", f"{name} has no auxiliary output", "false") from error
    if in_channels != 3:
        _replace_stem(model, in_channels, pretrained=weights_backbone is not None)
    # The MobileNets average statistics over 100 steps, which are far from the truth where nothing is trained yet
    for module in model.modules() if weights_backbone is None else ():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return model


def preferred_data(name: str, weights: str | None = None, **others: Any) -> dict[str, Any]:
    """The image size in pixels and the normalisation that trained weights expect, from torchvision.

    Arguments are those of `classifier`.

    Returns:
        `image_size` and `normalize` for the section `data` of the config; empty for random weights.

    Raises:
        UserError: the weights do not exist.
    """
    from torchvision import models

    entry = weights_entry(name, weights) if name in models.list_models(module=models) else None
    if entry is None:
        return {}
    transforms = entry.transforms()
    normalize = {"mean": [float(value) for value in transforms.mean], "std": [float(value) for value in transforms.std]}
    return {"image_size": int(transforms.crop_size[0]), "normalize": normalize}


classifier.preferred_data = preferred_data  # type: ignore[attr-defined]


def require_model(name: str, names: Sequence[str], kind: str) -> None:
    """Raise a `UserError` if torchvision has no model of a name among `names`, which are of a kind."""
    if name not in names:
        raise unknown("model.name", f"no torchvision {kind} model '{name}'", name, names)


def weights_entry(name: str, weights: str | None, key: str = "model.weights") -> Any:
    """The selected member of the model's weights enum, or None."""
    if weights is None:
        return None
    from torchvision import models

    members = {spelled.lower(): entry for spelled, entry in models.get_model_weights(name).__members__.items()}
    wanted = weights.rpartition(".")[2].lower()
    if wanted not in members:
        choices = [*(spelled.upper() for spelled in members), "null"]
        raise unknown(key, f"{name} has no weights '{weights}'", wanted.upper(), choices)
    return members[wanted]


def fetched(build: Callable[[], nn.Module], entry: Any, fetch_weights: bool, key: str) -> nn.Module:
    """The model that `build` gives, which loads the weights of `entry`, if any; `key` is theirs in the config.

    Without `fetch_weights`, it is what torchvision builds for these weights, but without them.
    """
    if entry is None:
        return build()
    if not fetch_weights:
        from torchvision.models._api import WeightsEnum

        with mock.patch.object(WeightsEnum, "get_state_dict", dict), mock.patch.object(nn.Module, "load_state_dict"):
            return build()
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(entry.url).name
    try:
        if not file.is_file() and not reachable(entry.url):
            raise ConnectionError(f"{entry.url} does not answer")
        return build()
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        problem = f"{entry} could not be loaded ({type(error).__name__}: {error})"
        raise UserError(key, problem, f"null, or download {entry.url} to {file} yourself") from error


def _replace_stem(model: nn.Module, in_channels: int, pretrained: bool) -> None:
    """Replace the model's first convolution by one with `in_channels` input channels, whose outputs have the same scale."""
    path, stem = next((path, module) for path, module in model.named_modules() if isinstance(module, nn.Conv2d))
    same: dict[str, Any] = {name: getattr(stem, name) for name in ("kernel_size", "stride", "padding")}
    fresh, colour = nn.Conv2d(in_channels, stem.out_channels, **same, bias=stem.bias is not None), stem.weight
    with torch.no_grad():
        if pretrained:
            fresh.weight.copy_(widened(colour, in_channels))
        else:
            deviation = colour.std() * (colour.shape[1] / in_channels) ** 0.5
            fresh.weight.copy_(torch.randn(fresh.weight.shape) * deviation)
        if stem.bias is not None and fresh.bias is not None:
            fresh.bias.copy_(stem.bias)
    model.set_submodule(path, fresh)
    if getattr(model, "transform_input", False):  # googlenet and inception_v3 renormalise three colours
        model.transform_input = False  # type: ignore[assignment]


def widened(colour: Tensor, channels: int) -> Tensor:
    """Kernels (O, C, H, W) for images of C `channels`, of those of three colours, (O, 3, H, W), as timm adapts them.

    The colours are repeated and multiplied by 3 / C; the one of grey images is their sum.
    """
    if channels == 1:
        return colour.sum(dim=1, keepdim=True)
    return colour[:, torch.arange(channels) % 3] * (3 / channels)


def _try_size(model: nn.Module, name: str, in_channels: int, image_size: tuple[int, int]) -> None:
    """Send two images through the model on the meta device, which only computes shapes.

    In training mode, because some models then refuse what they accept in evaluation mode; two images, because BatchNorm
    refuses one.
    """
    shadow = {key: value.detach().to("meta") for key, value in (*model.named_parameters(), *model.named_buffers())}
    images = torch.empty(2, in_channels, *image_size, device="meta")
    try:
        with torch.no_grad():
            torch.func.functional_call(model, shadow, (images,))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise _wrong_size(name, image_size, error) from error


def _wrong_size(name: str, image_size: tuple[int, int] | None, error: Exception) -> UserError:
    pixels = "x".join(str(side) for side in image_size or ())
    allowed = "another data.image_size (most of these models were made for 224), or a model for small images"
    return UserError("model.name", f"{name} does not support images of {pixels} pixels ({error})", allowed)
