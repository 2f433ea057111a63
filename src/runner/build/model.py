"""Task, model and loss, fitted to the data and tried on a sample."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.build.finetune import give_head, try_forward
from runner.build.targets import check_targets
from runner.config.errors import UserError, first_line
from runner.config.schema.train import Train
from runner.config.targets import build, extras_of, names_argument
from runner.data.build import DataModule
from runner.data.transforms.augment import Pipeline
from runner.engine.plan import EpochPlan
from runner.engine.tasks import Task
from runner.instrument.no_trace import evaluating, no_trace
from runner.runtime.determinism import refusal

_BATCHES = (
    "what takes a batch and its random draws, as in runner.data.transforms.augment; others go into transform.sample_*"
)


class KnownData(Protocol):
    """What a model has to know of the data: see `runner.data.build.DataModule`."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes."""

    @property
    def channels(self) -> int:
        """Colour channels of an image."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width."""


def build_learner(
    values: dict[str, Any], config: Train, splits: DataModule, fetch_weights: bool = True
) -> tuple[Task, nn.Module, nn.Module]:
    """Build task, model and loss; what they took from the data is written into `values`.

    Args:
        values: the config as plain containers.
        config: the same, validated.
        splits: the data.
        fetch_weights: see `build_model`.

    Raises:
        UserError: if what the config says does not fit the data.
    """
    if splits.incompatibilities:
        raise splits.incompatibilities[0]
    task, model = build_model(values, config, splits, lambda: as_given(splits).cpu(), fetch_weights)
    check_targets(task, splits)
    facts = {"num_classes": task.outputs(splits.classes), "class_counts": splits.class_counts}
    loss: nn.Module = build("loss", config.loss, facts=facts)
    if not isinstance(loss, nn.Module):
        raise UserError(
            f"loss: is a {type(loss).__name__}\n    allowed: a torch.nn.Module that takes logits and targets"
        )
    return task, model, loss


def build_model(
    values: dict[str, Any], config: Train, data: KnownData, image: Callable[[], Tensor], fetch_weights: bool = True
) -> tuple[Task, nn.Module]:
    """Build task and model, for which the data need not be there; what they took from it is written into `values`.

    Args:
        values: the config as plain containers.
        config: the same, validated.
        data: what the model has to know of it.
        image: gives an image as the model is given it, (1, C, H, W) on the CPU.
        fetch_weights: False for a model that takes its weights from a checkpoint: no trained ones are fetched for it.

    Raises:
        UserError: if what the config says does not fit the data.
    """
    count = len(data.classes)
    facts: dict[str, Any] = {"num_classes": count or None}
    if not count and config.task.get("num_classes", count) is None:
        raise UserError(
            "task.num_classes: is not known, as the data has no classes\n"
            "    allowed: task=regression loss=mse for numbers, or the number of classes"
        )
    _check_against_data("task", config.task, facts)
    task: Task = build("task", _with_facts(values, "task", facts), facts=facts)
    facts = {
        "in_channels": data.channels,
        "image_size": data.image_size,
        "num_classes": task.outputs(data.classes),
    }
    head = extras_of("model", config.model).head
    # A head that is replaced may have been made for other classes.
    _check_against_data("model", config.model, facts if head is None else facts | {"num_classes": None})
    node = _with_facts(values, "model", facts)
    model: nn.Module = build("model", node, facts=facts, fetch=fetch_weights)
    if head is not None:
        give_head(model, head, facts["num_classes"], image())
    return task, model


