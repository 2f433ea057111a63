"""Everything about a run that changes while it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from runner.distributed.sharding import divided_like, loaded
from runner.distributed.world import world
from runner.engine.freezing import Freezing
from runner.engine.plan import Best, Position
from runner.engine.protocols import Schedule
from runner.engine.weight_average import AveragedModel
from runner.instrument.nested import kind_of, named_tensors

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg")


class RunningMean:
    """Mean of a loss over samples, summed on the device and read only on request.

    Where several ranks train, the mean is over the samples of all, and all have to read, save and load it together.

    Args:
        device: of the loss.
        finite_only: skip losses that are not finite.
        dtype: of the sum.
    """

    def __init__(self, device: torch.device, finite_only: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype, self.finite_only = device, dtype, finite_only
        self._sum = torch.zeros((), dtype=dtype, device=device)
        self._samples = 0
        self._skipped = torch.zeros((), dtype=torch.int64, device=device) if finite_only else None

    def add(self, loss: torch.Tensor, samples: int) -> None:
        """Add the mean `loss` of `samples` samples."""
        loss = loss.detach()
        if self._skipped is not None:
            finite = loss.isfinite()
            self._skipped.add_(~finite, alpha=samples)
            loss = torch.where(finite, loss, torch.zeros_like(loss))
        self._sum.add_(loss, alpha=samples)
        self._samples += samples

    def read(self, empty: Any = 0.0) -> Any:
        """The mean since `reset` as a float, or `empty` over no samples; waits for the device."""
        total, samples = self._totals()
        return float(total) / samples if samples else empty

    def reset(self) -> None:
        """Start again from zero."""
        self._sum.zero_()
        self._samples = 0
        if self._skipped is not None:
            self._skipped.zero_()

    def _totals(self) -> tuple[torch.Tensor, int]:
        """Sum and samples of all ranks, without those that were skipped."""
        if self._skipped is not None:
            self._samples -= int(self._skipped)
            self._skipped.zero_()
        if world().size == 1:
            return self._sum.clone(), self._samples
        both = self._sum.new_tensor([0.0, self._samples], dtype=torch.float64)
        both[0] = self._sum
        both = world().total(both)
        return both[0].to(self._sum.dtype), int(both[1])

    def state_dict(self) -> dict[str, Any]:
        """Sum and count; the sum is copied."""
        total, samples = self._totals()
        return {"sum": total, "samples": samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.reset()
        if world().first:
            self._sum.copy_(state["sum"])
            self._samples = state["samples"]


class Optimizers(torch.optim.Optimizer):
    """Optimizers by name, whose parameter groups and moments are saved, scheduled and shown like those of one.

    Each of their groups has its optimizer's name under `optimizer`. A step is taken with one of `named` at a time.
    """

    def __init__(self, named: Mapping[str, torch.optim.Optimizer]) -> None:
        self.named = dict(named)
        for name, each in named.items():
            for group in each.param_groups:
                group["optimizer"] = name
        super().__init__([group for each in named.values() for group in each.param_groups], {})
        for each in named.values():
            self.state.update(each.state)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let each optimizer work on its groups, and on the moments of all."""
        groups = iter(self.param_groups)
        for each in self.named.values():
            own = list(islice(groups, len(each.param_groups)))
            each.__setstate__({"state": self.state, "param_groups": own})

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Call a function before each step of any of them; the handle that is returned has `remove()`."""
        handles = contextlib.ExitStack()
        for each in self.named.values():
            handles.callback(each.register_step_pre_hook(hook).remove)
        return SimpleNamespace(remove=handles.close)


class Schedules:
    """Schedules by the name of the optimizer whose rates they are; as one schedule, it is the first of them."""

    def __init__(self, named: Mapping[str, Schedule]) -> None:
        self.named = dict(named)

    def factor(self, step: int) -> float:
        """The multiple of the first optimizer's rates."""
        return next(iter(self.named.values())).factor(step)

    def observe(self, metric: float) -> None:
        """Tell all of them the monitored metric."""
        for each in self.named.values():
            each.observe(metric)

    def state_dict(self) -> dict[str, Any]:
        """Their states by name."""
        return {name: each.state_dict() for name, each in self.named.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved states."""
        for name, each in self.named.items():
            each.load_state_dict(state.get(name, {}))


@dataclass
class TrainState:
    """The objects that training changes; saved and restored together."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: torch.amp.GradScaler | None
    meter: RunningMean
    position: Position = field(default_factory=Position)
    best: Best | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)
    averaged: AveragedModel | None = None
    has_terms: bool = False  # whether the task may give any
    terms: dict[str, RunningMean] = field(default_factory=dict)  # further scalars of a task's step, by name
    loss: nn.Module = field(default_factory=nn.Identity)  # most have no tensors
    task: Any = None  # its state is saved if it has a `state_dict`
    freezing: Freezing = field(init=False)

    def __post_init__(self) -> None:
        self.freezing = Freezing(self.model)

    def train(self) -> None:
        """Put the model into training mode for the next step, except for what is frozen."""
        self.freezing.train(self.position)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of the model, and those of the loss as `loss.NAME`."""
        yield from self.model.named_parameters()
        yield from self.loss.named_parameters("loss")

    def add_terms(self, terms: Mapping[str, torch.Tensor], samples: int) -> None:
        """Add scalars of a batch of so many samples to their running means."""
        for name, value in terms.items():
            self._term(name).add(value, samples)

    def _term(self, name: str) -> RunningMean:
        if name not in self.terms:
            self.terms[name] = RunningMean(self.meter.device, self.meter.finite_only, self.meter.dtype)
        return self.terms[name]

    def same_terms(self) -> dict[str, RunningMean]:
        """The terms by name, in one order and with the same names on every rank; all ranks have to call this."""
        names = {name for names in world().gather(list(self.terms)) for name in names} if self.has_terms else ()
        return {name: self._term(name) for name in sorted(names)}

    def set_learning_rate(self) -> None:
        """Set each group's learning rate for the next step."""
        schedule, step = self.schedule, self.position.global_step
        factor = schedule.factor(step)
        for group in self.optimizer.param_groups:
            if isinstance(schedule, Schedules):
                factor = schedule.named[group["optimizer"]].factor(step)
            group["lr"] = group["initial_lr"] * factor

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain containers under the names that a checkpoint has; `loss` only if it has tensors."""
        loss, terms = self.loss.state_dict(), self.same_terms()
        return ({"loss": loss} if loss else {}) | {
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
                **({"terms": {name: mean.state_dict() for name, mean in terms.items()}} if terms else {}),
                **({"task": self.task.state_dict()} if hasattr(self.task, "state_dict") else {}),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; `ValueError` if weights or optimizer groups do not match."""
        # Weights come before the average, which begins as a copy of them.
        load_weights(self.model, state["model"])
        if saved := state.get("loss"):
            load_weights(self.loss, saved, "loss")
        load_task(self.task, state)
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        load_optimizer(self.optimizer, state["optimizer"])
        # Schedule and scaler have counters that the position alone does not tell
        self.schedule.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        # The turns are those of the current run: its epochs may be longer than those of the run that was saved.
        self.position = Position(**{**state["position"], "turns": self.position.turns})
        best = state["metrics"]["best"]
        self.best = Best(**best) if best else None
        self.last_metrics = dict(state["metrics"]["last"])
        self.meter.load_state_dict(state["metrics"]["train"])
        self.terms = {}
        for name, saved in state["metrics"].get("terms", {}).items():
            self._term(name).load_state_dict(saved)


