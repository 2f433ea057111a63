"""How a training step is computed: its parts, its guard against gradients that are not finite, and the function itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from runner.base.errors import UserError
from runner.config.schema.train import Train
from runner.config.schema.verbs import FindLr
from runner.engine.clipping import AdaptiveClip
from runner.engine.nonfinite import NonFiniteGuard
from runner.engine.oom_retry import OOMRetryStep
from runner.engine.state import TrainState
from runner.engine.step import StepConfig, StepFunction, Supervised, loss_of, train_step
from runner.optim.kernels import plain_step
from runner.run.hardware import Hardware
from runner.run.model import modules_of
from runner.runtime.determinism import caller_in_backward, operation, refusal
from runner.runtime.toggles import Toggled
from runner.tasks.task import STEPS, Task


class TaskSteps:
    """The steps that a task computes itself; where it defines only one of them, the other is that of `Supervised`."""

    def __init__(self, task: Any, model: nn.Module, loss: nn.Module) -> None:
        self.modules, self._task = modules_of(model, loss), task
        self._supervised = Supervised(self.modules["model"], loss, task.targets)
        self.terms: dict[str, Tensor] = {}  # further scalars of the last batch

    def __call__(self, data: Any) -> Tensor:
        """The mean loss of a batch, as the task computes it."""
        if not hasattr(self._task, "training_step"):
            return self._supervised(data)
        found = self._task.training_step(self.modules, data)
        if isinstance(found, Mapping):
            self.terms = {name: value.detach() for name, value in found.items() if name != "loss"}
            found = found["loss"]
        loss: Tensor = found
        return loss

    def feed(self, data: Any) -> None:
        """Send a batch through the modules."""
        self.evaluated(data)

    def evaluated(self, data: Any) -> Mapping[str, Any]:
        """What the task evaluates of a batch, see `runner.engine.evaluation.evaluate`."""
        if not hasattr(self._task, "evaluation_step"):
            return self._supervised.evaluated(data)
        found: Mapping[str, Any] = self._task.evaluation_step(self.modules, data)
        counted = {"weight": self._task.weight(data)} if hasattr(self._task, "weight") else {}
        return {"outputs": (), "targets": (), **counted, **found}


def steps_of(task: Any, model: nn.Module, loss: nn.Module) -> Supervised | TaskSteps:
    """How the loss and the outputs of a batch are computed; `model` is what `build_modules` returned."""
    if any(hasattr(task, name) for name in STEPS):
        return TaskSteps(task, model, loss)
    return Supervised(model, loss, task.targets)


def build_parts(
    config: Train, state: TrainState, task: Task, loss: nn.Module, *, hardware: Hardware, toggled: Toggled
) -> StepConfig:
    """What a step consists of."""
    # Model and loss together: a loss with weights is guarded as the model is
    grad_clip, trained = config.grad_clip, nn.ModuleList([state.model, state.loss])
    steps = steps_of(task, state.model, loss)
    if isinstance(steps, TaskSteps):
        _check_supported(config)
    return StepConfig(
        objective=steps,
        autocast=hardware.precision.autocast,
        clip_norm=grad_clip.norm,
        clip_value=grad_clip.value,
        clip_adaptive=AdaptiveClip.of(state.model, grad_clip.agc) if grad_clip.agc is not None else None,
        weight=getattr(task, "weight", None),
        equivalent=toggled.objective_of(task.targets),
        guard=NonFiniteGuard(trained, state.optimizer, config.on_nonfinite, scaled=state.scaler is not None),
        optimizer_step=plain_step(state.optimizer),
    )


def _check_supported(config: Train) -> None:
    """Raise `UserError` if a verb or a setting computes the loss from the outputs of the model, which the task does itself."""
    if config.compile == "step":
        raise UserError("compile", "is step, and the task computes its steps itself", "true, which compiles the model")
    if type(config) not in (Train, FindLr):
        problem = "computes its steps itself, and this verb computes the loss from the outputs of the model"
        raise UserError("task", problem, "train, eval, find-lr or predict")


def slow_guard(parts: StepConfig, state: TrainState, hardware: Hardware) -> list[str]:
    """A warning if the guard makes every step wait for the device."""
    if parts.guard is None or not parts.guard.waits or hardware.device.type == "cpu":
        return []
    lack = f"{type(state.optimizer).__name__} has no fused kernel that skips steps whose gradients are not finite"
    return [f"every step waits for the {hardware.device.type} device: {lack}"]


def build_step(config: Train, batch_size: int) -> StepFunction:
    """What trains on a batch: `train_step`, or one that retries with micro-batches or names nondeterministic operations."""
    step: StepFunction = OOMRetryStep(batch_size) if config.on_oom == "split" else train_step
    # Only deterministic=true refuses operations, so no other run pays for naming them
    if config.deterministic is not True:
        return step

    def naming_operations(
        state: TrainState, parts: StepConfig, batch: Any, weight: float, samples: int, *, update: bool
    ) -> None:
        """A step that names the module whose backward pass `deterministic=true` refuses, instead of torch's error."""
        try:
            step(state, parts, batch, weight, samples, update=update)
        except RuntimeError as error:
            # In a forward pass the stack names the module; the modules of a compiled graph cannot be told apart.
            if not operation(str(error)) or parts.equivalent is not None:
                raise
            forward = functools.partial(loss_of, parts, batch.data)
            try:
                caller = caller_in_backward(state.model, forward)
            except RuntimeError:  # the operation is in the forward pass
                caller = ""
            named = refusal(error, caller)
            assert named is not None, "the error is about such an operation"
            raise named from error

    return naming_operations
