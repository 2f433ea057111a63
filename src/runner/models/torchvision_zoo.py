"""Any torchvision classification model by name, fitted to the data's channels and classes."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.config.errors import UserError
from runner.models.checks import at_least

# The auxiliary heads would make the output a tuple while training; said here, init_weights does not warn either.
_PLAIN_OUTPUT: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def classifier(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    weights: str | None = None,
    image_size: tuple[int, int] | None = None,
    fetch_weights: bool = True,
) -> nn.Module:
    """Build a torchvision classification model that takes images (B, in_channels, H, W) and gives raw logits.

    With weights, the last layer is replaced where `num_classes` differs from the classes they were trained on. Where
    `in_channels` is not 3, the first convolution is replaced: from weights it gets the sum of the three colour kernels,
    shared out over the channels, so that grey images look as they did in colour.

    Args:
        name: one of `torchvision.models.list_models(module=torchvision.models)`.
        num_classes: number of outputs.
        in_channels: channels of the images.
        weights: None (random), "DEFAULT" (the best ones) or a name such as "IMAGENET1K_V1".
        image_size: (height, width) of the images, in pixels. If given, a model that cannot take this size is refused
            here, and the `vit_*` models are built for it when they start from random weights.
        fetch_weights: False builds the same model without its trained weights, for those of a checkpoint to be put into it.

    Raises:
        UserError: the name or the weights do not exist, the weights cannot be fetched, or the images are of a size
            that the model cannot take.
        ValueError: a number is out of range.
    """
    from torchvision import models

    at_least("num_classes", num_classes)
    at_least("in_channels", in_channels)
    names = models.list_models(module=models)
    if name not in names:
        raise UserError(_unknown("model.name", f"no torchvision classification model '{name}'", name, names))
    entry = _weights_entry(name, weights)
    options = dict(_PLAIN_OUTPUT.get(name, {}))
    if entry is None:
        options["num_classes"] = num_classes
        if name.startswith("vit_") and image_size is not None and image_size[0] == image_size[1]:
            options["image_size"] = image_size[0]
        try:
            model: nn.Module = models.get_model(name, weights=None, **options)
        except AssertionError as error:
            raise _wrong_size(name, image_size, error) from error
    else:
        model = _with_weights(name, entry) if fetch_weights else _shaped_like(name, entry, options)
        _replace_head(model, num_classes)
    if in_channels != 3:
        _replace_stem(model, in_channels, pretrained=entry is not None)
    if image_size is not None:
        _try_size(model, name, in_channels, image_size)
    return model


def preferred_data(name: str, weights: str | None = None, **others: Any) -> dict[str, Any]:
    """The size in pixels and the statistics that trained weights want images to have, as torchvision has them.

    Args:
        name: name of the model.
        weights: as for `classifier`.
        **others: further arguments of `classifier`, which say nothing about this.

    Returns:
        `image_size` and `normalize` for the section `data` of the config; nothing for random weights.

    Raises:
        UserError: the weights do not exist.
    """
    from torchvision import models

    entry = _weights_entry(name, weights) if name in models.list_models(module=models) else None
    if entry is None:
        return {}
    transforms = entry.transforms()
    return {
        "image_size": int(transforms.crop_size[0]),
        "normalize": {
            "mean": [float(value) for value in transforms.mean],
            "std": [float(value) for value in transforms.std],
        },
    }


classifier.preferred_data = preferred_data  # type: ignore[attr-defined]


def _unknown(key: str, what: str, word: str, choices: Iterable[str]) -> str:
    pool = list(choices)
    close = difflib.get_close_matches(word.lower(), pool, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(pool)}"
    return f"{key}: {what}; {hint}"


def _weights_entry(name: str, weights: str | None) -> Any:
    """The member of the model's weights enum that `weights` names, or None."""
    if weights is None:
        return None
    from torchvision import models

    available = models.get_model_weights(name)
    members = dict(available.__members__)
    wanted = weights.rpartition(".")[2]
    for spelled, entry in members.items():
        if spelled.lower() == wanted.lower():
            return entry
    raise UserError(_unknown("model.weights", f"{name} has no weights '{weights}'", wanted.upper(), [*members, "null"]))


