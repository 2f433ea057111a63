"""What a file from elsewhere may ask for: it cannot run code, reach the network, or take processes, memory or time without bound.

The command line and the user's config folder are trusted, a file such as a checkpoint is not. The object that a path in it
resolves to must be on the allow-list or come from a package that the user trusts. Nothing else is even imported.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from runner.base.errors import Problem, UserError
from runner.base.reading import is_url
from runner.config.keys import at, walk, within
from runner.config.schema.sections import Data
from runner.config.schema.train import Train
from runner.config.sources import shipped
from runner.config.space import text_of
from runner.config.targets import resolve, targets_in
from runner.config.validate import shown


def _named_in(group: str) -> set[str]:
    """The modules of this package that the shipped options of a group name: other modules beside them are not for configs."""
    texts = [path.read_text(encoding="utf-8") for path in (shipped() / group).glob("*.yaml")]
    return {module for text in texts for module in re.findall(r"_target_: (runner\.[\w.]+)\.\w+", text)}


# Modules that the parts of a section come from, nested ones included. Other modules of the program can write files or
# build in turn, and being a subclass of Module or Dataset is not enough: some of those compile source text or unpickle
# what they are given (torch.fx.GraphModule, data pipes, torchvision's LSUN).
_MODELS = ("runner.models", "torch.nn.modules", "torchvision.models", "torchvision.ops")
_OF_DATA = ("torchvision.datasets", "torch.utils.data.dataset", "torchvision.transforms")
_HOMES: dict[str, tuple[str, ...]] = {
    "data.dataset": (*sorted(_named_in("data")), *_OF_DATA),
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
# The largest numbers, and the most items of a list, that a file may have in these sections. They multiply processes, memory
# or time. How large a model can be in all is bounded where it is built.
_MOST = {
    "devices": 1024, "threads": 1024, "max_restarts": 1024, "fsdp.replicas": 1024, "dist.timeout_s": 10**6, "epochs": 10**7,
    "max_steps": 10**12, "accumulate": 2**20, "data.num_workers": 128, "data.prefetch": 128, "data.image_size": 2**14,
    "data.batch_size": 2**20, "evaluate.batch_size": 2**20, "data.split.folds": 10**4, "checkpoint.keep": 10**4,
    "data.dataset.classes": 2**20, **dict.fromkeys(("model", "transform", "loss", "task", "metrics"), 2**22),
}  # fmt: skip
_WEIGHED = ("loss", "task")  # where floats weigh terms of a loss, which may be large
_NOT_OPENED = ("name", "tags", "notes", "logger", "init_from")  # texts, loggers that do not send, old weights


def problems_in_file(
    values: dict[str, Any], composed: dict[str, Any], builds: Sequence[str] | None = None
) -> Iterator[Problem]:
    """What a config from a file asks for and may not have, unless the command line, `composed`, asks for the same.

    `builds` are the sections whose components will be built, None for all: others may name anything, as nobody imports it.
    """
    # A name with .. or an absolute path could write outside `output_root`
    name = str(values.get("name"))
    inside = (path := PurePath(name)).parts and not path.is_absolute() and ".." not in path.parts and name.isprintable()
    if name != str(composed["name"]) and not (inside and len(name) <= 200):
        allowed = "a short name without .. and control characters, given on the command line: name=..."
        yield Problem("name", f"cannot be {shown(name)}", allowed)
    # Large numbers cost memory or time before anyone notices
    for section, most in _MOST.items():
        for key, value in walk(at(values, section), section):
            number = len(value) if isinstance(value, list) else value
            multiplies = isinstance(number, int if section in _WEIGHED else int | float)
            if multiplies and number > most and value != at(composed, key):
                what = f"{len(value):,} items" if isinstance(value, list) else shown(value)
                allowed = f"at most {most:,}, or {key}=... on the command line"
                yield Problem(key, f"cannot be {what}, as it comes from a file", allowed)
    # A file must not make this machine send requests
    for key, value in walk(values):
        used = not within(key, _NOT_OPENED) if builds is None else within(key, builds)
        if used and isinstance(value, str) and is_url(value) and value != at(composed, key):
            whole = re.sub(r"\.\d+(\..*)?$", "", key)  # an override sets no single item of a list
            word = shlex.quote(f"{whole}={text_of(at(values, whole))}")
            allowed = f"the same on the command line, if this machine may send requests there: {word}"
            yield Problem(key, f"is the address {shown(value)}, which a file cannot choose", allowed)
    # Only the command line and the environment extend what is trusted
    trust = [*packages_in(composed["trust"]), *packages_in(os.environ.get("RUNNER_TRUST", ""))]
    yield from (Problem(*wrong, origin="trust") for wrong in not_packages(trust))
    # The command line allows a target only in the section that names it: a data set is not a loss
    named = {(_section_of(key), path) for key, path in targets_in(composed)}
    for key, target in targets_in(values):
        section = _section_of(key)
        if (section, target) in named or not (builds is None or within(key, builds)):
            continue
        if reason := refusal(target, trust, section):
            yield Problem(f"{key}._target_", f"'{target}' {reason}", _remedy(target, trust, section))


def _section_of(key: str) -> str:
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
            yield "trust", f"'{name}' is not a package name", "a name as after import, such as trust=[my_package]"


def refusal(path: str, trust: Iterable[str], section: str = "") -> str:
    """The reason why a dotted path from a file may not be built, or an empty string if it may.

    The packages in `trust` are those of the user. In a section such as `loss`, parts of another kind may not be built.
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
    home, name = str(getattr(found, "__module__", None) or ""), str(getattr(found, "__qualname__", "?"))
    # Private names and parts of classes are not made to be called by a config
    if path.rpartition(".")[2].startswith("_"):
        return "comes from a file and names something private"
    if "." in name:
        return "comes from a file and names a part of a class"
    # Packages that the user trusts are not restricted further
    if within(home, trusted):
        return ""
    own = within(home, _EVERY_HOME) and within(home, ["runner"])
    if own and not (inspect.isclass(found) or inspect.isfunction(found)):
        return "is neither a class nor a function"
    if not (own or _builds_a_part(found, home)):
        return f"comes from a file and resolves to {home}.{name}, which is not on the list of things a file may build"
    # A safe class in the wrong section is still refused, such as a data set instead of a loss
    if section and not within(home, _HOMES.get(section, ())):
        return f"comes from a file and resolves to {home}.{name}, which is not built in the section {section}"
    return ""


