"""Task, model and loss, fitted to the data; `runner.run.trial` tries them on a sample."""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.config.keys import with_changes
from runner.config.schema.sections import Normalize
from runner.config.schema.train import Train
from runner.config.targets import build, called, extras_of, names_argument
from runner.data.bad_samples import path_of
from runner.data.module import DataModule
from runner.data.transforms.augment import Pipeline
from runner.data.workers import WorkerLoader
from runner.models.heads import replace_head
from runner.optim.losses import CrossEntropy, Focal
from runner.run.finetune import Modules, adapt, explaining, head_of
from runner.run.interfaces import calls_of, require_methods
from runner.tasks.multilabel import MultiLabel
from runner.tasks.regression import Regression
from runner.tasks.task import SHOWS, STEPS, Task
from runner.tracking.formats import is_number

_MOST_TENSORS = 2**15  # a checkpoint with two averages of each, as Adam keeps them, has a header of about 25 MB

TAKES_BATCHES = (
    "transforms of batches, called with images (B, C, H, W) and random numbers, as in runner.data.transforms.augment; "
    "a transform of a single image belongs in transform.sample_train or transform.sample_eval"
)


@dataclass(frozen=True)
class DataFacts:
    """The properties of its data that a checkpoint stores."""

    classes: tuple[str, ...]  # their names; empty for regression
    channels: int  # colour channels of an image
    image_size: tuple[int, int]  # height, width
    target_shape: tuple[int, ...] | None = None  # is not stored; the config has what follows from it


KnownData: TypeAlias = DataModule | DataFacts
"""What a model has to know about the data."""


def build_task_model_loss(
    config: Train, data: DataModule, fetch_weights: bool
) -> tuple[Train, Task, nn.Module, nn.Module]:
    """Build task, model and loss; for `fetch_weights` see `build_model`.

    The config that is returned has facts from the data (statistics, classes, image shape) instead of null, so that a
    checkpoint stores them.
    """
    if data.incompatibilities:
        raise data.incompatibilities[0]
    config = with_changes(config, {"task": _filled_task(config, data)})
    task = build_task(config, data, fetch_weights)
    statistics = {"data.normalize": Normalize(mean=list(data.mean), std=list(data.std))} if data.mean else {}
    stated = _stated_outputs(task, data)
    facts = _model_facts(stated, data) | {"in_channels": data.channels or data.kept_channels}
    filled = _filled(config.model, facts)
    # Only by the config of a new run, as models of older checkpoints got None, which one that is None by default still gets
    unknown = fetch_weights and not stated and filled.get("num_classes") is None
    asks = unknown and names_argument(filled, "num_classes")
    filled |= {"num_classes": task.outputs(data.classes) or None} if asks and asks.default is not None else {}
    config = with_changes(config, statistics | {"model": filled})
    model = build_model(config, task, data, lambda: example_input(data).cpu().float(), fetch_weights)
    loss = build_loss(config, task, data)
    _check_targets(task, data)
    return config, task, build_modules(task, model, loss), loss