def _with_weights(name: str, entry: Any) -> nn.Module:
    from torchvision import models

    try:
        model: nn.Module = models.get_model(name, weights=entry)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        filename = Path(entry.url).name
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise UserError(
            f"model.weights: {entry} could not be loaded ({type(error).__name__}: {error}); "
            f"download {entry.url} yourself and put it at {folder / filename}, or set model.weights=null"
        ) from error
    if name == "inception_v3":  # weights have the auxiliary head, which the builder of googlenet alone takes off itself
        model.aux_logits, model.AuxLogits = False, None  # type: ignore[assignment]
    return model


def _shaped_like(name: str, entry: Any, options: dict[str, Any]) -> nn.Module:
    """The model that trained weights are of, with random ones: it has what its builder takes from the weights' description."""
    from torchvision import models

    described = {"num_classes": len(entry.meta["categories"])}
    if name.startswith("vit_"):
        described["image_size"] = entry.meta["min_size"][0]
    model: nn.Module = models.get_model(name, weights=None, **options, **described)
    if hasattr(model, "transform_input"):
        model.transform_input = True  # type: ignore[assignment]
    return model


def _replace_head(model: nn.Module, num_classes: int) -> None:
    """Give the model's last layer `num_classes` outputs, freshly initialised, unless it has them already."""
    for path, module in reversed(list(model.named_modules())):
        fresh: nn.Linear | nn.Conv2d
        if isinstance(module, nn.Linear):
            if module.out_features == num_classes:
                return
            fresh = nn.Linear(module.in_features, num_classes, bias=module.bias is not None)
        elif isinstance(module, nn.Conv2d):  # squeezenet classifies with a 1x1 convolution
            if module.out_channels == num_classes:
                return
            fresh = nn.Conv2d(module.in_channels, num_classes, kernel_size=1, bias=module.bias is not None)
        else:
            continue
        # A small head makes all classes about equally likely at first, so that the first loss is ln(num_classes).
        nn.init.normal_(fresh.weight, std=0.01)
        if fresh.bias is not None:
            nn.init.zeros_(fresh.bias)
        _set(model, path, fresh)
        return


def _replace_stem(model: nn.Module, in_channels: int, pretrained: bool) -> None:
    """Let the model's first convolution take `in_channels` channels in place of three."""
    path, stem = next((path, module) for path, module in model.named_modules() if isinstance(module, nn.Conv2d))
    fresh = nn.Conv2d(
        in_channels,
        stem.out_channels,
        kernel_size=stem.kernel_size,  # type: ignore[arg-type]
        stride=stem.stride,  # type: ignore[arg-type]
        padding=stem.padding,  # type: ignore[arg-type]
        bias=stem.bias is not None,
    )
    with torch.no_grad():
        fresh.weight.copy_(_stem_kernels(stem.weight, in_channels, pretrained))
        if stem.bias is not None and fresh.bias is not None:
            fresh.bias.copy_(stem.bias)
    _set(model, path, fresh)
    if getattr(model, "transform_input", False):  # googlenet and inception_v3 renormalise colours, which are gone
        model.transform_input = False  # type: ignore[assignment]


def _stem_kernels(colour: Tensor, in_channels: int, pretrained: bool) -> Tensor:
    """Kernels (out, in_channels, k, k) from kernels (out, 3, k, k), so that the outputs keep their scale."""
    if pretrained:
        return colour.sum(dim=1, keepdim=True).repeat(1, in_channels, 1, 1) / in_channels
    shape = (colour.shape[0], in_channels, *colour.shape[2:])
    scale: Tensor = colour.std() * (colour.shape[1] / in_channels) ** 0.5
    return torch.randn(shape) * scale


def _set(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)


def _try_size(model: nn.Module, name: str, in_channels: int, image_size: tuple[int, int]) -> None:
    """Send an image through the model on the meta device, where only shapes are computed.

    In training mode, because some models refuse there what they accept while evaluating; two images, because
    BatchNorm refuses one.
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
    return UserError(
        f"model.name: {name} cannot take images of {pixels} pixels ({error}); set data.image_size to a size that it "
        f"takes (most of these models were made for 224), or choose a model for small images"
    )
