"""One training step: loss, backward, clipping, update; for each batch, or for a whole accumulation window at once."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.gather import training_on
from runner.distributed.sharding import local, whole
from runner.distributed.world import world
from runner.engine.nonfinite import NonFiniteGuard
from runner.engine.protocols import Batch
from runner.engine.state import Optimizers, TrainState

_Window = list[tuple[Batch, float, int]]
_WHOLE = contextlib.nullcontext()  # a batch that is the whole of an optimizer step
_SMALLEST = 1e-3  # lower bound of a unit's weight norm, so that a unit that starts at zero can grow


@dataclass(frozen=True)
class Supervised:
    """The mean loss of images and targets, which a task that defines no step of its own is trained on."""

    model: Callable[[Tensor], Any]
    loss: Callable[[Any, Tensor], Tensor]  # (logits, targets) -> scalar mean over the samples
    targets: Callable[[Tensor], Tensor]  # converts targets of the data set to those of the loss

    def __call__(self, data: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of images (B, C, H, W) and targets (B, ...) of the data set."""
        images, targets = data
        return self.loss(self.model(images), self.targets(targets))

    def feed(self, data: tuple[Tensor, Tensor]) -> None:
        """Send the images through the model."""
        self.model(data[0])

    def evaluated(self, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Loss, outputs and targets of such data, see `runner.engine.evaluation.evaluate`."""
        images, targets = data[0], self.targets(data[1])
        outputs = self.model(images)
        return {"loss": self.loss(outputs, targets), "outputs": outputs, "targets": targets}


class AdaptiveClip:
    """Bounds the gradient of each unit by a multiple of the norm of its weights (Brock et al., arXiv:2102.06171).

    A unit computes one output: a row of a matrix, a filter of a convolution; a vector, such as a bias, is one unit. Norms
    are 2-norms; weight norms below 0.001 count as 0.001. As in the paper, the last linear layer is not clipped.

    `ratio` is the largest norm of a unit's gradient, as a multiple of the norm of its weights.
    """

    def __init__(self, model: nn.Module, ratio: float) -> None:
        self._ratio = ratio
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        spared = set(linear[-1].parameters()) if linear else set()
        self._parameters = [parameter for parameter in model.parameters() if parameter not in spared]

    @torch.no_grad()
    def __call__(self) -> None:
        """Scale down, in place, the gradient of every unit that exceeds its bound."""
        pairs = [(each, each.grad) for each in self._parameters if each.grad is not None]
        if not pairs:
            return
        # foreach kernels: a loop over weights would launch thousands of small ones
        factors: Any = [_norms(weight) for weight, _ in pairs]
        norms: Any = [_norms(gradient) for _, gradient in pairs]
        torch._foreach_clamp_min_(factors, _SMALLEST)
        torch._foreach_mul_(factors, self._ratio)
        torch._foreach_clamp_min_(norms, torch.finfo(torch.float32).tiny)
        torch._foreach_div_(factors, norms)
        torch._foreach_clamp_max_(factors, 1.0)
        for (_, gradient), factor in zip(pairs, factors, strict=True):
            local(gradient).mul_(factor)


@dataclass(eq=False)
class Step:
    """Trains on a batch; at the end of an accumulation window, it updates the weights.

    The source of batches has already fetched, moved and augmented the batch; counters and the next learning rate are the
    loop's job. Nothing here waits for the device, unless `NonFiniteGuard.waits` says that the optimizer needs it.
    """

    state: TrainState  # what training changes
    objective: Callable[[Any], Tensor]  # the data of a batch -> scalar mean over what `weight_of` counts
    compiled: Callable[[Any], Tensor] | None = None  # the objective compiled, which replaces it
    weight_of: Callable[[Any], Any] | None = None  # how much the data of a batch counts; None for its number of samples
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext  # around the objective
    clip_norm: float | None = None  # largest 2-norm of all gradients together; None for no limit
    clip_value: float | None = None  # largest absolute value of a gradient element; None for no limit
    clip_adaptive: AdaptiveClip | None = None  # bounds of each unit's gradient; None for no limit
    guard: NonFiniteGuard | None = None  # prevents steps with gradients that are not finite; None allows them
    optimizer_step: Callable[[], object] | None = None  # a faster equivalent of `optimizer.step`; None for that itself
    after_step: Callable[[], object] | None = None  # called at the end of each step, even if its update was skipped
    _counted: Tensor | None = field(default=None, init=False)  # the sum of `weight_of` over an accumulation window

    def __call__(self, batch: Batch, share: float, samples: int, *, update: bool) -> None:
        """Train on a batch that is on the device; for `share`, `samples` and `update` see `EpochPlan.parts`."""
        with _WHOLE if share == 1.0 else training_on(samples, whole=False):
            self.accumulate(batch, share, samples)
            if update:
                self.update()

    def accumulate(self, batch: Batch, share: float, samples: int) -> None:
        """Add a batch's share of the gradients."""
        self.backward(self.forward(batch, samples), self.factor(batch.data, share))

    def forward(self, batch: Batch, samples: int) -> Tensor:
        """The mean loss of a batch, which is also added to the running mean."""
        loss = self.loss(batch.data)
        self.state.meter.add(loss, samples)
        if terms := getattr(self.objective, "terms", None):
            self.state.add_terms(terms, samples)
        if self.guard is not None:
            self.guard.watch_loss(loss)
        return loss

    def loss(self, data: Any) -> Tensor:
        """The mean loss of the data of a batch."""
        with self.autocast():
            return self.mean_of(data)

    def mean_of(self, data: Any) -> Tensor:
        """As `loss`, for callers that have entered `autocast`."""
        return (self.compiled or self.objective)(data)

    def factor(self, data: Any, share: float) -> float | Tensor:
        """The factor of a batch's loss in its window: its share of the samples, or what `weight_of` counts.

        `combine` divides the gradients by the sum of these counts, which is known only at the end of the window.
        """
        if self.weight_of is None:
            return share
        meter = self.state.meter
        count = torch.as_tensor(self.weight_of(data), dtype=meter.dtype, device=meter.device)
        if share == 0:  # a rank without a sample of this batch has taken another one
            count = torch.zeros_like(count)
        self._counted = count if self._counted is None else self._counted + count
        return count

    def backward(self, loss: Tensor, factor: float | Tensor, inputs: Sequence[Tensor] | None = None) -> None:
        """Accumulate a batch's share of the gradients, of all parameters or of `inputs`."""
        # The usual factor is 1, and a multiplication less is a kernel less.
        if isinstance(factor, Tensor) or factor != 1.0:
            loss = loss * factor
        if self.state.scaler is not None:
            loss = self.state.scaler.scale(loss)
        loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Unscale and clip the gradients, take an optimizer step unless the guard forbids it, and drop the gradients."""
        self.finish(self.apply(self.state.optimizer))

    def combine(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Make an optimizer's gradients those of all batches and ranks of an accumulation window.

        Returns:
            What they were divided by, if `weight_of` counts something else than samples.
        """
        if self._counted is None:
            return None
        # The counts of all batches and ranks are known only now; the ranks have averaged, and not added
        total = world().total(self._counted) / world().size
        total = total.where(total != 0, 1)  # nothing counts in this step: its gradients are zeros
        gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        torch._foreach_div_(gradients, total)
        self._counted = None
        return total

    def apply(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take a step with an optimizer, which may be one of several; returns False if the guard forbids it."""
        scaler = self.state.scaler
        self.combine(optimizer)
        # The guard looks at the gradients before clipping, which would spread a NaN over all of them.
        allowed = self.guard is None or self.guard.allows_step()
        if allowed:
            self.clip(optimizer)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif self.optimizer_step is not None and optimizer is self.state.optimizer:
                self.optimizer_step()
            else:
                optimizer.step()
        drop_gradients(optimizer)
        return allowed

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip each gradient element to `clip_value`, then each unit by `clip_adaptive`, then the norm of all to `clip_norm`."""
        if self.clip_norm is None and self.clip_value is None and self.clip_adaptive is None:
            return
        # Clipping needs the gradients as they are, so the loss scale is removed first
        if self.state.scaler is not None:
            self.state.scaler.unscale_(optimizer)
        trained = [parameter for _, parameter in self.state.named_parameters()]
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(trained, self.clip_value)
        if self.clip_adaptive is not None:
            self.clip_adaptive()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, self.clip_norm)

    def finish(self, allowed: bool) -> None:
        """Let the task go on from the updated weights, average them, and note the outcome, once all updates are done."""
        state, guard = self.state, self.guard
        if self.after_step is not None:  # also if a kernel or the guard skipped the update: the host may not know it
            with torch.no_grad():
                self.after_step()
        # After the update, as it is the updated weights that are averaged
        if allowed and state.averaged is not None:
            state.averaged.update(state.position.global_step + 1, guard.skipped if guard is not None else None)
        if guard is not None:
            guard.stepped()


@dataclass(eq=False)
class WindowStep(Step):
    """A step that trains at the end of an accumulation window, on all of its batches.

    With several optimizers, the task yields the loss of one after the other, see `runner.run.step.TaskSteps.alternate`: each
    is updated with the gradients of the whole window before the next loss is computed. Otherwise the optimizer gets a
    closure that computes loss and gradients of the window as often as it asks.
    """

    _window: _Window = field(default_factory=list, init=False)

    def accumulate(self, batch: Batch, share: float, samples: int) -> None:
        """Keep a batch until the end of its window."""
        self._window = [*self._window, (batch, share, samples)]  # a copy of a step has the same list

    def update(self) -> None:
        """Train on the window."""
        window, self._window = self._window, []
        optimizer = self.state.optimizer
        if isinstance(optimizer, Optimizers):
            self.finish(self._alternate(optimizer, window))
        else:
            self.finish(self._with_closure(optimizer, window))

    def _alternate(self, optimizers: Optimizers, window: _Window) -> bool:
        """Update the optimizers in the order in which the task yields their losses; False if the guard forbids one."""
        objective: Any = self.objective
        losses, allowed = objective.alternate([batch.data for batch, _, _ in window]), True
        sums: list[Tensor | float] = [0.0] * len(window)
        while True:
            with self.autocast():
                found = next(losses, None)
            if found is None:
                break
            place, name, loss, terms = found
            batch, share, samples = window[place]
            sums[place] = sums[place] + loss.detach()
            self.state.add_terms(terms, samples)
            if self.guard is not None:
                self.guard.watch_loss(loss)
            # Of its own parameters alone: the loss of a generator runs through the discriminator, which has another loss
            optimizer = optimizers.named[name]
            own = [each for each in parameters_of(optimizer) if each.requires_grad]
            if not own:  # frozen for a while
                continue
            self.backward(loss, self.factor(batch.data, share), own)
            if place == len(window) - 1:
                allowed = self.apply(optimizer) and allowed
        for total, (_, _, samples) in zip(sums, window, strict=True):
            self.state.meter.add(torch.as_tensor(total), samples)
        return allowed

    def _with_closure(self, optimizer: Any, window: _Window) -> bool:
        """Let an optimizer step that computes the loss itself; False, and the weights restored, if it is not finite."""
        parameters = [parameter.detach() for parameter in parameters_of(optimizer)]
        before, evaluations = [parameter.clone() for parameter in parameters], 0

        @torch.enable_grad()
        def closure() -> Tensor:
            nonlocal evaluations
            drop_gradients(optimizer)
            total = before[0].new_zeros(())
            for batch, share, samples in window:
                # The loss that is logged is that before the update
                loss = self.loss(batch.data) if evaluations else self.forward(batch, samples)
                factor = self.factor(batch.data, share)
                self.backward(loss, factor)
                total += loss.detach() * factor
            evaluations += 1
            divisor = self.combine(optimizer)
            if self.guard is not None and not self.guard.allows_step():
                raise _NotFinite
            self.clip(optimizer)
            # Ranks have to take the same decisions
            total = world().total(total) / world().size
            return total if divisor is None else total / divisor

        try:
            optimizer.step(closure)
        except _NotFinite:
            torch._foreach_copy_(parameters, before)
            return False
        finally:
            drop_gradients(optimizer)
        return True


def needs_window(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer needs `WindowStep`: it is several, or its `step` cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return isinstance(optimizer, Optimizers) or (closure is not None and closure.default is closure.empty)


class _NotFinite(Exception):
    """Gradients within a step are not finite."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Equals `zero_grad(set_to_none=True)` without its bookkeeping."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def _norms(tensor: Tensor) -> Tensor:
    """2-norm of each unit, in a shape that broadcasts against the tensor."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)) or None, keepdim=True)
    # Rows of a matrix are whole on a rank, and vectors are not
    return local(norms) if tensor.ndim > 1 else whole(norms)
