"""What each rank of a run holds, in bytes, for the summary; `runner.run.dry_run` predicts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from runner.distributed.sharding import local
from runner.distributed.world import world
from runner.instrument.nested import tensors_in
from runner.run.run import Run
from runner.run.run_record import RunRecord
from runner.runtime.memory import peak_memory, readable


class RankMemory:
    """A callback that counts the bytes that each rank holds: its shards, where tensors are divided among ranks.

    At the end of training the summary gets, for each rank, those of `parameters`, `gradients`, `optimizer` state and `buffers`,
    and the `peak` of `runner.runtime.memory.peak_memory`. Of a single process nothing is counted.
    """

    def __init__(self, run: Run, record: RunRecord) -> None:
        self._run, self._record, self._gradients = run, record, 0

    def on_start(self, loop: Any) -> None:
        """Have the first step count the gradients, which do not outlive it."""
        if world().size > 1:
            loop.parts = dataclasses.replace(loop.parts, on_gradients=self._count_gradients)

    def on_end(self, loop: Any) -> None:
        """Note what each rank holds."""
        if world().size == 1:
            return
        model, state = self._run.model, self._run.state.optimizer.state
        own = {
            "parameters": _bytes(model.parameters()),
            "gradients": self._gradients,
            "optimizer": _bytes(tensors_in([dict(each) for each in state.values()])),
            "buffers": _bytes(model.buffers()),
        }
        self._record.summary["memory"] = world().gather(own | {"peak": peak_memory(self._run.device).bytes})
        parts = ", ".join(f"{readable(size)} of {part}" for part, size in own.items())
        self._record.console.line(f"rank {world().rank} keeps {parts}")

    def _count_gradients(self) -> None:
        if not self._gradients:
            gradients = (parameter.grad for _, parameter in self._run.state.named_parameters())
            self._gradients = _bytes(gradient for gradient in gradients if gradient is not None)


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