def not_finite(contents: Mapping[str, Any], never_finite: Collection[str] = ()) -> str:
    """Name of the first tensor in the state dicts `model`, `loss` and `optimizer` that is not finite, or ""; waits for the device.

    Tensors of model and loss named in `never_finite`, such as a mask of infinities, do not count.
    """
    found = list(named_tensors(contents["model"]))
    found += [named for part in ("loss", "optimizer") for named in named_tensors(contents.get(part), part)]
    named = [(name, tensor) for name, tensor in found if tensor.is_floating_point() and name not in never_finite]
    if not named:
        return ""
    # One flag for all of them, because reading each would wait.
    flags = torch.stack([tensor.isfinite().all().to(named[0][1].device) for _, tensor in named])
    return "" if bool(flags.all()) else named[int(flags.int().argmin())][0]


def load_weights(model: nn.Module, weights: dict[str, Any], what: str = "model") -> None:
    """Load a complete state dict; `ValueError` names the first tensors that do not fit, and `what` they do not fit."""
    own = model.state_dict()
    both = [(name, weights[name], own[name]) for name in own if name in weights]
    # All problems at once, as one mistake usually causes many
    problems = {
        "missing": [name for name in own if name not in weights],
        "unexpected": [name for name in weights if name not in own],
        "of another shape": [
            f"{name} {tuple(saved.shape)} for {tuple(now.shape)}"
            for name, saved, now in both
            if saved.shape != now.shape
        ],
        "of another kind": [
            f"{name} {saved.dtype} for {now.dtype}" for name, saved, now in both if kind_of(saved) != kind_of(now)
        ],
    }
    if any(problems.values()):
        raise ValueError(f"the checkpoint's tensors are not those of this {what}: {list_problems(problems)}")
    # Some models, such as MNASNet, refuse a state dict without version metadata, which a checkpoint does not keep.
    own.update({name: divided_like(value, own[name]) for name, value in weights.items()})
    model.load_state_dict(own)


