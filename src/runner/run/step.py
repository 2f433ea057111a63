"""How a training step is computed: the loss that a task defines, and the step that the config asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.config import keys
from runner.config.schema.train import Train
from runner.config.schema.verbs import Profile
from runner.distributed.sharding import is_sharded
from runner.distributed.world import world
from runner.engine.nonfinite import NonFiniteGuard
from runner.engine.plan import Position
from runner.engine.rank_step import RankStep, RankWindowStep
from runner.engine.state import Optimizers, TrainState
from runner.engine.step import AdaptiveClip, Step, Supervised, WindowStep, needs_window
from runner.optim.kernels import plain_step
from runner.run.interfaces import takes
from runner.run.model import model_of, modules_of, optimizers_of
from runner.run.run import Hardware
from runner.runtime.toggles import Toggled
from runner.tasks.task import STEPS, Progress, Task

_RESERVED = ("loss", "lr", "samples_per_s", "data_wait", "global_step", "epoch", "split")  # other columns of the log


class TaskSteps:
    """The steps that a task computes itself; where it defines only one of them, the other is that of `Supervised`."""

    def __init__(self, task: Any, model: nn.Module, loss: nn.Module, progress: Callable[[], Progress]) -> None:
        self.modules, self._task, self.name = modules_of(model, loss), task, type(task).__name__
        self._supervised = Supervised(self.modules["model"], loss, task.targets)
        self.terms: dict[str, Tensor] = {}  # further scalars of the last batch
        self._progress, self._told = progress, [name for name in STEPS if takes(task, name, "progress")]

    def call(self, name: str, *given: Any) -> Any:
        """Call a method of the task, and tell it how far training is if it takes that."""
        told = {"progress": self._progress()} if name in self._told else {}
        return getattr(self._task, name)(*given, **told)

    def __call__(self, data: Any) -> Tensor:
        """The mean loss of a batch, as the task computes it."""
        self.terms = {}
        if _has(self._task, "optimizer_steps"):
            return sum((loss for _, _, loss, _ in self.alternate([data])), torch.zeros(()))
        if not _has(self._task, "training_step"):
            return self._supervised(data)
        loss, self.terms = _loss_and_terms(self.call("training_step", self.modules, data), "training_step")
        return loss

    def alternate(self, window: Sequence[Any]) -> Iterator[tuple[int, str, Tensor, dict[str, Tensor]]]:
        """Number of a batch of the window, name of an optimizer, its loss, and scalars to log: those of each batch in turn."""
        names = optimizers_of(self._task, self.modules)
        running = [self.call("optimizer_steps", self.modules, data) for data in window]
        while True:
            first = ""
            for place, losses in enumerate(running):
                step = next(losses, ("", None))
                if not isinstance(step, tuple) or len(step) != 2 or step[0] not in ("", *names):
                    got = f"'{step[0]}'" if isinstance(step, tuple) and step else f"a {type(step).__name__}"
                    allowed = f"one of {', '.join(names)}, and its loss: yield name, loss"
                    raise UserError("task", f"its optimizer_steps yields {got}", allowed)
                name = step[0]
                if place and name != first:
                    problem = f"its optimizer_steps yields '{name}' for one batch of a window and '{first}' for another"
                    raise UserError("task", problem, "the same optimizers for every batch, or accumulate=1")
                first = name
                if name:
                    loss, terms = _loss_and_terms(step[1], "optimizer_steps")
                    yield place, name, loss, {name: loss.detach(), **terms}
            if not first:
                return

    def feed(self, data: Any) -> None:
        """Send a batch through the modules."""
        self.evaluated(data)

    def evaluated(self, data: Any) -> Mapping[str, Any]:
        """What the task evaluates of a batch, see `runner.engine.evaluation.evaluate`."""
        if not _has(self._task, "evaluation_step"):
            return self._supervised.evaluated(data)
        found: Any = self._task.evaluation_step(self.modules, data)
        if not isinstance(found, Mapping):
            problem = f"its evaluation_step gives a {type(found).__name__}"
            raise UserError(
                "task", problem, "a dict of loss, outputs and targets, or of some of them, and of further scalars"
            )
        means = {name: value for name, value in found.items() if name not in ("outputs", "targets")}
        checked = _scalars(means, "evaluation_step", ("weight", *self._task.metric_names()))
        if "loss" in means:
            checked["loss"] = scalar("task", "its evaluation_step gives", means["loss"])
        counted = {"weight": self._task.weight(data)} if _has(self._task, "weight") else {}
        return {**counted, **found, **checked}


def _loss_and_terms(given: Any, step: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss that a step gives, which must be a tensor without dimensions, and the further scalars if it is a dict."""
    if not isinstance(given, Mapping):
        return scalar("task", f"its {step} gives", given), {}
    terms = {name: value.detach() for name, value in _scalars(given, step).items()}
    return scalar("task", f"its {step} gives", given.get("loss")), terms


def _scalars(given: Mapping[str, Any], step: str, taken: Sequence[str] = ()) -> dict[str, Tensor]:
    """The further scalars beside the loss, which have no name that is reserved or taken."""
    reserved, found = (*_RESERVED, *taken), dict[str, Tensor]()
    for name, value in given.items():
        if name == "loss":
            continue
        if name in reserved:
            raise UserError("task", f"its {step} gives '{name}'", f"another name than {', '.join(reserved)}")
        if isinstance(value, Tensor) and (value.ndim or value.is_complex()):
            kind = f"of shape {tuple(value.shape)}" if value.ndim else "that is complex"
            raise UserError("task", f"its {step} gives '{name}' {kind}", "a scalar, the mean over the batch")
        if not isinstance(value, Tensor | float | int):
            raise UserError(
                "task", f"its {step} gives '{name}' as a {type(value).__name__}", "a scalar tensor or a number"
            )
        found[str(name)] = torch.as_tensor(value)
    return found