def build_task(config: Train, data: KnownData, fetch_weights: bool = True) -> Task:
    """Build the task, which must fit the data; for `fetch_weights` see `build_model`."""
    facts, shape, target = _task_facts(data), data.target_shape or (), str(config.task["_target_"])
    # A mask has a target for every pixel, and other shipped tasks would take it for a long vector
    if target.startswith("runner.") and len(shape) > 1 and math.prod(shape) > 1:
        problem = f"the target of a sample has shape {shape}, as the mask of a segmentation"
        masks = "task=segmentation with pairs (tv_tensors.Image, tv_tensors.Mask) and data.images=['0']"
        raise UserError("data.dataset", problem, f"{masks}, a number or a vector for each sample, or a custom task")
    # Only data with class names or vectors tell how many outputs there are
    open_ = config.task.get("num_classes", 0) is None and names_argument(config.task, "num_classes")
    if facts["num_classes"] is None and open_:
        allowed = "task=regression loss=mse for numbers, or the number of classes"
        raise UserError("task.num_classes", "is not known, because the data has no classes", allowed)
    _check_against_data("task", config.task, facts)
    if data.classes and (names := names_argument(config.task, "classes")) and names.default is names.empty:
        facts["classes"] = list(data.classes)  # not in the config: there may be thousands
    with _of_bounded_size():  # of a teacher
        task: Task = build("task", config.task, facts=facts, fetch=fetch_weights)
    # What it lacks is as `Task` has it; it has to have one of the methods beside `modules`, which each nn.Module has
    methods = {**calls_of(Task), **STEPS, **SHOWS}
    if any(hasattr(task, name) for name in methods if name != "modules"):
        for name, default in vars(Task).items():
            if not name.startswith("_") and not hasattr(task, name):
                # Also into a frozen dataclass
                object.__setattr__(task, name, types.MethodType(default, task) if callable(default) else default)
    require_methods("task", target, task, methods, optional=STEPS | SHOWS)
    # Class numbers as regression targets run without an error, and their distances mean nothing
    if isinstance(task, Regression) and not shape and (named := [name for name in data.classes if not is_number(name)]):
        problem = f"predicts numbers, and the targets are class numbers with names such as '{named[0]}'"
        raise UserError("task", problem, "task=classification with a loss such as loss=cross_entropy, or other targets")
    return task


def build_modules(task: Task, model: nn.Module, loss: nn.Module) -> nn.Module:
    """What is trained besides the loss: the model, or a container of it and the modules that the task adds.

    Raises `UserError` if the task adds anything but modules.
    """
    if not callable(getattr(task, "modules", None)):
        return model
    with explaining("task", "its modules(model, loss) cannot be used: ", "modules by name, beside model and loss"):
        given = dict(task.modules(model, loss))  # type: ignore[attr-defined]
        if given.pop("model", model) is not model or given.pop("loss", loss) is not loss:
            raise ValueError("it gives another model or loss")
        try:
            together = Modules({"model": model, **given})  # the model first: layers are numbered in this order
        except KeyError as error:  # a name that no module can have
            raise ValueError(error.args[0]) from error
    if given and not model.training:  # as loaded models often are; alone, it would be trained
        model.train()
    return together if given else model


def modules_of(model: nn.Module, loss: nn.Module | None = None) -> dict[str, nn.Module]:
    """What `build_modules` returned by name, as the methods of a task take it; a model that is only used has no loss."""
    named = dict(model) if isinstance(model, Modules) else {"model": model}
    return named if loss is None else {**named, "loss": loss}


def optimizers_of(task: Any, modules: Mapping[str, nn.Module]) -> Mapping[str, Any]:
    """What each optimizer updates, by its name, as the task says; nothing if it does not say."""
    divided = task.optimizers(modules) if hasattr(task, "optimizers") else {}
    if not isinstance(divided, Mapping):
        problem = f"its optimizers(modules) gives a {type(divided).__name__}"
        raise UserError("task", problem, "a dict of the name of each optimizer and its modules")
    return divided


def model_of(model: nn.Module) -> nn.Module:
    """The model of the config, of what `build_modules` returned."""
    return model["model"] if isinstance(model, Modules) else model


def build_model(
    config: Train, task: Task, data: KnownData, image: Callable[[], Tensor], fetch_weights: bool = True
) -> nn.Module:
    """Build the model; of the data only their description has to be there.

    `image` gives an image as the model takes it, (1, C, H, W) on the CPU. Without `fetch_weights`, no trained weights are
    downloaded, for a model that gets its weights from a checkpoint.
    """
    outputs, target = _stated_outputs(task, data), str(config.model["_target_"])
    facts, background = _model_facts(outputs, data), outputs == (num_classes_of(task) or outputs) + 1
    head = extras_of("model", config.model).head
    # A head that is replaced may have been made for other classes.
    _check_against_data("model", config.model, facts if head is None else facts | {"num_classes": None}, background)

    # Classifiers of images take their channels from pairs of an image and a target
    if not data.channels and config.model.get("in_channels", 0) is None and target.startswith("runner.models."):
        problem = f"{called(target, config.model.get('name'))} is for pairs of an image and a target, and these samples differ"
        others = "model=torchvision_segmentation for masks, model=torchvision_detection for boxes"
        raise UserError("model", problem, f"{others}, or model.in_channels=3 where the task calls a classifier")
    # Hooks see every tensor as it is registered, so an absurd size is refused before its memory is filled
    with _of_bounded_size():
        model = build("model", config.model, facts=facts, fetch=fetch_weights)
        if not isinstance(model, nn.Module):
            raise UserError("model._target_", f"{target} gives a {type(model).__name__}", "a torch.nn.Module")
        if head is not None:
            hidden = None if head == "none" else [] if isinstance(head, str) else head
            replace_head(model, head_of(model, image(), "model.head"), hidden, task.outputs(data.classes))
        if not fetch_weights:  # weights that begin here are those of the model without adapters
            adapt(config, model, image)
    return model


