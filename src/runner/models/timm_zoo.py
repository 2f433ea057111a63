"""Any timm model by name, with the channels and classes of the data."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from runner.base.errors import UserError, require
from runner.models.checks import at_least_1, cache_alone, unknown

# What `classifier` sets itself, and what would load files, or return lists instead of logits.
_RESERVED = frozenset(
    ("model_name", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "scriptable",
     "num_classes", "in_chans", "img_size", "features_only")
)  # fmt: skip


def classifier(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    pretrained: bool = False,
    *,
    preprocessing: Literal["auto"] | bool = "auto",
    image_size: tuple[int, int] | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """Build a timm model for images (B, in_channels, H, W) that returns logits (B, num_classes).

    Args:
        name: one of `timm.list_models()`, with or without the tag of its weights, such as "resnet18.a1_in1k".
        num_classes: number of outputs.
        in_channels: channels of the images.
        pretrained: load trained weights, from timm's cache or the network.
        preprocessing: see `preferred_data`.
        image_size: (height, width) of the images, in pixels; for models that are built for one size.
        options: more arguments of `timm.create_model`, such as `drop_path_rate`.

    Raises:
        UserError: timm is not installed, there is no such model, or its weights cannot be loaded.
        ValueError: a number or an option is out of range.
    """
    at_least_1(num_classes=num_classes, in_channels=in_channels)
    given = dict(options)
    if reserved := sorted(_RESERVED & given.keys()):
        raise ValueError(f"options cannot have {', '.join(reserved)}")
    described = _described(name)
    if described.fixed_input_size and image_size is not None:
        given["img_size"] = image_size
    import timm

    offline = ""
    try:
        with cache_alone() if pretrained and described.hf_hub_id else contextlib.nullcontext("") as offline:
            model: nn.Module = timm.create_model(
                name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels, **given
            )
    except TypeError as error:  # a model does not take one of the options
        raise ValueError(str(error)) from error
    except (OSError, RuntimeError, AssertionError, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if not pretrained:
            allowed = "another data.image_size, such as 224, other model.options, or another model"
            raise UserError("model.name", f"{name} cannot be built for this data: {reason}", allowed) from error
        where = f"{described.hf_hub_id}/resolve/main/model.safetensors" if described.hf_hub_id else described.url
        where = f"https://huggingface.co/{where}" if described.hf_hub_id else where or "timm's page of the model"
        allowed = f"a network; or download {where}, and give model.pretrained=false init_from=FILE init_mismatch=skip"
        problem = f"the weights of {name} could not be loaded: {offline or reason}"
        raise UserError("model.pretrained", problem, allowed) from error
    return model


def preferred_data(
    name: str, pretrained: bool = False, preprocessing: Literal["auto"] | bool = "auto", **others: Any
) -> dict[str, Any]:
    """The image size in pixels and the normalisation of the model's data config in timm.

    Args:
        name, pretrained, **others: see `classifier`.
        preprocessing: True gives them, False does not, and "auto" does with `pretrained`.

    Returns:
        `image_size` and `normalize` for the section `data` of the config; empty for the data's own.

    Raises:
        UserError: timm is not installed, or there is no such model.
    """
    if not (pretrained if preprocessing == "auto" else preprocessing):
        return {}
    described = _described(name)
    normalize = {"mean": [float(value) for value in described.mean], "std": [float(value) for value in described.std]}
    return {"image_size": int(described.input_size[-1]), "normalize": normalize}


classifier.preferred_data = preferred_data  # type: ignore[attr-defined]


def _described(name: str) -> Any:
    """The data config of a model, and where its weights are."""
    require("model", "runner[timm]", "timm")
    import timm

    plain, _, tag = name.partition(".")
    if not timm.is_model(plain) or ":" in name:  # a colon would name a folder, or a repository on the network
        raise unknown("model.name", f"there is no timm model '{name}'", plain, timm.list_models())
    tags = [full.partition(".")[2] for full in timm.list_models(f"{plain}.*", pretrained=True)]
    if tag and tag not in tags:
        raise unknown("model.name", f"the timm model {plain} has no weights '{tag}'", tag, tags)
    return timm.get_pretrained_cfg(name)