def load_task(task: Any, contents: Mapping[str, Any]) -> None:
    """Let a task go on from its state in a checkpoint, if it has one; `ValueError` if the task cannot load it."""
    if "task" not in contents["metrics"] or not hasattr(task, "load_state_dict"):
        return
    try:
        task.load_state_dict(contents["metrics"]["task"])
    except Exception as error:  # of a custom class, or of a state in a file from somebody else
        raise ValueError(f"the task {type(task).__name__} cannot load its state: {error or type(error)}") from error


def list_problems(names: Mapping[str, Sequence[str]]) -> str:
    """The number of tensors with each problem, and the first names: `2 missing (a, b); 1 unexpected (c)`."""
    return "; ".join(
        f"{len(some)} {problem} ({', '.join(some[:3])}{', ...' if len(some) > 3 else ''})"
        for problem, some in names.items()
        if some
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's moments and counters, and keep the settings that it was built with.

    Raises:
        ValueError: if the parameter groups do not match, or moments have another shape or kind of values than their weights.
    """
    # A learning rate that the command line changed has to survive the load; timm's LAMB counts its steps in the group
    counted = ("params", "step")
    settings = [{key: value for key, value in group.items() if key not in counted} for group in optimizer.param_groups]
    groups, moments = state["param_groups"], dict(state["state"])
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    if sizes == own_sizes:  # else torch refuses them
        # load_state_dict places the step counters by these settings: fused kernels need them on the device.
        groups = [{**saved, **own} for saved, own in zip(groups, settings, strict=True)]
        for group, own in zip(groups, optimizer.param_groups, strict=True):
            for number, weight in zip(group["params"], own["params"], strict=True):
                if number in moments:
                    found = moments[number].items()
                    fused = bool(own.get("fused"))
                    moments[number] = {name: _fitting(name, value, weight, fused) for name, value in found}
        known = {number for group in groups for number in group["params"]}
        for number, kept in moments.items():
            for name, value in () if number in known else kept.items():
                if isinstance(value, torch.Tensor) and (name in _MOMENTS or value.numel() != 1):
                    raise ValueError(f"the optimizer's {name} belongs to weight {number!r}, which does not exist")
    optimizer.load_state_dict({**state, "state": moments, "param_groups": groups})
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _fitting(name: str, value: Any, weight: torch.Tensor, fused: bool) -> Any:
    """A value that an optimizer keeps for a weight, divided among the ranks and laid out as the weight is.

    A fused kernel walks through weight and moments by address and checks no shapes: moments of another shape would make it
    write out of bounds, those of another memory layout pair the wrong numbers.
    """
    value = loaded(value)
    if not isinstance(value, torch.Tensor):
        return value
    if name in _MOMENTS and kind_of(value) != kind_of(weight):
        raise ValueError(f"the optimizer's {name} is {value.dtype}, and its weight {weight.dtype}")
    if value.shape == weight.shape:
        value = divided_like(value, weight)
        return value if value.stride() == weight.stride() else torch.empty_like(weight, dtype=value.dtype).copy_(value)
    if name in _MOMENTS or (fused and value.numel() != 1):
        raise ValueError(
            f"the optimizer's {name} has the shape {tuple(value.shape)} for a weight of {tuple(weight.shape)}"
        )
    return value
