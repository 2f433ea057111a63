"""The step of several ranks: each computes its rows of the batch, and torch averages the gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.base.errors import UserError
from runner.distributed.batchnorm import GlobalBatchNorm, set_rows
from runner.distributed.sharding import is_sharded
from runner.distributed.world import World, rows
from runner.instrument.no_trace import SavedAttributes, SavedBuffers, SavedRNG

_Objective = Callable[[Any], Tensor]


class ParallelStep:
    """A training step on this rank's rows of a batch, whose gradients are those of the whole batch.

    DistributedDataParallel averages the gradients of the ranks while the backward pass still computes. Each rank weights its
    mean loss by its share of the samples, so batches that the ranks do not divide are exact too. With `repeats`, a step may
    compute the same rows several times (several optimizers, closures), so the gradients are averaged once, before each update.

    A model that is sharded averages its gradients itself, so it is called as it is. Buffers of a loss are those of rank 0.

    Args:
        state: model and loss, see `runner.engine.state.TrainState`.
        objective: the data of a batch -> mean loss of the rows.
        step: computes a step, see `runner.engine.step.train_step`.
        world: the ranks.
        find_unused: whether parameters may have no gradient in some steps.
        repeats: see above.
    """

    def __init__(
        self, state: Any, objective: _Objective, step: Any, world: World, *, find_unused: bool, repeats: bool
    ) -> None:
        self._model, self._objective, self._step, self._world = state.model, objective, step, world
        self._learner = _Learner(state.model, state.loss, objective)
        self._find_unused, self._repeats, self._sharded = find_unused, repeats, is_sharded(state.model)
        if self._sharded and any(parameter.requires_grad for parameter in state.loss.parameters()):
            raise UserError(
                "loss", "has parameters, which strategy=fsdp does not train", "strategy=ddp, or another loss"
            )
        self._norms = [module for module in self._model.modules() if isinstance(module, GlobalBatchNorm)]
        self._parallel: DistributedDataParallel | None = None
        self._task, self._trained = state.task, tuple[bool, ...]()

    def objective(self, data: Any) -> Tensor:
        """The mean loss of this rank's rows; its backward pass averages the gradients."""
        if self._repeats or self._sharded:
            return self._objective(data)
        assert self._parallel is not None, "the step has built it"
        loss: Tensor = self._parallel(data)
        return loss

    def _build(self, parts: Any, batch: Any) -> None:
        """Build torch's module for what is trained now, and let it see one backward pass, which changes nothing.

        It sorts the gradients into buckets in the order in which the first backward pass computes them. The order of a sum over
        ranks depends on the buckets, so a resumed run has to have them from its first step on.
        """
        self._parallel = DistributedDataParallel(
            self._learner,
            find_unused_parameters=self._find_unused,
            gradient_as_bucket_view=True,
        )
        if self._find_unused:  # the order is never changed
            return
        # The extra backward must leave no trace: buffers and generators are put back
        buffers, attributes = SavedBuffers(self._model, self._learner.loss), SavedAttributes(self._task)
        generators = SavedRNG()
        with parts.autocast():
            loss = self._parallel(batch.data)
        loss.backward()
        for parameter in self._learner.parameters():
            parameter.grad = None
        buffers.restore()
        attributes.restore()
        generators.restore()

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Around batches whose gradients are added up before they are averaged."""
        if self._sharded:
            return _unsynchronized(self._model)
        return contextlib.nullcontext() if self._parallel is None else self._parallel.no_sync()

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of a step with `repeats`."""
        for parameter in parameters:
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._world.total(gradient) / self._world.size

    def __call__(self, state: Any, parts: Any, batch: Any, weight: float, samples: int, *, update: bool) -> None:
        """Train on this rank's rows of a batch of `samples`, see `runner.engine.step.train_step`."""
        # Each rank takes rows of the same batch, so the number of ranks does not change which samples are in it
        own = rows(samples, self._world.rank, self._world.size)
        count = own.stop - own.start
        set_rows(self._norms, (count, samples))
        try:
            # Random numbers depend on position and rank, so a resume draws the same ones
            at = state.position
            with own_draws(at.epoch, at.batch, self._world.rank, batch.indices.device):
                trained = tuple(parameter.requires_grad for parameter in self._model.parameters())
                # DDP would copy the buffers of the loss in each step; steps with `repeats` and sharding do without DDP
                if self._repeats or self._sharded:
                    self._world.copy_first(self._learner.loss.buffers())
                elif trained != self._trained:
                    self._trained = trained  # weights are frozen and unfrozen as training goes on
                    self._build(parts, batch)
                # Ranks may have different numbers of rows: the weight makes the average over ranks one over samples
                self._step(state, parts, batch, weight * (count * self._world.size / samples), count, update=update)
        finally:
            set_rows(self._norms, None)


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


@contextlib.contextmanager
def _unsynchronized(model: Any) -> Iterator[None]:
    """Without averaging the gradients of a sharded model, which meanwhile are whole on every rank."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class _Learner(nn.Module):
    """Model and loss as one module, so that what both compute is averaged."""

    def __init__(self, model: nn.Module, loss: nn.Module, objective: _Objective) -> None:
        super().__init__()
        self.model, self.loss, self._objective = model, loss, objective

    def forward(self, data: Any) -> Tensor:
        """The mean loss."""
        return self._objective(data)


def parallelize(parts: Any, step: Any, state: Any, world: World, *, find_unused: bool, repeats: bool) -> Any:
    """The parts of a step, and the step itself, for one of several ranks."""
    parallel = ParallelStep(
        state, parts.equivalent or parts.objective, step, world, find_unused=find_unused, repeats=repeats
    )
    average = parallel.average_gradients if repeats else None
    changed = dataclasses.replace(
        parts, equivalent=parallel.objective, no_sync=parallel.no_sync, average_gradients=average
    )
    return changed, parallel
