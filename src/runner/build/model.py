"""Task, model and loss, fitted to the data; `runner.build.probe` tries them on a sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.build.finetune import explaining, give_head
from runner.config.errors import UserError
from runner.config.frozen import with_changes
from runner.config.schema.sections import Normalize
from runner.config.schema.train import Train
from runner.config.targets import build, extras_of, names_argument
from runner.data.build import DataModule
from runner.data.transforms.augment import Pipeline
from runner.data.workers import WorkerLoader
from runner.distributed.deferred import Deferred, is_blank
from runner.engine.tasks import Classification, Task


class KnownData(Protocol):
    """What a model has to know about the data."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes."""

    @property
    def channels(self) -> int:
        """Colour channels."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width."""


def build_task_model_loss(
    config: Train, data: DataModule, fetch_weights: bool = True, deferred: Deferred | None = None
) -> tuple[Task, nn.Module, nn.Module]:
    """Build task, model and loss; for `fetch_weights` and `deferred` see `build_model`."""
    if data.incompatibilities:
        raise data.incompatibilities[0]
    task = build_task(config, data)
    model = build_model(config, task, data, lambda: example_input(data).cpu().float(), fetch_weights, deferred)
    _check_targets(task, data)
    return task, model, build_loss(config, task, data)


def build_task(config: Train, data: KnownData) -> Task:
    """Build the task, which must fit the data."""
    facts = _task_facts(data)
    if not data.classes and config.task.get("num_classes", 0) is None:
        allowed = "task=regression loss=mse for numbers, or the number of classes"
        raise UserError("task.num_classes", "is not known, as the data has no classes", allowed)
    _check_against_data("task", config.task, facts)
    task: Task = build("task", _filled(config.task, facts), facts=facts)
    return task


def build_model(
    config: Train,
    task: Task,
    data: KnownData,
    image: Callable[[], Tensor],
    fetch_weights: bool = True,
    deferred: Deferred | None = None,
) -> nn.Module:
    """Build the model; of the data only their description has to be there.

    Args:
        config: the config.
        task: gives the number of outputs.
        data: a description of the data.
        image: gives an image as the model takes it, (1, C, H, W) on the CPU.
        fetch_weights: False downloads no trained weights, for a model that gets its weights from a checkpoint.
        deferred: computes the weights later, if they can be; None for now.
    """
    facts = _model_facts(task, data)
    head = extras_of("model", config.model).head
    # A head that is replaced may have been made for other classes.
    _check_against_data("model", config.model, facts if head is None else facts | {"num_classes": None})

    def construct() -> nn.Module:
        model: nn.Module = build("model", _filled(config.model, facts), facts=facts, fetch=fetch_weights)
        if head is not None:
            give_head(model, head, facts["num_classes"], image())
        return model

    return deferred.construct(construct) if deferred else construct()


def _check_targets(task: Task, splits: DataModule) -> None:
    """Check all targets that are known without reading samples; others are checked in each batch, before it is used."""
    # One that a task inherits says nothing of targets of its own kind.
    kind = next(kind for kind in type(task).__mro__ if {"wrong_target", "targets"} & vars(kind).keys())
    if "wrong_target" not in vars(kind):
        return
    wrong: Callable[[Tensor, bool], tuple[int, str] | None] = task.wrong_target  # type: ignore[attr-defined]
    allowed = "class numbers from 0 on" if isinstance(task, Classification) else "finite numbers"

    def check(split: str, targets: Tensor, samples: Tensor) -> None:
        if found := wrong(targets, split == "train"):
            problem = f"the target of sample {int(samples[found[0]])} of '{split}' {found[1]}"
            raise UserError("data.dataset", problem, f"{allowed}, or another task")

    for name, (_, indices) in splits.parts.items():
        if name in splits.targets:
            samples = indices[:]
            check(name, splits.targets[name][samples], samples)
            continue
        check(name, splits.examples[name][1][None], indices[:1])
        for split in (splits.eval_split(name), splits.train if name == "train" else None):
            if split is not None and isinstance(split.loader, WorkerLoader):
                split.loader.check = functools.partial(check, name)


def build_loss(config: Train, task: Task, data: DataModule) -> nn.Module:
    """Build the loss, which must be a module."""
    facts = {"num_classes": task.outputs(data.classes), "class_counts": data.class_counts}
    loss = build("loss", config.loss, facts=facts)
    if isinstance(loss, nn.Module):
        return loss
    raise UserError("loss", f"is a {type(loss).__name__}", "a torch.nn.Module that takes logits and targets")


def with_facts(config: Train, task: Task, data: DataModule) -> Train:
    """The config with facts from the data instead of null, so that a checkpoint stores them: statistics, classes, image shape."""
    return with_changes(
        config,
        {
            "data.normalize": Normalize(mean=list(data.mean), std=list(data.std)),
            "task": _filled(config.task, _task_facts(data)),
            "model": _filled(config.model, _model_facts(task, data)),
        },
    )


def _task_facts(data: KnownData) -> dict[str, Any]:
    return {"num_classes": len(data.classes) or None}


def _model_facts(task: Task, data: KnownData) -> dict[str, Any]:
    return {"in_channels": data.channels, "image_size": data.image_size, "num_classes": task.outputs(data.classes)}


def _filled(node: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A component with facts instead of the arguments that it lists as null."""
    open_ = [name for name in facts if name in node and node[name] is None and names_argument(node, name)]
    return node | {name: _plain(facts[name]) for name in open_}


def _check_against_data(key: str, node: dict[str, Any], facts: dict[str, Any]) -> None:
    for name, fact in facts.items():
        given = node.get(name)
        if given is not None and fact is not None and _plain(given) != _plain(fact):
            problem = f"is {given}, but the data says {fact}"
            raise UserError(f"{key}.{name}", problem, f"{key}.{name}=null to take it from the data, or other data")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def example_input(data: DataModule, copies: int = 1) -> Tensor:
    """The first training sample as a model takes it, without augmentation: (copies, C, H, W)."""
    image = data.example[0].expand(copies, *data.example[0].shape[1:])
    if copies == 1:
        return prepared(data.train_for_eval.prepare, image)
    return data.train_for_eval.prepare(image, indices_for(image), 0)


def example_targets(data: DataModule, copies: int = 1) -> Tensor:
    """The target of the first training sample: (copies, ...)."""
    return data.example[1].expand(copies, *data.example[1].shape[1:])


def prepared(pipeline: Pipeline, images: Tensor) -> Tensor:
    """Images after `transform.eval` and normalisation."""
    takes = "batch transforms, as in runner.data.transforms.augment; others belong in transform.sample_*"
    with explaining("transform.eval", f"cannot take images of {tuple(images.shape)}: ", takes):
        return pipeline(images, indices_for(images), 0)


def indices_for(images: Tensor) -> Tensor:
    """Sample numbers to draw random numbers by, for images of which nobody knows the number: zeros, int64 (B,)."""
    return torch.zeros(len(images), dtype=torch.int64, device=images.device)


def place(
    model: nn.Module,
    loss: nn.Module,
    device: torch.device,
    channels_last: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Move model and loss to the device, weights in the memory layout that the images come in.

    In float64 all their floating-point tensors are converted; in float32 each keeps its type. Weights without values, see
    `runner.distributed.deferred`, stay where they are.
    """
    kept = dtype if dtype == torch.float64 else None
    loss.to(device, kept)
    if any(is_blank(parameter) for parameter in model.parameters()):
        if kept:
            model.to(kept)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
    else:
        model.to(device, kept)
    if channels_last:
        model.to(memory_format=torch.channels_last)
