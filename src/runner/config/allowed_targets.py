"""The targets that a file may name in each section of the config.

Paths on the command line and in the user's config folder are trusted. A path in a file (a checkpoint) is not: the object
that it resolves to must be on the allow-list or come from a package that the user trusts. Nothing else is even imported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from runner.base.errors import UserError
from runner.config.keys import within
from runner.config.sources import shipped
from runner.config.targets import resolve


def _named_in(group: str) -> set[str]:
    """The modules of this package that the shipped options of a group name: other modules beside them are not for configs."""
    texts = [path.read_text(encoding="utf-8") for path in (shipped() / group).glob("*.yaml")]
    return {module for text in texts for module in re.findall(r"_target_: (runner\.[\w.]+)\.\w+", text)}


# Modules that the parts of a section come from, nested ones included. Other modules of the program can write files or
# build in turn, and being a subclass of Module or Dataset is not enough: some of those compile source text or unpickle
# what they are given (torch.fx.GraphModule, data pipes, torchvision's LSUN).
_MODELS = ("runner.models", "torch.nn.modules", "torchvision.models", "torchvision.ops")
_HOMES: dict[str, tuple[str, ...]] = {
    "data.dataset": (
        *sorted(_named_in("data")),
        "torchvision.datasets",
        "torch.utils.data.dataset",
        "torchvision.transforms",
    ),
    "data.batch_sampler": ("runner.data.repeated",),
    "transform": ("torchvision.transforms", "runner.data.transforms", "torch.nn.modules"),
    "model": _MODELS,
    "loss": ("runner.optim.losses", "torch.nn.modules", "torchvision.ops"),
    "optimizer": ("runner.optim", "torch.optim"),
    "scheduler": ("runner.optim.schedules", "torch.optim.lr_scheduler"),
    "task.teacher": _MODELS,
    "task": ("runner.tasks",),
    "metrics": ("torchmetrics.classification", "torchmetrics.regression", "torchmetrics.aggregation"),
    "callbacks": ("runner.engine.callbacks",),
    "logger": ("runner.tracking.loggers", "runner.tracking.trackers"),
}
_EVERY_HOME = {home for homes in _HOMES.values() for home in homes}
_DATA_SETS = ("CIFAR10", "CIFAR100", "FakeData", "FashionMNIST", "ImageFolder", "KMNIST", "MNIST", "SVHN")
_PACKAGES = ("runner", "torch", "torchvision", "torchmetrics")


_IF_TRUSTED = "if you trust it (on the command line, in conf/local, or in RUNNER_TRUST)"


def section_of(key: str) -> str:
    """The section of components that a dotted key lies in, such as `data.dataset` or `loss`; otherwise its first part."""
    return next((section for section in _HOMES if within(key, [section])), key.split(".")[0])


def packages_in(value: Any) -> list[str]:
    """The packages that a value of `trust`, or of RUNNER_TRUST, names: a list, or text with commas or spaces between them."""
    texts = value if isinstance(value, list) else [value] if value else []
    return [name for text in texts for name in re.split(r"[,;:\s]+", str(text)) if name]


def not_packages(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """The fields of a `Problem` for each name that no package can have."""
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            first = name.split(".")[0]
            allowed = (
                f"trust=[{first}]" if first.isidentifier() else "a name as after import, such as trust=[my_package]"
            )
            yield "trust", f"'{name}' is not a package name", allowed


def refusal(path: str, trust: Iterable[str], section: str = "") -> str:
    """The reason why a path that was read from a file may not be built, or an empty string if it may.

    Args:
        path: dotted path.
        trust: packages that the user trusts.
        section: where it stands, such as `loss`; parts of another kind may not be built there. Empty for any.
    """
    # A file may come from anyone, so only known packages can be named in it
    trusted = tuple(trust)
    if not within(path, (*_PACKAGES, *trusted)):
        return "comes from a file and its package is not trusted"
    try:
        found = resolve(path)
    except UserError as error:
        return str(error)
    # The object decides and not the path, as a path may lead to anything that a module imports
    home, name = _home_of(found), str(getattr(found, "__qualname__", "?"))
    # Private names and parts of classes are not made to be called by a config
    if path.rpartition(".")[2].startswith("_"):
        return "comes from a file and names something private"
    if "." in name:
        return "comes from a file and names a part of a class"
    # Packages that the user trusts are not restricted further
    if within(home, trusted):
        return ""
    of_the_program = within(home, _EVERY_HOME) and within(home, ["runner"])
    if of_the_program and not (inspect.isclass(found) or inspect.isfunction(found)):
        return "is neither a class nor a function"
    if not (of_the_program or _builds_a_part(found)):
        return f"comes from a file and resolves to {home}.{name}, which is not on the list of things a file may build"
    # A safe class in the wrong section is still refused, such as a data set instead of a loss
    if section and not within(home, _HOMES.get(section, ())):
        return f"comes from a file and resolves to {home}.{name}, which is not built in the section {section}"
    return ""


def remedy(path: str, trust: Iterable[str], section: str) -> str:
    """The value that would allow a path that `refusal` refuses."""
    if within(path, tuple(trust)):
        return "a public class or function of the package, at the top of its module"
    if within(path, _PACKAGES):
        homes = ", ".join(_HOMES.get(section, ()))
        return f"parts of {homes}, or {section}=... on the command line" if homes else "nothing: no part is built here"
    # With those that are trusted already, as a second `trust` replaces the first.
    return f"trust=[{','.join([*trust, path.split('.')[0]])}] {_IF_TRUSTED}"


def _home_of(found: Any) -> str:
    return str(getattr(found, "__module__", None) or "")


def _builds_a_part(found: Any) -> bool:
    """Tell whether a torch or torchvision object builds modules, optimizers, schedules, data sets, transforms or metrics."""
    import torch
    import torchvision

    home = _home_of(found)
    # Functions are allowed only if torchvision lists them as builders of models
    if inspect.isfunction(found) and within(home, ["torchvision.models"]):
        try:
            models = torchvision.models
            return bool(found is models.get_model or models.get_model_builder(found.__name__) is found)
        except ValueError:
            return False
    if not inspect.isclass(found) or not within(home, _EVERY_HOME):
        return False
    if within(home, ["torchvision.datasets"]):
        return found.__name__ in _DATA_SETS
    data, schedules = torch.utils.data.Dataset, torch.optim.lr_scheduler.LRScheduler
    # The older transforms are plain classes with a __call__; a class's own comes before that of `type`.
    is_transform = within(home, ["torchvision.transforms"]) and any("__call__" in vars(base) for base in found.__mro__)
    return is_transform or issubclass(found, (torch.nn.Module, torch.optim.Optimizer, schedules, data))