def scalar(key: str, gives: str, loss: Any) -> Tensor:
    """The loss of a batch, which must be a tensor without dimensions; `key` and `gives` say what gave it."""
    if isinstance(loss, Tensor) and not loss.ndim:
        return loss
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise UserError(key, f"{gives} {got} as the loss", "a tensor of shape (), the mean of the batch")


def _has(task: Any, name: str) -> bool:
    return callable(getattr(task, name, None))


def steps_of(task: Any, model: nn.Module, loss: nn.Module, total: int, at: Callable[[], Position] = Position) -> Any:
    """How the loss and the outputs of a batch are computed, in a run of `total` optimizer steps, by default at its start.

    `model` is what `build_modules` returned.
    """
    if any(_has(task, name) for name in STEPS):
        return TaskSteps(task, model, loss, lambda: Progress(at().global_step, total, at().epoch))
    return Supervised(model, loss, task.targets)


def build_step(
    config: Train, state: TrainState, task: Task, loss: nn.Module, *, hardware: Hardware, toggled: Toggled, total: int
) -> Step:
    """What trains on a batch: a step of its own where the optimizer needs whole windows, and where several ranks train.

    Raises:
        UserError: if a setting cannot be combined with the steps of the task, the optimizer or the ranks.
    """
    # Model and loss together: a loss with weights is guarded as the model is
    grad_clip, trained, after_step = config.grad_clip, nn.ModuleList([state.model, state.loss]), None
    steps = steps_of(task, state.model, loss, total, lambda: state.position)
    if isinstance(steps, TaskSteps):
        if config.compile == "step":
            raise UserError("compile", "is step, and the task computes its steps itself", "true: compiles the model")
        state.has_terms = True
        if _has(task, "after_step"):
            after_step = functools.partial(steps.call, "after_step", steps.modules)
    kind: Callable[..., Step] = Step
    if needs_window(state.optimizer):
        _check_window(config, state)
        kind = WindowStep if world().size == 1 else RankWindowStep
    elif world().size > 1:
        if is_sharded(state.model) and any(weight.requires_grad for weight in loss.parameters()):
            why = "has parameters, which strategy=fsdp does not train"
            raise UserError("loss", why, "strategy=ddp, or another loss")
        kind = functools.partial(RankStep, find_unused=config.dist.find_unused_parameters)
    return kind(
        state,
        steps,
        compiled=toggled.objective_of(task.targets),
        weight_of=_weight_of(config, task, model_of(state.model)),
        autocast=hardware.precision.autocast,
        clip_norm=grad_clip.norm,
        clip_value=grad_clip.value,
        clip_adaptive=AdaptiveClip(state.model, grad_clip.agc) if grad_clip.agc is not None else None,
        guard=NonFiniteGuard(trained, state.optimizer, config.on_nonfinite, scaled=state.scaler is not None),
        optimizer_step=plain_step(state.optimizer),
        after_step=after_step,
    )


def _weight_of(config: Train, task: Any, model: Any) -> Callable[[Any], Any] | None:
    """What counts the data of a batch for the mean over micro-batches and ranks; None for the number of samples."""
    if _has(task, "weight"):
        return task.weight  # type: ignore[no-any-return]
    divided = config.accumulate > 1 or world().size > 1  # else gradients stay bit-identical
    return model.loss_count if divided and _has(model, "loss_count") else None


def _check_window(config: Train, state: TrainState) -> None:
    """Raise `UserError` if a setting does not go with `WindowStep`."""
    several = isinstance(state.optimizer, Optimizers)
    why = "there are several optimizers" if several else f"{type(state.optimizer).__name__} computes the loss itself"
    if isinstance(config, Profile):
        raise UserError(
            "optimizer", f"{why}, and this verb measures updates of one kind", "train, bench, eval or check"
        )
    for name, each in state.optimizer.named.items() if isinstance(state.optimizer, Optimizers) else ():
        if needs_window(each):
            raise UserError(f"optimizer.{name}", f"is {type(each).__name__}, which computes the loss itself")
    for key, given, allowed in (
        ("compile", config.compile == "step", "true or false"),
        ("strategy", config.strategy == "fsdp" and world().size > 1, "ddp"),
        ("sync_batchnorm", config.sync_batchnorm and world().size > 1, "false"),
        ("amp", not several and state.scaler is not None, "bf16 or false"),
        ("on_nonfinite", not several and config.on_nonfinite == "skip", "raise"),
    ):
        if given:
            raise UserError(key, f"is {str(keys.at(keys.to_plain(config), key)).lower()}, and {why}", allowed)


def slow_guard(step: Step, hardware: Hardware) -> list[str]:
    """A warning if the guard makes every step wait for the device."""
    if step.guard is None or not step.guard.waits or hardware.device.type == "cpu":
        return []
    lack = f"{type(step.state.optimizer).__name__} has no fused kernel that skips steps whose gradients are not finite"
    return [f"every step waits for the {hardware.device.type} device: {lack}"]
