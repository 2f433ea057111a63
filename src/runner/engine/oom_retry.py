"""Trains on a batch in micro-batches if it does not fit into memory."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runner.engine.protocols import Batch
from runner.engine.state import TrainState
from runner.engine.step import StepConfig, backward, loss_of, share_of, update_weights
from runner.instrument.nested import parts_of_rows
from runner.instrument.no_trace import SavedBuffers, SavedRNG

if TYPE_CHECKING:
    from runner.engine.loop import Loop

# On the CPU torch raises a plain RuntimeError with one of these messages.
_CPU_MESSAGE = re.compile(r"can't allocate memory|not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that a device, or the CPU, is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_MESSAGE.search(str(error)) is not None


class OOMRetryStep:
    """A replacement of `train_step` that divides each batch into 2, 4, 8, ... micro-batches once memory has run out.

    Each micro-batch is weighted with its share of the samples, so the gradient equals that of the whole batch up to
    rounding. The state's position stores their number, so a resumed run continues with as many; a smaller batch, such as the
    last of an epoch, is divided into fewer of the same size. Before a retry, everything that the failed attempt changed is
    restored: gradients, buffers, generators, and the logged loss. Layers that combine samples, above all BatchNorm, see one
    micro-batch at a time.

    Args:
        batch_size: samples per batch, except for smaller ones.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._window: list[tuple[Batch, float, int]] = []
        self._losses: list[tuple[Tensor, dict[str, Tensor]]] = []  # of each batch, and its terms
        self._before: list[SavedBuffers | SavedRNG] = []  # buffers and generators when the window began

    def __call__(
        self, state: TrainState, parts: StepConfig, batch: Batch, weight: float, samples: int, *, update: bool
    ) -> None:
        """Train on one batch, see `train_step`.

        Raises:
            torch.OutOfMemoryError: if single samples do not fit either.
        """
        # A retry begins at the start of the window, so what forward changes is kept
        if not self._window:
            self._before = [SavedBuffers(state.model, state.loss), SavedRNG()]
        self._window.append((batch, weight, samples))
        # It counts as done only if forward and backward fit; otherwise the whole window is computed in smaller parts
        if not self._fits(state, parts, len(self._window) - 1):
            self._retry(state, parts)
        if not update:
            return
        # Losses are added once the window is done, or a retry would count them twice
        for (loss, terms), (_, _, count) in zip(self._losses, self._window, strict=True):
            state.meter.add(loss, count)
            state.add_terms(terms, count)
            if parts.guard is not None:
                parts.guard.watch_loss(loss)
        self._window, self._losses, self._before = [], [], []
        update_weights(state, parts)

    def _retry(self, state: TrainState, parts: StepConfig) -> None:
        """Repeat the batches of the window in more and more micro-batches until they fit."""
        fits = False
        while not fits:
            state.position.pieces *= 2
            self._losses, state.window_weight = [], None
            for _, parameter in state.named_parameters():
                parameter.grad = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            for saved in self._before:
                saved.restore()
            fits = self._fits(state, parts, 0)

    def _fits(self, state: TrainState, parts: StepConfig, first: int) -> bool:
        """Train on the batches of the window from number `first` on; whether memory was sufficient."""
        size = math.ceil(self._batch_size / state.position.pieces)
        try:
            for batch, weight, samples in self._window[first:]:
                self._losses.append(
                    _train(state, parts, batch, weight, samples, count=max(1, math.ceil(samples / size)))
                )
        except Exception as error:
            if not is_out_of_memory(error) or size == 1:
                raise
            return False  # which also frees what the error refers to
        return True


class ReportMicroBatches:
    """Warns when batches begin to be divided into micro-batches."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._pieces = 1

    def on_start(self, loop: Loop) -> None:
        """Report what a resumed run starts with."""
        self.on_step(loop)

    def on_step(self, loop: Loop) -> None:
        """Report if there are more micro-batches than before."""
        position = loop.state.position
        if position.pieces != self._pieces:
            self._pieces = position.pieces
            size = loop.plan.batch_size
            count = math.ceil(size / math.ceil(size / position.pieces))
            self._warn(
                f"not enough memory for a batch of {size}: from step {position.global_step} on each batch is trained in "
                f"{count} micro-batches (on_oom=split); BatchNorm sees one micro-batch at a time"
            )


def _train(
    state: TrainState, parts: StepConfig, batch: Batch, weight: float, samples: int, *, count: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Accumulate the gradients of a batch in `count` micro-batches; returns its mean loss and its terms."""
    terms: dict[str, Tensor] = {}
    losses: list[Tensor] = []
    rows = len(batch.indices)
    for data, indices in zip(parts_of_rows(batch.data, rows, count), batch.indices.tensor_split(count), strict=True):
        loss = loss_of(parts, data)
        share = len(indices) / samples if samples else 0.0
        for name, value in getattr(parts.objective, "terms", {}).items():
            terms[name] = terms.get(name, 0) + value * share
        backward(state, loss, share_of(state, parts, data, weight * share))
        losses.append(loss.detach() if count == 1 else loss.detach() * share)
    return functools.reduce(torch.add, losses), terms
