"""Batches that do not fit into the memory of the device, trained on in pieces."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.engine.state import TrainState
from runner.engine.step import Batch, StepConfig, backward, update_weights
from runner.instrument.no_trace import SavedBuffers

if TYPE_CHECKING:
    from runner.engine.loop import Loop

# How torch says on the CPU that memory is short; on other devices the error has a class of its own.
_ON_CPU = re.compile(r"can't allocate memory|not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a device, or of the CPU, does not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _ON_CPU.search(str(error)) is not None


class OOMRetryStep:
    """A step as `train_step` is one, which trains on each batch in 2, 4, 8, ... pieces once memory has run out.

    Each piece counts with its share of the samples, so the gradient is that of the whole batch to rounding. How many pieces
    there are stands in the state's position from then on, so a resumed run goes on with as many; a smaller batch, such as
    the last of an epoch, is divided into fewer of the same size. What a failed attempt has changed is put back before the
    next one: gradients, buffers, generators, and the loss that is logged. A layer that looks at several samples at once,
    BatchNorm above all, sees one piece at a time.

    Args:
        batch_size: samples of a batch, but for smaller ones.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._window: list[tuple[Batch, float, int]] = []
        self._losses: list[Tensor] = []
        self._before: _Before | None = None

    def __call__(
        self, state: TrainState, parts: StepConfig, batch: Batch, weight: float, samples: int, update: bool
    ) -> None:
        """Train on one batch; at the end of an accumulation window, update the weights.

        Raises:
            torch.OutOfMemoryError: if single samples do not fit either.
        """
        if not self._window:
            self._before = _Before(state.model, parts.loss)
        self._window.append((batch, weight, samples))
        if not self._fits(state, parts, len(self._window) - 1):
            self._split(state, parts)
        if not update:
            return
        for loss, (_, _, count) in zip(self._losses, self._window, strict=True):
            state.meter.add(loss, count)
            if parts.guard is not None:
                parts.guard.watch_loss(loss)
        self._window, self._losses, self._before = [], [], None
        update_weights(state, parts)

    def _split(self, state: TrainState, parts: StepConfig) -> None:
        """Train on the batches of the window anew, in more pieces, until they fit."""
        fits = False
        while not fits:
            state.position.pieces *= 2
            self._losses = []
            for parameter in state.model.parameters():
                parameter.grad = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            assert self._before is not None, "a window began with its state being noted"
            self._before.restore()
            fits = self._fits(state, parts, 0)

    def _fits(self, state: TrainState, parts: StepConfig, first: int) -> bool:
        """Train on the batches of the window from number `first` on; whether memory suffices."""
        most = _samples_of_a_piece(self._batch_size, state.position.pieces)
        try:
            for batch, weight, samples in self._window[first:]:
                self._losses.append(_train(state, parts, batch, weight, samples, math.ceil(samples / most)))
        except Exception as error:
            if not is_out_of_memory(error) or most == 1:
                raise
            return False  # and what the error holds on to is freed
        return True


class ReportMicroBatches:
    """Tells when batches have begun to be trained on in pieces.

    Args:
        warn: called with a sentence.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._pieces = 1

    def on_start(self, loop: Loop) -> None:
        """Take note of what the run begins with."""
        self._pieces = 1
        self.on_step(loop)

    def on_step(self, loop: Loop) -> None:
        """Tell if there are more pieces than before."""
        position = loop.state.position
        if position.pieces != self._pieces:
            self._pieces = position.pieces
            size = loop.plan.batch_size
            pieces = math.ceil(size / _samples_of_a_piece(size, position.pieces))
            self._warn(
                f"memory does not suffice for a batch of {size}: from step {position.global_step} on each one is "
                f"trained on in {pieces} pieces (on_oom=split); BatchNorm sees one piece at a time"
            )


def _samples_of_a_piece(batch_size: int, pieces: int) -> int:
    """The most samples that a piece has."""
    return math.ceil(batch_size / pieces)


class _Before:
    """Generators and buffers as they are at the beginning of a step."""

    def __init__(self, model: nn.Module, loss: object) -> None:
        self._buffers = SavedBuffers(model, loss)
        self._device = next(model.parameters()).device
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.get_rng_state()
        self._accelerator: Any = None
        if self._device.type in ("cuda", "mps"):
            self._accelerator = getattr(torch, self._device.type).get_rng_state()

    def restore(self) -> None:
        """Put them back."""
        self._buffers.restore()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._accelerator is not None:
            getattr(torch, self._device.type).set_rng_state(self._accelerator)


def _train(state: TrainState, parts: StepConfig, batch: Batch, weight: float, samples: int, pieces: int) -> Tensor:
    """Add the gradients of a batch; gives its mean loss."""
    targets = parts.targets(batch.targets)
    total: Tensor | None = None
    for images, some in zip(batch.images.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
        with parts.autocast():
            if parts.compiled_loss is not None:
                loss = parts.compiled_loss(images, some)
            else:
                loss = parts.loss(state.model(images), some)
        share = len(images) / samples
        backward(state, loss, weight * share)
        counted = loss.detach() if pieces == 1 else loss.detach() * share
        total = counted if total is None else total + counted
    assert total is not None, "a batch has samples"
    return total
