"""Which targets a file may name in which section of the config, and how they are built without downloads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

# Modules whose public classes and functions are components; others of the program can write files or build in turn.
COMPONENT_ROOMS = (
    "runner.models",
    "runner.optim",
    "runner.data.sources.digits",
    "runner.data.sources.torchvision_sets",
    "runner.data.sources.folders",
    "runner.data.sources.synthetic",
    "runner.data.transforms.augment",
    "runner.data.transforms.crops",
    "runner.data.transforms.color_jitter",
    "runner.data.transforms.mixing",
    "runner.data.transforms.auto_augment",
    "runner.data.transforms.resized_crop",
    "runner.engine.callbacks",
    "runner.engine.tasks",
    "runner.tracking.loggers",
)
# Where classes that build parts are defined. Being a subclass of Module or Dataset is not enough: some of those compile
# source text or unpickle what they are given (torch.fx.GraphModule, data pipes, torchvision's LSUN).
PART_HOMES = (
    "torch.nn.modules",
    "torch.optim",
    "torch.utils.data.dataset",
    "torchvision.transforms",
    "torchvision.models",
    "torchvision.ops",
    "torchmetrics.classification",
    "torchmetrics.regression",
    "torchmetrics.aggregation",
)
DATA_SETS = ("CIFAR10", "CIFAR100", "FakeData", "FashionMNIST", "ImageFolder", "KMNIST", "MNIST", "SVHN")
_TRANSFORMS = (
    "torchvision.transforms",
    "runner.data.transforms.augment",
    "runner.data.transforms.crops",
    "runner.data.transforms.color_jitter",
    "runner.data.transforms.auto_augment",
    "runner.data.transforms.resized_crop",
)
# Modules that the parts of a section come from, nested ones included.
_HOMES: dict[str, tuple[str, ...]] = {
    "data.dataset": (
        "runner.data.sources.digits",
        "runner.data.sources.torchvision_sets",
        "runner.data.sources.folders",
        "runner.data.sources.synthetic",
        "torchvision.datasets",
        "torch.utils.data.dataset",
        "torchvision.transforms",
    ),
    "transform": (*_TRANSFORMS, "runner.data.transforms.mixing", "torch.nn.modules"),
    "model": ("runner.models", "torch.nn.modules", "torchvision.models", "torchvision.ops"),
    "loss": ("runner.optim.losses", "torch.nn.modules", "torchvision.ops"),
    "optimizer": ("runner.optim", "torch.optim"),
    "scheduler": ("runner.optim.schedules", "torch.optim.lr_scheduler"),
    "task": ("runner.engine.tasks",),
    "metrics": ("torchmetrics",),
    "callbacks": ("runner.engine.callbacks",),
    "logger": ("runner.tracking.loggers",),
}
_FLAGS = ("download", "pretrained", "pretrained_backbone", "fetch_weights")
_WEIGHTS = ("weights", "weights_backbone")


def within(path: str, prefixes: Iterable[str]) -> bool:
    """Whether a dotted path is one of the prefixes, or inside one."""
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)


def section_of(key: str) -> str:
    """The section of components that a dotted key lies in, such as `data.dataset` or `loss`; otherwise its first part."""
    return next((section for section in _HOMES if within(key, [section])), key.split(".")[0])


def homes_of(section: str) -> tuple[str, ...]:
    """The modules that the parts of a section come from; none where nothing is built."""
    return _HOMES.get(section, ())


def without_fetching(target: Callable[..., Any], node: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a component without those that make it download something or load trained weights.

    A builder of torchvision gives the same layers as with the weights that the arguments name.

    Args:
        target: what `_target_` names.
        node: `_target_` and the arguments.
    """
    try:
        names = list(inspect.signature(target).parameters)
    except (ValueError, TypeError):
        names = []
    plain: dict[str, Any] = {name: False if name in _FLAGS and value else value for name, value in node.items()}
    if "fetch_weights" in names:
        plain["fetch_weights"] = False
    home = str(getattr(target, "__module__", ""))
    if not within(home, ["torchvision.models"]) or not inspect.isfunction(target):
        return plain
    # These builders take arguments by position too, the weights first, and load some where none are named.
    positional: list[Any] = plain.pop("_args_", [])
    plain |= dict(zip(names, positional, strict=False))
    described = _described(target, "DEFAULT" if node.get("pretrained") else plain.get("weights"))
    for name in _FLAGS:
        plain.pop(name, None)
    return described | plain | {name: None for name in _WEIGHTS if name in names}


def _described(builder: Callable[..., Any], weights: Any) -> dict[str, Any]:
    """What a builder of torchvision takes from the description of weights, for the same model without them."""
    if not weights:
        return {}
    from torchvision import models

    members = models.get_model_weights(builder).__members__
    name = "DEFAULT" if weights is True else str(weights).rpartition(".")[2]
    if name not in members:
        return {}
    meta, found = members[name].meta, {}
    if "categories" in meta:
        found["num_classes"] = len(meta["categories"])
    if builder.__name__.startswith("vit_"):
        found["image_size"] = meta["min_size"][0]
    if builder.__name__ in ("googlenet", "inception_v3"):
        found |= {"transform_input": True, "init_weights": False}
    if builder.__name__ == "googlenet":
        found["aux_logits"] = False
    return found