def _remedy(path: str, trust: Sequence[str], section: str) -> str:
    """The value that would allow a path that `refusal` refuses."""
    if within(path, trust):
        return "a public class or function of the package, at the top of its module"
    if within(path, _PACKAGES):
        homes = ", ".join(_HOMES.get(section, ()))
        return f"parts of {homes}, or {section}=... on the command line" if homes else "nothing: no part is built here"
    # With those that are trusted already, as a second `trust` replaces the first
    names = ",".join([*trust, path.split(".")[0]])
    return f"trust=[{names}] if you trust it (on the command line, in conf/local, or in RUNNER_TRUST)"


def _builds_a_part(found: Any, home: str) -> bool:
    """Tell whether a torch or torchvision object builds modules, optimizers, schedules, data sets, transforms or metrics."""
    import torch
    import torchvision

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
    # The older transforms are plain classes with a __call__; a class's own comes before that of `type`
    is_transform = within(home, ["torchvision.transforms"]) and any("__call__" in vars(base) for base in found.__mro__)
    return is_transform or issubclass(found, (torch.nn.Module, torch.optim.Optimizer, schedules, data))


def fetch_nothing(values: dict[str, Any], composed: dict[str, Any]) -> None:
    """Let a config from a file fetch data only if the command line does, too: fetching writes into the folder it names."""
    own, data = _data_of(composed), values.get("data")
    if not isinstance(data, dict):
        return
    data["download"] = own["download"]
    dataset = data.get("dataset")
    if isinstance(dataset, dict) and dataset != own["dataset"]:
        for _, node in walk(dataset):
            if isinstance(node, dict) and node.get("download"):
                node["download"] = node is dataset and own["download"]


def own_loggers(loggers: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The loggers that write into the run directory; of those that may send elsewhere, the ones that the user has, too."""
    kept = dict[str, Any]()
    for name, node in loggers.items():
        target = at(node, "_target_")
        if within(str(target), ["runner.tracking.loggers"]):
            kept[name] = node
        elif at(own, f"{name}._target_") not in (..., None) and at(own, f"{name}._target_") == target:
            kept[name] = copy.deepcopy(own[name])
    return kept


def may_write_cache(config: Train, composed: dict[str, Any]) -> bool:
    """Tell whether `data.cache` would write to a folder that the command line names, or to the default one."""
    data, own = config.data, _data_of(composed)
    if own["cache_dir"] is not None:
        return data.cache_dir == str(own["cache_dir"])
    folders = (data.root, data.cache_dir, data.dataset.get("root"))
    return folders == (str(own["root"]), None, own["dataset"].get("root"))


def _data_of(composed: dict[str, Any]) -> dict[str, Any]:
    """The data of a command line; keys that a custom option does not have get their defaults."""
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Data)}
    return {**defaults, "dataset": {}, **composed["data"]}