def _check_against_data(key: str, node: dict[str, Any], facts: dict[str, Any]) -> None:
    for name, fact in facts.items():
        given = node.get(name)
        if given is not None and fact is not None and _plain(given) != _plain(fact):
            raise UserError(
                f"{key}.{name}: is {given}, but the data says {fact}\n"
                f"    allowed: {key}.{name}=null to take it from the data, or other data"
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def _with_facts(values: dict[str, Any], key: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Write facts into a component's stored arguments where it lists them as null, so that a checkpoint has them."""
    node: dict[str, Any] = values[key]
    for name, fact in facts.items():
        if name in node and node[name] is None and names_argument(node, name):
            node[name] = _plain(fact)
    return node


def as_given(splits: DataModule, copies: int = 1) -> Tensor:
    """The first training sample as a model is given it, without augmentation: (copies, C, H, W)."""
    image = splits.example[0].expand(copies, *splits.example[0].shape[1:])
    if copies == 1:
        return prepared(splits.train_for_eval.prepare, image)
    return splits.train_for_eval.prepare(image, torch.zeros(copies, dtype=torch.int64, device=image.device), 0)


def prepared(pipeline: Pipeline, images: Tensor) -> Tensor:
    """Images as `transform.eval` and normalisation make them.

    Raises:
        UserError: if a transform cannot take them.
    """
    try:
        return pipeline(images, torch.zeros(len(images), dtype=torch.int64, device=images.device), 0)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise refusal(error) or UserError(
            f"transform.eval: cannot take images of {tuple(images.shape)}: {first_line(error)}\n    allowed: {_BATCHES}"
        ) from error


def probe(task: Task, model: nn.Module, loss: nn.Module, splits: DataModule) -> list[str]:
    """Send one sample through model and loss, so that what does not fit is said before training starts.

    Weights, buffers, modes and random generators are left as they are.

    Returns:
        Names of the BatchNorm layers that get a single value a channel, of which they cannot take the variance.

    Raises:
        UserError: if the model cannot take the images of every split, or the loss cannot take its outputs and the targets.
    """
    target = splits.example[1]
    outputs = task.outputs(splits.classes)
    inputs = as_given(splits)
    with _single_values(model) as single:
        logits = try_forward(model, inputs)
    _probe_other_sizes(model, splits)
    with evaluating(model, loss):
        if not isinstance(logits, Tensor) or tuple(logits.shape) != (1, outputs):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(
                f"model: gives {got} for one image\n    allowed: a tensor of shape (1, {outputs}), one output a class or number"
            )
        _loss_of(task, loss, logits, target)
        evaluated = splits.train_for_eval
        if min(evaluated.loader.batch_size, evaluated.samples) > 1:
            _loss_of(task, loss, torch.cat([logits, logits]), torch.cat([target, target]))
        _probe_training(task, loss, splits, logits)
    _probe_gradient(task, model, loss, splits, bool(single))
    return single


def _loss_of(task: Task, loss: nn.Module, logits: Any, target: Tensor) -> Tensor:
    """The loss of a batch.

    Raises:
        UserError: if the loss fails, or gives anything but a tensor without dimensions.
    """
    try:
        value = loss(logits, task.targets(target))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise refusal(error) or UserError(
            f"loss: {first_line(error)}\n    allowed: a loss that fits the task and its targets"
        ) from error
    if not isinstance(value, Tensor) or value.ndim > 0:
        kind = "None" if value is None else f"a {type(value).__name__}"
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{kind}, which is no tensor"
        count = f"{len(target)} sample{'s' if len(target) > 1 else ''}"
        raise UserError(f"loss: gives {got}, for {count}\n    allowed: a tensor of shape (), the mean over the samples")
    return value


def _probe_gradient(task: Task, model: nn.Module, loss: nn.Module, splits: DataModule, single: bool) -> None:
    """Compute the loss of two samples as training does, where a batch has two, to see that it has a gradient.

    Args:
        task: the task.
        model: the model.
        loss: the loss.
        splits: the data.
        single: whether BatchNorm layers cannot take one sample.

    Raises:
        UserError: if the model does not give one row for each sample, or the loss has no gradient or several values.
    """
    copies = min(2, splits.train.loader.batch_size, splits.train.samples)
    if copies == 1 and single:
        return  # see `check_batches_of_one`
    images, target = as_given(splits, copies), splits.example[1]
    target = target.expand(copies, *target.shape[1:])
    with _training(model, loss):
        try:
            if splits.train.mix is not None:
                places = torch.zeros(copies, dtype=torch.int64, device=images.device)
                images, target = splits.train.mix(images, target, places, 0)
            logits = model(images)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return  # some models take only larger batches
        if isinstance(logits, Tensor) and (logits.ndim == 0 or len(logits) != copies):
            raise UserError(
                f"model: gives {tuple(logits.shape)} in training for a batch of {copies}\n"
                f"    allowed: one row for each image, ({copies}, {task.outputs(splits.classes)})"
            )
        value = _loss_of(task, loss, logits, target)
        if value.requires_grad or not any(parameter.requires_grad for parameter in model.parameters()):
            return
    detached = isinstance(logits, Tensor) and not logits.requires_grad
    key, what = ("model", "its outputs have") if detached else ("loss", "its value has")
    raise UserError(
        f"{key}: {what} no gradient, so nothing can be trained\n"
        f"    allowed: a {key} without detach(), no_grad() or item() on the way from the weights to the loss"
    )


@contextlib.contextmanager
def _training(model: nn.Module, loss: nn.Module) -> Iterator[None]:
    """Training mode with gradients; afterwards model, loss and random generators are as before."""
    # Some models keep their last outputs as attributes, and a tensor with a graph cannot be copied for an average.
    kept = [(module, dict(vars(module))) for module in (*model.modules(), *loss.modules())]
    try:
        with no_trace(model, loss), torch.enable_grad():
            model.train()
            yield
    finally:
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)


@contextlib.contextmanager
def _single_values(model: nn.Module) -> Iterator[list[str]]:
    """Gives a list that names of BatchNorm layers are added to as they are called with a single value a channel."""
    found: list[str] = []

    def look(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim > 1 and args[0].numel() == args[0].shape[1]:
            found.append(name)

    handles = [
        module.register_forward_pre_hook(functools.partial(look, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _probe_other_sizes(model: nn.Module, splits: DataModule) -> None:
    """Send an image of each split whose images have another size than those of the training split through the model."""
    size = splits.example[0].shape[-2:]
    for name, (image, _) in splits.examples.items():
        split = splits.eval_split(name)
        if split is None or image.shape[-2:] == size:
            continue
        try:
            images = image[None].to(splits.example[0].device)
            try_forward(model, split.prepare(images, torch.zeros(1, dtype=torch.int64, device=images.device), 0))
        except UserError as error:
            shapes = ["x".join(map(str, shape)) for shape in (image.shape[-2:], size)]
            raise UserError(
                f"data.dataset: images of '{name}' are {shapes[0]}, and those of 'train' {shapes[1]}: {error}\n"
                "    allowed: images of one size in every split, as data.image_size or a sample transform makes them"
            ) from error


def check_batches_of_one(model: nn.Module, single: Sequence[str], plan: EpochPlan) -> None:
    """Refuse batches of one sample where BatchNorm layers would get a single value a channel.

    Args:
        model: the model, frozen as it will be.
        single: what `probe` has found.
        plan: the batches of an epoch.

    Raises:
        UserError: if there are such batches and layers.
    """
    if not single or plan.size(plan.batches - 1) != 1:
        return
    model.train()  # as training does; a model of the user's may keep some layers from it
    for name in single:
        norm = model.get_submodule(name)
        trained = [parameter.requires_grad for parameter in norm.parameters()]
        if norm.training and (any(trained) or not trained):
            which = "every batch" if plan.batch_size == 1 else "the last batch of an epoch"
            raise UserError(
                f"data.batch_size: {which} has 1 sample, and {type(norm).__name__} '{name}' needs at least two values a "
                "channel in training\n    allowed: data.drop_last=true, or another data.batch_size"
            )


def _probe_training(task: Task, loss: nn.Module, splits: DataModule, logits: Tensor) -> None:
    """Send the sample through what is done to samples in training alone: augmentation, and targets that are blended."""
    image, target = splits.example
    places = torch.zeros(1, dtype=torch.int64, device=image.device)
    try:
        images = splits.train.prepare(image, places, 0)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise refusal(error) or UserError(
            f"transform.train: cannot take images of {tuple(image.shape)}: {first_line(error)}\n    allowed: {_BATCHES}"
        ) from error
    if splits.train.mix is None:
        return
    try:
        loss(logits, task.targets(splits.train.mix(images, target, places, 0)[1]))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"transform.mix: gives targets that task and loss cannot take: {first_line(error)}\n"
            "    allowed: transform.mix=null, or a loss of probabilities such as loss=cross_entropy"
        ) from error


def place(model: nn.Module, loss: nn.Module, device: torch.device, channels_last: bool) -> None:
    """Move model and loss to the device, weights in the memory layout that the images come in."""
    model.to(device)
    loss.to(device)
    if channels_last:
        model.to(memory_format=torch.channels_last)
