"""The number of floating-point operations of a training sample."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.instrument.no_trace import no_trace, uncompiled
from runner.instrument.observer import Observer


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one batch; a multiplication and an addition count as two.

    Only matrix products, convolutions and attention are counted, as everywhere: they are nearly all of the work, and
    what a device's peak refers to. Operations that torch has no formula for count as none.
    """

    samples: int  # samples of the batch
    forward: int  # of model and loss
    # Of the gradients, without forward passes that activation checkpointing makes again: they bring training no further
    backward: int
    by_module: dict[str, int]  # forward, by dotted name of the module ("" is the model), its children included

    @property
    def of_sample(self) -> float:
        """Operations that training on one sample needs, forward and backward."""
        return (self.forward + self.backward) / self.samples


def count_flops(
    model: nn.Module,
    samples: int,
    loss: Callable[[], Tensor],
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    trained: nn.Module | None = None,
) -> Flops:
    """Count the operations of a forward and a backward pass, with `torch.utils.flop_counter`.

    Both are carried out, uncompiled, in the modes that the modules are in. Weights, gradients, buffers and random
    generators are left as they were. `loss` sends a batch of so many samples through the model, and returns a scalar;
    `autocast` gives the context that it runs in; `trained` is what holds the model and others that are trained with it.
    """
    from torch.utils.flop_counter import FlopCounterMode  # a tenth of a second that most runs need not spend

    trained = trained or model
    with no_trace(trained), uncompiled(), torch.enable_grad():
        with FlopCounterMode(display=False) as forward, autocast():
            value = loss()
        trainable = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        with FlopCounterMode(display=False) as backward, _recomputing(model, backward) as again:
            if trainable and value.requires_grad:
                torch.autograd.grad(value, trainable, allow_unused=True)
    root = type(model).__name__
    by_module = {
        name[len(root) + 1 :]: sum(counts.values())
        for name, counts in forward.get_flop_counts().items()
        if name == root or name.startswith(root + ".")
    }
    return Flops(
        samples=samples,
        forward=forward.get_total_flops(),
        backward=backward.get_total_flops() - sum(again),
        by_module=by_module,
    )


@contextlib.contextmanager
def _recomputing(model: nn.Module, counter: Any) -> Iterator[list[int]]:
    """Collect the operations of each module that runs forward while gradients are computed; of inner ones, with the outer."""
    found: list[int] = []
    began: list[int] = []  # one entry for each module that is running

    def enter(*_: object) -> None:
        began.append(counter.get_total_flops())

    def leave(*_: object) -> None:
        before = began.pop()
        if not began:
            found.append(counter.get_total_flops() - before)

    # Recomputing stops by an exception as soon as it has all it needs, hence `always`.
    with Observer(model, enter, leave, always=True):
        yield found