@contextlib.contextmanager
def _of_bounded_size() -> Iterator[None]:
    """Refuse a model of more tensors than a checkpoint can hold, or of more bytes than are free, before its weights are drawn."""
    seen, free = set[int](), psutil.virtual_memory().available

    def count(_: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal free
        if tensor is None or id(tensor) in seen:
            return
        seen.add(id(tensor))
        free -= 0 if tensor.device.type == "meta" else tensor.nbytes
        if len(seen) > _MOST_TENSORS or free < 0:
            problem = "needs more memory than is free" if free < 0 else f"has over {_MOST_TENSORS:,} tensors"
            raise UserError("model", problem, "a smaller one, of fewer or narrower layers")

    with contextlib.ExitStack() as hooks:
        hooks.callback(nn.modules.module.register_module_parameter_registration_hook(count).remove)
        hooks.callback(nn.modules.module.register_module_buffer_registration_hook(count).remove)
        yield


def _check_targets(task: Task, splits: DataModule) -> None:
    """Check all targets that are known without reading samples; others are checked in each batch, before it is used.

    Of samples of another kind than (image, target), those whose batches are pairs have targets.
    """
    # One that a task inherits says nothing of targets of its own kind.
    kinds = (kind for kind in type(task).__mro__ if {"wrong_target", "targets"} & vars(kind).keys())
    if "wrong_target" not in vars(next(kinds, object)):
        return
    wrong: Callable[[Tensor, bool], tuple[int, str] | None] = task.wrong_target  # type: ignore[attr-defined]
    allowed = getattr(task, "expected", "finite numbers")

    def check(split: str, targets: Tensor, samples: Tensor) -> None:
        if found := wrong(targets, split == "train"):
            sample = int(samples[found[0]])
            file = f" ({path})" if (path := path_of(splits.parts[split][0], sample)) else ""
            problem = f"the target of sample {sample} of '{split}'{file} {found[1]}"
            raise UserError("data.dataset", problem, f"{allowed}, or another task")

    if not splits.pairs:
        trial = splits.trial
        if not (isinstance(trial.data, tuple) and len(trial.data) == 2 and isinstance(trial.data[1], Tensor)):
            return
        check("train", trial.targets.cpu(), trial.indices.cpu())
    # Targets in memory are checked all at once; files are checked as they are read, and one example now
    for name, (_, indices) in splits.parts.items():
        if name in splits.targets:
            samples = indices[:]
            check(name, splits.targets[name][samples], samples)
            continue
        if name in splits.examples:
            check(name, splits.examples[name][1][None], indices[:1])
        for split in (splits.eval_split(name), splits.train if name == "train" else None):
            if split is not None and isinstance(split.loader, WorkerLoader):
                split.loader.check = functools.partial(check, name)


def build_loss(config: Train, task: Task, data: DataModule) -> nn.Module:
    """Build the loss, which must be a module."""
    facts = {
        "num_classes": task.outputs(data.classes),
        "class_counts": data.class_counts,
        "label_counts": _label_counts(task, data),
        "ignore_index": getattr(task, "ignore_index", -100),  # torch's own default
    }
    loss = build("loss", config.loss, facts=facts)
    # A softmax over independent outputs may run without an error, so it is refused by its kind
    if isinstance(loss, CrossEntropy | Focal) and isinstance(task, MultiLabel | Regression):
        what, fit = ("sigmoid", "loss=bce") if isinstance(task, MultiLabel) else ("number", "loss=mse")
        problem = (
            f"{type(loss).__name__} is for one class per sample, and each output of this task is a {what} of its own"
        )
        raise UserError("loss", problem, f"{fit}, or task=classification")
    if not isinstance(loss, nn.Module):
        raise UserError("loss", f"is a {type(loss).__name__}", "a torch.nn.Module that takes logits and targets")
    return loss


def _label_counts(task: Task, data: DataModule) -> Tensor | None:
    """Training samples without and with each class or label, int64 (2, C); None if they are not known without reading them."""
    # Reading every file to count its labels would take as long as an epoch
    if "train" not in data.targets or num_classes_of(task) is None:
        return None
    targets = data.targets["train"][data.parts["train"][1][:]]
    having = (targets > 0.5).sum(0) if targets.ndim == 2 else data.class_counts if targets.ndim == 1 else None
    return None if having is None else torch.stack([len(targets) - having, having])


def num_classes_of(task: Task) -> int | None:
    """The number of classes or labels; None for a task that has none."""
    count = getattr(task, "num_classes", None)
    return count if isinstance(count, int) else None


def _stated_outputs(task: Task, data: KnownData) -> int:
    """The outputs that a task asks for; 0 if it has only the default, which a model may not follow."""
    return 0 if getattr(task.outputs, "__func__", None) is Task.outputs else task.outputs(data.classes)


def _task_facts(data: KnownData) -> dict[str, Any]:
    """The number of classes, or else of values of a target vector, and the number of values of a target."""
    shape = data.target_shape
    values = None if shape is None else math.prod(shape)
    return {"num_classes": len(data.classes) or (values if shape and len(shape) == 1 else None), "num_outputs": values}


def _model_facts(outputs: int, data: KnownData) -> dict[str, Any]:
    size = data.image_size if data.channels else None
    return {"in_channels": data.channels or None, "image_size": size, "num_classes": outputs or None}


def _filled_task(config: Train, data: KnownData) -> dict[str, Any]:
    """The section `task` with facts, and a teacher in it with those of a model."""
    node = _filled(config.task, _task_facts(data))
    if isinstance(teacher := node.get("teacher"), dict):
        node["teacher"] = _filled(teacher, _model_facts(len(data.classes), data))
    return node


def _filled(node: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A component with facts instead of the arguments that it lists as null."""
    open_ = [name for name in facts if name in node and node[name] is None and names_argument(node, name)]
    return node | {name: _plain(facts[name]) for name in open_}


def _check_against_data(key: str, node: dict[str, Any], facts: dict[str, Any], background: bool = False) -> None:
    """Refuse a number in the config that contradicts the data, even if it would run."""
    for name, fact in facts.items():
        if None not in (given := node.get(name), fact) and _plain(given) != _plain(fact):
            one_more = f": {fact - 1} and the background" if background and name == "num_classes" else ""
            problem = f"is {given}, but the data says {fact}{one_more}"
            raise UserError(f"{key}.{name}", problem, f"{key}.{name}=null to take it from the data, or other data")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def example_input(data: DataModule) -> Tensor:
    """The first training sample as a model takes it, without augmentation: (1, C, H, W)."""
    image = data.example[0]
    return prepared(data.train_for_eval.prepare, image) if data.pairs else image


def prepared(pipeline: Pipeline, images: Tensor) -> Tensor:
    """Images after `transform.eval` and normalisation."""
    with explaining("transform.eval", f"cannot take images of {tuple(images.shape)}: ", TAKES_BATCHES):
        return pipeline(images, indices_for(images), 0)


def indices_for(images: Tensor) -> Tensor:
    """Sample numbers to draw random numbers by, for images of which nobody knows the number: zeros, int64 (B,)."""
    return torch.zeros(len(images), dtype=torch.int64, device=images.device)


def place(model: nn.Module, loss: nn.Module, device: torch.device, channels_last: bool, dtype: torch.dtype) -> None:
    """Move model and loss to the device, weights in the memory layout that the images come in.

    In float64 all their floating-point tensors are converted; in float32 each keeps its type.
    """
    for module in (loss, model):
        module.to(device, dtype if dtype == torch.float64 else None)
    if channels_last:
        model.to(memory_format=torch.channels_last)
