"""One of the two trainings that are compared: built, and run a step at a time while everything it computes is recorded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from torch import Tensor, nn

from runner.build.hardware import set_switches
from runner.checkpoint import resume, rng
from runner.checkpoint.find import LoadedCheckpoint
from runner.config.schema.verbs import Audit
from runner.data.loaders import Batch
from runner.engine.position import Position
from runner.engine.step import backward, forward, update_weights
from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer, observe_gradients
from runner.instrument.profiler_ranges import FORWARD, step_in_ranges
from runner.runtime.activation import is_switched_on, switch
from runner.train import build_run
from runner.verbs.audit.record import (
    ACTIVATION,
    BATCH,
    DRAWN,
    FLOW,
    GENERATOR,
    GRADIENT,
    LOSS,
    OPTIMIZER,
    START,
    WEIGHT,
    Entry,
    Recorder,
)

# Share of the free memory that the record of a step may take, on each side.
_SHARE_KEPT = 0.15
WHOLE = "model"  # what the outermost module is called


class Side:
    """A training of which every step can be recorded.

    Args:
        config: the config.
        found: checkpoint to start from; None for the beginning.
    """

    def __init__(self, config: Audit, found: LoadedCheckpoint | None = None) -> None:
        self.config = config
        start = resume.made_of(found, "position", Position) if found else None
        self.training = build_run(config, start, make_cache=found is None)
        self._recomputes = is_switched_on()
        if found:
            # A copy, as an optimizer takes the tensors of its state as they are, and the other side would share them.
            resume.restore(found._replace(contents=copy.deepcopy(found.contents)), self.training.state, {})
        state = self.training.state
        state.set_learning_rate()
        if self.training.parts.guard is not None:
            self.training.parts.guard.start()
        self.names = {parameter: name for name, parameter in state.model.named_parameters()}
        self.batch: Batch | None = None
        self.epoch = state.position.epoch  # of that batch
        self._recorder = Recorder(0)
        self._in_forward = False
        self._parts = dataclasses.replace(
            self.training.parts,
            loss=self._recorded(self.training.parts.loss),
            compiled_loss=self._recorded(self.training.parts.compiled_loss)
            if self.training.parts.compiled_loss
            else None,
        )
        self._step = step_in_ranges(self._mark, forward, backward, update_weights)
        self._batches = self._batches_of_steps()
        for parameter, name in self.names.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient(name))  # type: ignore[no-untyped-call]
        state.train()  # what is frozen for a while takes no hooks
        self._generators = rng.capture()

    @property
    def compiled(self) -> bool:
        """Whether the model is compiled, so that its modules cannot be observed."""
        return self.training.toggled.compilation is not None

    @property
    def steps_left(self) -> int:
        """Optimizer steps to the end of the run."""
        return self.training.total_steps - self.training.state.position.global_step

    def observe(self) -> None:
        """Record the output of every module, and the gradient that reaches it."""
        Observer(self.training.model, after=self._on_output)

    def start(self) -> list[Entry]:
        """Weights and generators before the first step."""
        self._begin()
        for name, tensor in self.training.model.state_dict().items():
            self._recorder.add(START, name, tensor)
        for name, value in _each(self._generators):
            self._recorder.add(START, f"generator {name}", value)
        return self._recorder.entries

    def step(self) -> list[Entry]:
        """Take an optimizer step; returns everything that it computed, in order."""
        self._begin()
        with self._turn():
            for number, (batch, size, weight, update) in enumerate(self._batches):
                self._recorder.batch = number
                self._write_batch(batch)
                if not self._is_skipped():
                    self._step(self.training.state, self._parts, batch, weight, size, update)
                if update:
                    break
            self._write_state()
        return self._recorder.entries

    def _is_skipped(self) -> bool:
        """Whether the run that is continued skipped this step."""
        position = self.training.state.position
        return position.global_step + 1 in position.skipped_steps

    def close(self) -> None:
        """End worker processes."""
        self._batches.close()
        self.training.data.close()

    def _begin(self) -> None:
        self._recorder = Recorder(int(_SHARE_KEPT * psutil.virtual_memory().available))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Find torch's switches and all generators as this side left them, and leave them for the next turn."""
        set_switches(self.config, self.training.device)
        switch(self._recomputes)
        rng.restore(self._generators)
        try:
            yield
        finally:
            self._generators = rng.capture()

    def _batches_of_steps(self) -> Any:
        """Batches with their size, their weight and whether the optimizer steps after it, as the loop takes them."""
        training = self.training
        state, plan, source = training.state, training.plan, training.data.train.loader
        position = state.position
        while True:
            batches = source.batches(position.epoch, position.batch, plan.batches)
            for size, weight, update in plan.parts(position.batch):
                self.epoch = position.epoch
                state.freezing.follow(position)
                yield next(batches), size, weight, update
                position.batch += 1
                if update:
                    position.global_step += 1
                    state.set_learning_rate()
            position.epoch, position.batch = position.epoch + 1, 0

    def _write_batch(self, batch: Batch) -> None:
        self.batch = batch
        for name in ("indices", "images", "targets"):
            self._recorder.add(BATCH, name, getattr(batch, name))
        for name, value in _each(rng.capture()):
            self._recorder.add(DRAWN, name, value)

    def _write_state(self) -> None:
        state = self.training.state
        for name, tensor in state.model.state_dict().items():
            self._recorder.add(WEIGHT, name, tensor)
        for group in state.optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in state.optimizer.state.get(parameter, {}).items():
                    self._recorder.add(OPTIMIZER, f"{self.names.get(parameter, '?')}.{key}", value)
        if state.scaler is not None:
            self._recorder.add(OPTIMIZER, "scale of the loss", state.scaler.get_scale())
        for name, value in _each(rng.capture()):
            self._recorder.add(GENERATOR, name, value)

    @contextlib.contextmanager
    def _mark(self, name: str) -> Iterator[None]:
        self._in_forward = name == FORWARD
        try:
            yield
        finally:
            self._in_forward = False

    def _recorded(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(*args: Any) -> Tensor:
            loss = function(*args)
            self._recorder.add(LOSS, "loss", loss)
            return loss

        return recorded

    def _on_output(self, name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if not self._in_forward:  # computed again in backward
            return
        name = name or WHOLE
        for tensor in tensors_in(output):
            self._recorder.add(ACTIVATION, name, tensor)
            observe_gradients(tensor, lambda gradient: self._recorder.add(FLOW, name, gradient))

    def _on_gradient(self, name: str) -> Callable[[Tensor], None]:
        return lambda parameter: self._recorder.add(GRADIENT, name, parameter.grad)


def _each(captured: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """States of generators by name, those of several devices one by one."""
    for name, state in captured.items():
        if name == "cuda":
            yield from ((f"cuda:{index}", device) for index, device in enumerate(state))
        else:
            yield name, state
