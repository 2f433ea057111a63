"""Averages of the weights over training: exponential (EMA), or with equal shares over its last part (SWA)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner.distributed.sharding import divided_like, loaded, local, with_part
from runner.instrument.nested import kind_of
from runner.instrument.no_trace import preserved_buffers

Kind = Literal["ema", "swa"]


def prefix(kind: Kind | None) -> str:
    """The prefix of metrics of averaged weights, such as `ema_` in `val/ema_accuracy`; empty for None."""
    return f"{kind}_" if kind else ""


def loss_for(metric: str) -> str:
    """The validation loss of the weights that a metric such as `val/ema_accuracy` belongs to."""
    found = next((start for start in ("ema_", "swa_") if metric.startswith(f"val/{start}")), "")
    return f"val/{found}loss"


# torch.optim.swa_utils is not enough for two promises: the loop never waits (an update that depends on a step skipped on the
# device), and nothing about training changes (its AveragedModel copies the whole model; its update_bn puts dropout and
# frozen layers into training mode and draws random numbers).
class AveragedModel:
    """A running average of weights, stored beside them on their device.

    EMA: average <- d · average + (1 - d) · weights after every step. With warm-up d is min(decay, (1 + n) / (10 + n)) at
    update n, counted from 0, so that the first weights are soon forgotten. Buffers are those of the model.

    SWA (Izmailov et al., arXiv:1803.05407): the mean of the weights after every `every`-th step beyond `start`. BatchNorm's
    statistics belong to other weights, so `recalibrate` computes them again; until then a state records that they are not
    those of the average.

    An update is one vectorised operation and never waits. If steps may be skipped on the device, updates are counted there
    too, and skipped steps update nothing.

    Args:
        model: the trained model, on its device and in its memory layout.
        parameters: the parameters to average, also those of `loss`; the others keep their current values.
        start, every: optimizer steps before the first that counts, and from one update to the next.
        can_skip: steps may be skipped on the device.
    """

    def __init__(
        self,
        kind: Kind,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        decay: float = 0.0,
        warmup: bool = True,
        start: int = 0,
        every: int = 1,
        can_skip: bool = False,
        loss: nn.Module | None = None,
    ) -> None:
        self.kind, self.decay, self.warmup, self.start, self.every = kind, decay, warmup, start, every
        self._model, self._loss = model, nn.Identity() if loss is None else loss
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._parameters = list(parameters)
        self._current = [local(parameter.detach()) for parameter in parameters]  # of a divided one, this rank's part
        self._average = [tensor.clone() for tensor in self._current]
        self._statistics: dict[str, Tensor] = {}  # recalibrated ones, of BatchNorm
        self._calibrated = True  # whether BatchNorm's statistics are those of the average
        self._updates = 0
        self._counted: Tensor | None = None
        # Skipped steps are known only on the device, so the number of updates is counted there
        if can_skip:
            device = self._current[0].device
            wide = torch.float32 if device.type == "mps" else torch.float64
            self._counted = torch.zeros((), dtype=wide, device=device)

    @property
    def updates(self) -> int:
        """Number of updates; waits for the device if steps may be skipped on it."""
        return self._updates if self._counted is None else int(self._counted)

    @property
    def begun(self) -> bool:
        """True if there is an average yet that is meant to differ from the weights."""
        return self.kind == "ema" or self.updates > 0

    def update(self, step: int, skipped: Tensor | None = None) -> None:
        """Add the weights after optimizer step number `step`, from 1, to the average.

        `skipped` is above 0 if the device skipped the step, which then changes nothing; None if it cannot have.
        """
        # SWA begins late and takes one set of weights per period
        if step <= self.start or (step - self.start) % self.every:
            return
        # The mean of the weights has other activations than any of them, so the statistics are out of date
        if self.kind == "swa":
            self._calibrated = not self.norms()
        if self._counted is None or skipped is None:
            torch._foreach_lerp_(self._average, self._current, self._share(self._updates))
            self._updates += 1
            return
        # A skipped step has a share of 0, which leaves the average as it is without asking the device
        counts = skipped <= 0
        share = self._share(self._counted) * counts
        torch._foreach_lerp_(self._average, self._current, [share.to(tensor.dtype) for tensor in self._average])
        self._counted += counts

    def _share(self, updates: Any) -> Any:
        """The share of the current weights in the average."""
        if self.kind == "swa":
            return 1 / (updates + 1)
        rising = (9 if self.warmup else 0) / (10 + updates)
        return rising.clamp_min(1 - self.decay) if isinstance(rising, Tensor) else max(rising, 1 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model with averaged weights; weights and buffers are restored bit for bit."""
        # Weights are copied back and not recomputed: training must continue with the same bits
        saved = [tensor.clone() for tensor in self._current]
        try:
            with preserved_buffers(self._model):
                with torch.no_grad():
                    torch._foreach_copy_(self._current, self._average)
                    statistics = self._norm_buffers()
                    for name, tensor in self._statistics.items():
                        statistics[name].copy_(tensor)
                yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._current, saved)

    def recalibrate(self, feed: Callable[[], None]) -> None:
        """Compute BatchNorm's statistics for the averaged weights, which must be applied.

        They are the mean over the batches of training images that `feed` sends through the model, without gradients.
        """
        norms = self.norms()
        if not norms:
            return
        # The mode of each module, as frozen layers are in evaluation mode while others train.
        modes = [(module, module.training) for module in self._model.modules()]
        momenta = [norm.momentum for norm in norms]
        before = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
        try:
            self._model.eval()  # evaluations have no noise from dropout either
            for norm in norms:
                norm.train()
                norm.reset_running_stats()
                norm.momentum = None  # the mean over all batches
            feed()
        finally:
            for module, mode in modes:
                module.training = mode
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        # Evaluations of some tasks do not run every module
        for norm, statistics in zip(norms, before, strict=True):
            if norm.num_batches_tracked is not None and not int(norm.num_batches_tracked):
                norm.load_state_dict(statistics, strict=False)
        self._statistics = {name: tensor.clone() for name, tensor in self._norm_buffers().items()}
        self._calibrated = True

    def norms(self) -> list[_BatchNorm]:
        """Layers whose statistics change in training; a layer in evaluation mode is frozen."""
        layers = [module for module in self._model.modules() if isinstance(module, _BatchNorm) and module.training]
        return [layer for layer in layers if layer.track_running_stats]

    def _norm_buffers(self) -> dict[str, Tensor]:
        """BatchNorm's statistics by dotted name, for SWA."""
        if self.kind == "ema":
            return {}
        return {
            f"{prefix}.{name}".lstrip("."): tensor
            for prefix, module in self._model.named_modules()
            if isinstance(module, _BatchNorm)
            for name, tensor in module.named_buffers(recurse=False)
        }

    def weights(self) -> dict[str, Any]:
        """A state dict of the model with averaged weights; its tensors are not copied."""
        return self._averages(self._model) | self._statistics

    def _averages(self, module: nn.Module) -> dict[str, Any]:
        """A state dict of model or loss with averages."""
        pairs = [(name, self._average[place], self._parameters[place]) for name, place in self._names(module).items()]
        return module.state_dict() | {name: with_part(average, weight) for name, average, weight in pairs}

    def _names(self, module: nn.Module) -> dict[str, int]:
        """The place of each averaged weight by its names in a state dict of model or loss."""
        named = module.state_dict(keep_vars=True).items()
        return {name: self._places[id(value)] for name, value in named if id(value) in self._places}

    def state_dict(self) -> dict[str, Any]:
        """Kind, number of updates, averaged weights by name (None before the first), whether BatchNorm is calibrated; the loss."""
        weights = self.weights() if self.begun else None
        state = {"kind": self.kind, "updates": self.updates, "calibrated": self._calibrated, "weights": weights}
        loss = self._averages(self._loss) if self.begun else {}
        return state | ({"loss": loss} if loss else {})

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from a saved state; without one of this kind, start with the current weights.

        A `ValueError` says which names, shapes or kinds of values do not match.
        """
        # Anything that the file does not have begins as the current weights
        with torch.no_grad():
            torch._foreach_copy_(self._average, self._current)
        self._statistics, self._calibrated, updates = {}, True, 0
        if state is not None and state["kind"] == self.kind and state["weights"] is not None:
            updates = int(state["updates"])
            self._calibrated = bool(state["calibrated"])
            for module, saved in ((self._model, state["weights"]), (self._loss, state.get("loss") or {})):
                for name, place in self._names(module).items():
                    parameter = self._parameters[place]
                    found = saved.get(name)
                    if found is None or (found.shape, kind_of(found)) != (parameter.shape, kind_of(parameter)):
                        expected = f"{tuple(parameter.shape)}, {parameter.dtype}"
                        raise ValueError(f"the averaged weights have no '{name}' of the shape and kind {expected}")
                    self._average[place].copy_(local(divided_like(found, parameter)))
            # Statistics computed for the average belong to it, and are stored among its weights
            for name, tensor in self._norm_buffers().items():
                self._statistics[name] = loaded(state["weights"][name]).to(tensor.device, copy=True)
        self._updates = updates
        if self._counted is not None:
            self._counted.fill_(updates)
