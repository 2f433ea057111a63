"""One of the two trainings that are compared: built, and run a step at a time while everything it computes is recorded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from torch import Tensor, nn

from runner.checkpoint import resume, rng
from runner.checkpoint.find import LoadedCheckpoint
from runner.config.schema.verbs import Audit
from runner.data.loaders import Batch
from runner.engine.loop import Loop
from runner.engine.plan import Limits
from runner.engine.position import Position
from runner.engine.step import backward, forward, share_of, update_weights
from runner.instrument.nested import fields_of, leaves_of, tensors_in
from runner.instrument.observer import Observer, observe_gradients
from runner.instrument.profiler_ranges import FORWARD, step_in_ranges
from runner.lab.audit.record import Entry, Phase, Recorder
from runner.run.hardware import set_switches
from runner.runtime.activation import is_switched_on, switch
from runner.train import build_run

# Share of the free memory that the record of a step may take, on each side.
_SHARE_KEPT = 0.15


class Side:
    """A training of which every step can be recorded; the source of batches of its own loop.

    Args:
        config: the config.
        found: checkpoint to start from; None for the beginning.
    """

    def __init__(self, config: Audit, found: LoadedCheckpoint | None = None) -> None:
        self.config = config
        start = resume.made_of(found, "position", Position) if found else None
        self.training = training = build_run(config, start, make_cache=found is None)
        self._recomputes = is_switched_on()
        if found:
            # A copy, as an optimizer takes the tensors of its state as they are, and the other side would share them.
            resume.restore(found._replace(contents=copy.deepcopy(found.contents)), training.state, {})
        training.state.position.evaluation_due = False
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in training.state.named_parameters()}
        self.epoch = 0  # of the latest batch
        self.samples, self.batch_size = training.data.train.loader.samples, training.data.train.loader.batch_size
        self._ahead: Iterator[Batch] = iter(())
        self._next: tuple[int, int] | None = None  # epoch and number of the batch that `_ahead` gives next
        self._recorder = Recorder(0)
        self._in_forward = False
        # The loss is recorded at its call, whether compiled or not
        parts = training.parts
        self._parts = dataclasses.replace(parts, equivalent=self._recorded(parts.equivalent or parts.objective))
        self._step = step_in_ranges(self._mark, forward, share_of, backward, update_weights)
        for parameter, name in self.names.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient(name))  # type: ignore[no-untyped-call]
        training.state.train()  # what is frozen for a while takes no hooks
        self._generators = rng.capture()

    @property
    def compiled(self) -> bool:
        """True if the model is compiled, so that its modules cannot be observed."""
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
        self._record(Phase.START, self.training.model.state_dict())
        self._record(Phase.START, {f"generator {name}": state for name, state in _each(self._generators)})
        return self._recorder.entries

    def step(self) -> list[Entry]:
        """Take an optimizer step; returns everything that it computed, in order."""
        self._begin()
        # torch's switches and all generators are as this side left them.
        set_switches(self.config, self.training.device)
        switch(self._recomputes)
        rng.restore(self._generators)
        state, plan, monitor = self.training.state, self.training.plan, self.training.monitor
        limits = Limits(None, state.position.global_step + 1)
        Loop(
            state,
            self,
            plan,
            parts=self._parts,
            limits=limits,
            evaluate=None,
            callbacks=[],
            monitor=monitor,
            step=self._step,
        ).run()
        self._record_state()
        self._generators = rng.capture()
        return self._recorder.entries

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        """The loader's batches, each recorded; workers read on from one step to the next."""
        if self._next != (epoch, start):
            self._ahead = self.training.data.train.loader.batches(epoch, start, stop)
        self.epoch = epoch
        for number, batch in enumerate(self._ahead):
            self._next = epoch, start + number + 1
            self._recorder.batch = number
            self._record(Phase.BATCH, {"indices": batch.indices, **fields_of(batch.data)})
            if others := [leaf for leaf in leaves_of(batch.data) if not isinstance(leaf, Tensor)]:
                self._record(Phase.BATCH, {"other values": others})
            self._record(Phase.DRAWN, dict(_each(rng.capture())))
            yield batch

    def close(self) -> None:
        """End worker processes."""
        self._ahead = iter(())
        self.training.data.close()

    def _begin(self) -> None:
        self._recorder = Recorder(int(_SHARE_KEPT * psutil.virtual_memory().available))

    def _record(self, phase: Phase, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self._recorder.add(phase, name, value)

    def _record_state(self) -> None:
        state = self.training.state
        self._record(Phase.WEIGHT, state.model.state_dict())
        for parameter, values in state.optimizer.state.items():
            named = {f"{self.names.get(parameter, '?')}.{key}": value for key, value in values.items()}
            self._record(Phase.OPTIMIZER, named)
        if state.scaler is not None:
            self._record(Phase.OPTIMIZER, {"scale of the loss": state.scaler.get_scale()})
        self._record(Phase.GENERATOR, dict(_each(rng.capture())))

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
            self._recorder.add(Phase.LOSS, "loss", loss)
            return loss

        return recorded

    def _on_output(self, name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if not self._in_forward:  # computed again in backward
            return
        name = name or "model"
        for tensor in tensors_in(output):
            self._recorder.add(Phase.ACTIVATION, name, tensor)
            observe_gradients(tensor, lambda gradient: self._recorder.add(Phase.FLOW, name, gradient))

    def _on_gradient(self, name: str) -> Callable[[Tensor], None]:
        return lambda parameter: self._recorder.add(Phase.GRADIENT, name, parameter.grad)


def _each(captured: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """States of generators by name, those of several devices one by one."""
    for name, state in captured.items():
        if name == "cuda":
            yield from ((f"cuda:{index}", device) for index, device in enumerate(state))
        else:
            yield name, state
