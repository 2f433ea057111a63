"""Everything about a run that changes while it trains."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from runner.engine.freezing import Freezing
from runner.engine.weight_average import AveragedModel


class Schedule(Protocol):
    """Learning rate as a multiple of each parameter group's `initial_lr`."""

    def factor(self, step: int) -> float:
        """The multiple for optimizer step number `step`, from 0."""
        ...

    def observe(self, metric: float) -> None:
        """Take note of an evaluation."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs; empty for a pure function of the step."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        ...


@dataclass
class Position:
    """Where training stands, always at a boundary between optimizer steps.

    Attributes:
        epoch: epochs completed.
        batch: batches done of the epoch under way.
        micro_batch: batches accumulated for the step under way; 0, as states are saved between steps.
        global_step: optimizer steps done.
        evaluation_due: the validation split is to be evaluated before going on.
        left_out: numbers of the optimizer steps, from 1, that are not trained on as their gradients are not finite.
        pieces: parts that each batch is trained on in, one after the other, since memory did not suffice for fewer.
        turns: [step, epoch] pairs at which the number of steps of an epoch changed, see `runner.engine.plan.Timeline`.
    """

    epoch: int = 0
    batch: int = 0
    micro_batch: int = 0
    global_step: int = 0
    evaluation_due: bool = False
    left_out: list[int] = field(default_factory=list)
    pieces: int = 1
    turns: list[list[int]] = field(default_factory=list)


@dataclass
class Best:
    """The best evaluation so far."""

    metric: str
    mode: str
    value: float
    loss: float
    global_step: int
    epoch: int

    def beaten_by(self, value: float, loss: float) -> bool:
        """Whether another evaluation is better; of equal values, the one with the lower loss is."""
        if value == self.value:
            return loss < self.loss
        return value > self.value if self.mode == "max" else value < self.value


class RunningMean:
    """Mean of a loss over samples, summed on the device and read only when asked."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), device=device)
        self._samples = 0

    def add(self, loss: torch.Tensor, samples: int) -> None:
        """Count the mean `loss` of `samples` samples."""
        self._sum.add_(loss.detach(), alpha=samples)
        self._samples += samples

    def read(self) -> float:
        """The mean since `reset`; waits for the device."""
        return float(self._sum) / max(1, self._samples)

    def reset(self) -> None:
        """Start anew."""
        self._sum.zero_()
        self._samples = 0

    def state_dict(self) -> dict[str, Any]:
        """Sum and count; the sum is copied."""
        return {"sum": self._sum.clone(), "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._sum.copy_(state["sum"])
        self._samples = state["samples"]


class FiniteMean(RunningMean):
    """A meter that leaves out losses that are not finite."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, loss: torch.Tensor, samples: int) -> None:
        """Count the mean `loss` of `samples` samples, if it is finite."""
        loss = loss.detach()
        finite = loss.isfinite()
        self._skipped.add_(~finite, alpha=samples)
        super().add(torch.where(finite, loss, torch.zeros_like(loss)), samples)

    def read(self) -> float:
        """The mean since `reset`, 0 if no loss was finite; waits for the device."""
        self._settle()
        return super().read()

    def reset(self) -> None:
        """Start anew."""
        super().reset()
        self._skipped.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Sum and count of the finite losses."""
        self._settle()
        return super().state_dict()

    def _settle(self) -> None:
        self._samples -= int(self._skipped)
        self._skipped.zero_()


@dataclass
class TrainState:
    """The objects that training changes, gathered so that they are saved and restored together."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: torch.amp.GradScaler | None
    meter: RunningMean
    position: Position = field(default_factory=Position)
    best: Best | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)
    averaged: AveragedModel | None = None
    freezing: Freezing = field(init=False)

    def __post_init__(self) -> None:
        self.freezing = Freezing(self.model)

    def train(self) -> None:
        """Put the model into training mode for the next step, but for what is frozen."""
        self.freezing.train(self.position)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain containers under the names that a checkpoint has."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "averaged": self.averaged.state_dict() if self.averaged else None,
            "position": asdict(self.position),
            "metrics": {
                "best": asdict(self.best) if self.best else None,
                "last": dict(self.last_metrics),
                "train": self.meter.state_dict(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            ValueError: if names or shapes of the weights or the optimizer's groups do not fit.
        """
        load_weights(self.model, state["model"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        # The turns are those of the run as it is now: epochs may be longer than in the run that the state is from.
        self.position = Position(**{**state["position"], "turns": self.position.turns})
        best = state["metrics"]["best"]
        self.best = Best(**best) if best else None
        self.last_metrics = dict(state["metrics"]["last"])
        self.meter.load_state_dict(state["metrics"]["train"])

    def not_finite(self) -> str:
        """See `not_finite`."""
        return not_finite({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def set_learning_rate(self) -> None:
        """Set each group's rate for the step that comes next."""
        factor = self.schedule.factor(self.position.global_step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor


def not_finite(contents: Mapping[str, Any], by_design: Collection[str] = ()) -> str:
    """Name of the first tensor of `model` or `optimizer` that is not finite, or an empty string; waits for the device.

    Args:
        contents: state dicts under these names.
        by_design: tensors of the model that never were, such as a mask of infinities.
    """
    found = [*_tensors("", contents["model"]), *_tensors("optimizer", contents["optimizer"])]
    named = [(name, tensor) for name, tensor in found if tensor.is_floating_point() and name not in by_design]
    if not named:
        return ""
    # One answer for all, since each one costs a wait.
    flags = torch.stack([tensor.isfinite().all().to(named[0][1].device) for _, tensor in named])
    return "" if bool(flags.all()) else named[int(flags.int().argmin())][0]


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested mappings and lists, with its dotted place."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(f"{name}.{key}" if name else str(key), item)


def load_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load a state dict, all of it.

    Raises:
        ValueError: naming the first tensors that are missing, unexpected, or of another shape.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    reshaped = [
        f"{name} {tuple(weights[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    complaints = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if names
    ]
    if complaints:
        raise ValueError("the checkpoint's tensors are not those of this model: " + "; ".join(complaints))
    # A checkpoint keeps tensors alone. Some models, such as MNASNet, refuse a state dict without the versions it carries.
    own.update(weights)
    model.load_state_dict(own)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's moments and counters; its settings stay those that it was built with.

    Raises:
        ValueError: if the parameter groups do not fit, or moments have another shape than their weights.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    groups = state["param_groups"]
    if len(groups) == len(settings):
        # Its own settings say where the counter of steps has to be: fused kernels need it on the device.
        groups = [{**saved, **own} for saved, own in zip(groups, settings, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})
    _lay_out_moments(optimizer)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg")


def _lay_out_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give the moments of each weight its layout in memory, once they are known to have its shape.

    A kernel that updates all of it at once walks through weight and moments by address and looks at no shapes: moments of
    another shape would make it write where it must not, those of another layout pair the wrong numbers.

    Raises:
        ValueError: naming what has another shape.
    """
    for weight, moments in optimizer.state.items():
        for name, value in moments.items():
            if not isinstance(value, torch.Tensor) or (name not in _MOMENTS and value.numel() == 1):
                continue
            if value.shape == weight.shape:
                if value.stride() != weight.stride():
                    moments[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
            elif name in _MOMENTS or any(group.get("fused") for group in optimizer.param_groups):
                raise ValueError(
                    f"the optimizer's {name} has the shape {tuple(value.shape)} for a weight of {tuple(weight.shape)}"
                )
