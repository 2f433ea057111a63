"""The step of several ranks: each computes its rows of the batch, and torch averages the gradients."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.distributed.batchnorm import GlobalBatchNorm, set_rows
from runner.distributed.gather import training_on
from runner.distributed.sharding import is_sharded
from runner.distributed.world import rows, world
from runner.engine.protocols import Batch
from runner.engine.state import TrainState
from runner.engine.step import Step, WindowStep, parameters_of
from runner.instrument.no_trace import SavedAttributes, SavedBuffers, SavedRNG


@dataclass(eq=False)
class RankStep(Step):
    """A training step on this rank's rows of a batch, whose gradients are those of the whole batch.

    DistributedDataParallel averages the gradients of the ranks while the backward pass still computes. Each rank weights its
    mean loss by its share of the samples, so batches that the ranks do not divide are exact too.

    A model that is sharded averages its gradients itself, so it is called as it is. Buffers of a loss are those of rank 0.
    """

    find_unused: bool = False  # whether parameters may have no gradient in some steps
    _parallel: DistributedDataParallel | None = field(default=None, init=False)
    _trained: tuple[bool, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._sharded = is_sharded(self.state.model)
        self._norms = [module for module in self.state.model.modules() if isinstance(module, GlobalBatchNorm)]

    def mean_of(self, data: Any) -> Tensor:
        """The mean loss of this rank's rows; its backward pass averages the gradients."""
        if self._sharded:
            return super().mean_of(data)
        assert self._parallel is not None, "the step has built it"
        loss: Tensor = self._parallel(data)
        return loss

    def __call__(self, batch: Batch, share: float, samples: int, *, update: bool) -> None:
        """Train on this rank's rows of a batch of `samples`, see `Step`."""
        with _own_part(self.state, batch, share, samples) as (count, share):
            set_rows(self._norms, (count, samples))
            try:
                trained = tuple(parameter.requires_grad for parameter in self.state.model.parameters())
                # DDP would copy the buffers of the loss in each step; a sharded model does without DDP
                if self._sharded:
                    world().copy_first(self.state.loss.buffers())
                elif trained != self._trained:
                    self._trained = trained  # weights are frozen and unfrozen as training goes on
                    self._build(batch)
                # Inside a window, gradients only add up: ranks exchange them once, at its end
                with contextlib.nullcontext() if update else self._no_sync():
                    self.accumulate(batch, share, count)
                if update:
                    self.update()
            finally:
                set_rows(self._norms, None)

    def _build(self, batch: Batch) -> None:
        """Build torch's module for what is trained now, and let it see one backward pass, which changes nothing.

        It sorts the gradients into buckets in the order in which the first backward pass computes them. The order of a sum over
        ranks depends on the buckets, so a resumed run has to have them from its first step on.
        """
        learner = _Learner(self.state, super().mean_of)
        self._parallel = DistributedDataParallel(
            learner, find_unused_parameters=self.find_unused, gradient_as_bucket_view=True
        )
        if self.find_unused:  # the order is never changed
            return
        # The extra backward must leave no trace: buffers and generators are put back
        saved = SavedBuffers(self.state.model, self.state.loss), SavedAttributes(self.state.task), SavedRNG()
        self.loss(batch.data).backward()  # type: ignore[no-untyped-call]
        for parameter in learner.parameters():
            parameter.grad = None
        for each in saved:
            each.restore()

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        """Around batches whose gradients are added up before they are averaged; of a sharded model, they are whole meanwhile."""
        if self._parallel is not None:
            with self._parallel.no_sync():
                yield
            return
        model: Any = self.state.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


class RankWindowStep(WindowStep):
    """The same for steps that may compute the same rows several times: gradients are averaged once, before each update."""

    def __call__(self, batch: Batch, share: float, samples: int, *, update: bool) -> None:
        """Train on this rank's rows of a batch of `samples`, see `Step`."""
        with _own_part(self.state, batch, share, samples) as (count, share):
            world().copy_first(self.state.loss.buffers())
            self.accumulate(batch, share, count)
            if update:
                self.update()

    def combine(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Average the gradients over the ranks, which backward has not done, and see `Step`."""
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = world().total(gradient) / world().size
        return super().combine(optimizer)


class _Learner(nn.Module):
    """Model and loss as one module, so that what both compute is averaged."""

    def __init__(self, state: TrainState, mean_of: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss, self._mean_of = state.model, state.loss, mean_of

    def forward(self, data: Any) -> Tensor:
        """The mean loss."""
        return self._mean_of(data)


@contextlib.contextmanager
def _own_part(state: TrainState, batch: Batch, share: float, samples: int) -> Iterator[tuple[int, float]]:
    """Around a step: this rank's number of rows, and its share, with which the average over the ranks is one over samples."""
    rank, size, at = world().rank, world().size, state.position
    own = rows(samples, rank, size)
    count = own.stop - own.start
    # Random numbers depend on position and rank, so a resume draws the same ones
    with own_draws(at.epoch, at.batch, rank, batch.indices.device), training_on(samples, whole=share == 1.0):
        yield count, share * (count * size / samples)


@contextlib.contextmanager
def own_draws(epoch: int, batch: int, rank: int, device: torch.device) -> Iterator[None]:
    """Within, torch's generators give each rank other numbers in each batch, as for dropout; afterwards they are as before."""
    place = f"{torch.initial_seed()} {epoch} {batch} {rank}"
    seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        # torch.manual_seed takes a stack trace while no GPU is in use
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed(seed)
        yield
