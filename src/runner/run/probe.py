"""A trial of one sample before training: what does not fit is reported before any time is spent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.data.module import DataModule
from runner.engine.freezing import Freezing
from runner.engine.plan import EpochPlan
from runner.instrument.no_trace import evaluating, no_trace
from runner.run.finetune import explaining, try_forward
from runner.run.model import (
    TAKES_BATCHES,
    evaluated_batch,
    example_batch,
    example_input,
    example_targets,
    indices_for,
    model_of,
)
from runner.run.step import TaskSteps, steps_of
from runner.tasks.task import Task


def probe(task: Task, model: nn.Module, loss: nn.Module, data: DataModule, evaluates: bool = True) -> None:
    """Send a few samples through the steps of the task, or one through model and loss.

    Weights, buffers, modes and random generators are left as they are. `evaluates` says whether the run evaluates at all.
    """
    steps = steps_of(task, model, loss)
    if data.trial is not None or isinstance(steps, TaskSteps):
        if evaluates:
            _probe_evaluation(task, steps, model, loss, data)
        _probe_steps(steps, model, loss, data)
        return
    target, outputs, logits = data.example[1], task.outputs(data.classes), try_forward(model, example_input(data))
    # Layers of a fixed input size fail at the first evaluation otherwise, after an epoch of training
    _probe_other_sizes(model, data)
    with evaluating(model, loss):
        if not isinstance(logits, Tensor) or tuple(logits.shape) != (1, outputs):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            allowed = f"a tensor of shape (1, {outputs}), one output per class or number"
            raise UserError("model", f"gives {got} for one image", allowed)
        _loss_of(task, loss, logits, target)
        evaluated = data.train_for_eval
        # A loss may accept one sample and fail on a batch, for example because it squeezes its input
        if min(evaluated.loader.batch_size, evaluated.samples) > 1:
            _loss_of(task, loss, torch.cat([logits, logits]), torch.cat([target, target]))
        _probe_augmentation(task, loss, data, logits)
    # Last, as it is the only step that runs in training mode
    _probe_gradient(task, model, loss, data)


def _probe_evaluation(task: Task, steps: TaskSteps | Any, model: nn.Module, loss: nn.Module, data: DataModule) -> None:
    """Evaluate a few samples."""
    own = hasattr(task, "evaluation_step")
    allowed = "" if own else "evaluation_step(modules, batch), or evaluate.every_epochs=null evaluate.test=false"
    batch, split = evaluated_batch(data), data.val or data.test or data.train_for_eval
    if data.evaluated is not None and (check := getattr(split.loader, "check", None)) is not None:
        check(batch.targets.cpu(), batch.indices.cpu())
    with evaluating(model, loss), explaining("task", "cannot evaluate a batch: ", allowed):
        found = steps.evaluated(batch.data)
    wanted = {"loss": task.monitor == "val/loss", "outputs": bool(task.metric_names())}
    if lacks := [name for name, needed in wanted.items() if needed and name not in found]:
        of = "the monitored metric val/loss" if lacks[0] == "loss" else "its metrics"
        raise UserError("task", f"its evaluation_step gives no {lacks[0]}, which {of} needs", f"{lacks[0]} in the dict")


def _probe_steps(steps: TaskSteps | Any, model: nn.Module, loss: nn.Module, data: DataModule) -> None:
    """Compute the loss of a few samples as in training."""
    batch = (data.trial or example_batch(data, 2)).data
    with _training(model, loss), explaining("task", "cannot train on a batch: "):
        value = steps(batch)
        if not value.requires_grad and any(parameter.requires_grad for parameter in model.parameters()):
            allowed = "a loss without detach(), no_grad() or item() between the weights and itself"
            raise UserError("task", "its loss has no gradient, so nothing can be trained", allowed)


def unsaved(task: Task, changed: list[str]) -> list[str]:
    """A warning about attributes that a step of the task changes and no checkpoint has."""
    if not changed or hasattr(task, "state_dict"):
        return []
    which = (
        f"steps of {type(task).__name__} change its attributes {', '.join(changed)}, which a checkpoint does not have"
    )
    return [f"{which}: keep them in buffers of a module, or define state_dict and load_state_dict"]


class FirstSamples(NamedTuple):
    """Sends copies of the first training samples through the model."""

    task: Task
    model: nn.Module
    loss: nn.Module
    data: DataModule

    def send(self, samples: int) -> Any:
        """Send some as training does; what is returned holds the graph."""
        if self.data.trial is None:
            return model_of(self.model)(example_input(self.data, samples))
        return steps_of(self.task, self.model, self.loss)(example_batch(self.data, samples).data)

    def try_one(self, freezing: Freezing, plan: EpochPlan, ranks: int = 1) -> None:
        """Train on one sample, if the `ranks` that share a batch may get no more: BatchNorm has no variance to compute."""
        # The last batch is the smallest, so it decides
        if plan.size(plan.batches - 1) // ranks > 1:
            return
        which = "every batch" if plan.batch_size // ranks <= 1 else "the last batch of an epoch"
        which += " has 1 sample" if ranks == 1 else f" leaves 1 sample or none to one of {ranks} processes"
        allowed = "data.drop_last=true, or another data.batch_size" + ", or sync_batchnorm=true" * (ranks > 1)
        failed = explaining("data.batch_size", f"{which}, and training on one fails: ", allowed)
        with failed, _training(self.model, self.loss), freezing.as_at(None):  # training everything asks for the most
            steps_of(self.task, self.model, self.loss)(example_batch(self.data, 1).data)


def _loss_of(task: Task, loss: nn.Module, logits: Any, target: Tensor) -> Tensor:
    """The loss of a batch, which must be a tensor without dimensions."""
    with explaining("loss", "", "a loss that fits the task and its targets"):
        value = loss(logits, task.targets(target))
    if not isinstance(value, Tensor) or value.ndim > 0:
        kind = "None" if value is None else f"a {type(value).__name__}"
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{kind}, not a tensor"
        count = f"{len(target)} sample{'s' if len(target) > 1 else ''}"
        raise UserError("loss", f"gives {got}, for {count}", "a tensor of shape (), the mean over the samples")
    return value


def _probe_gradient(task: Task, model: nn.Module, loss: nn.Module, data: DataModule) -> None:
    """Compute the loss of two samples (one, if batches have one) as in training, which must have a gradient."""
    copies = min(2, data.train.loader.batch_size, data.train.samples)
    images, target = example_input(data, copies), example_targets(data, copies)
    with _training(model, loss):
        try:
            if data.train.mix is not None:
                images, target = data.train.mix(images, target, indices_for(images), 0)
            logits = model(images)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return  # some models take only larger batches, see `try_one`
        # Some models return other shapes in training, such as auxiliary outputs or a mean over the batch
        if isinstance(logits, Tensor) and (logits.ndim == 0 or len(logits) != copies):
            problem = f"gives {tuple(logits.shape)} in training for a batch of {copies}"
            raise UserError("model", problem, f"one row for each image, ({copies}, {task.outputs(data.classes)})")
        # Without a gradient, training would run to its end and change nothing
        value = _loss_of(task, loss, logits, target)
        if value.requires_grad or not any(parameter.requires_grad for parameter in model.parameters()):
            return
    # Say which of the two is at fault: the outputs have no gradient, or the loss cuts it off
    detached = isinstance(logits, Tensor) and not logits.requires_grad
    key, what = ("model", "its outputs have") if detached else ("loss", "its value has")
    allowed = f"a {key} without detach(), no_grad() or item() between the weights and the loss"
    raise UserError(key, f"{what} no gradient, so nothing can be trained", allowed)


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


def _probe_other_sizes(model: nn.Module, data: DataModule) -> None:
    """Send an image of each split whose images have another size than those of the training split through the model."""
    sample = data.example[0]
    for name, (image, _) in data.examples.items():
        split = data.eval_split(name)
        if split is None or image.shape[-2:] == sample.shape[-2:]:
            continue
        images = image[None].to(sample.device)
        try:
            try_forward(model, split.prepare(images, indices_for(images), 0))
        except UserError as error:
            own, wanted = ("x".join(map(str, each.shape[-2:])) for each in (image, sample))
            problem = f"images of '{name}' are {own}, and those of 'train' {wanted}: {error}"
            allowed = "images of one size in every split; set data.image_size or a sample transform"
            raise UserError("data.dataset", problem, allowed) from error


def _probe_augmentation(task: Task, loss: nn.Module, data: DataModule, logits: Tensor) -> None:
    """Send the sample through what only training does to it: augmentation and mixing."""
    image, target = data.example
    with explaining("transform.train", f"cannot take images of {tuple(image.shape)}: ", TAKES_BATCHES):
        images = data.train.prepare(image, indices_for(image), 0)
    if data.train.mix is not None:
        allowed = "transform.mix=null, or a loss of probabilities such as loss=cross_entropy"
        with explaining("transform.mix", "gives targets that task and loss cannot take: ", allowed):
            loss(logits, task.targets(data.train.mix(images, target, indices_for(image), 0)[1]))
