"""What each rank of a run holds, in bytes, for the summary; `runner.build.dry_run` predicts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from runner.build.run import Run
from runner.distributed.world import world
from runner.engine.step import StepConfig
from runner.instrument.nested import tensors_in
from runner.runtime.memory import peak_memory, readable


class Held:
    """Counts the bytes that this rank holds: its shards, where tensors are divided among ranks.

    Args:
        run: what is trained.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._gradients = run, 0

    def parts(self) -> StepConfig:
        """The parts of a step, which count the gradients in the first one."""
        parts = self._run.parts
        return dataclasses.replace(parts, on_gradients=self._count_gradients) if world().size > 1 else parts

    def _count_gradients(self) -> None:
        if not self._gradients:
            gradients = (parameter.grad for _, parameter in self._run.state.named_parameters())
            self._gradients = _bytes(gradient for gradient in gradients if gradient is not None)

    def by_rank(self) -> list[dict[str, int]]:
        """For each rank the bytes of `parameters`, `gradients`, `optimizer` state and `buffers`, and its `peak`.

        The peak is that of `runner.runtime.memory.peak_memory`. All ranks have to call this together.
        """
        model, state = self._run.model, self._run.state.optimizer.state
        return world().gather(
            {
                "parameters": _bytes(model.parameters()),
                "gradients": self._gradients,
                "optimizer": _bytes(tensors_in([dict(each) for each in state.values()])),
                "buffers": _bytes(model.buffers()),
                "peak": peak_memory(self._run.device).bytes,
            }
        )


def held_by(rank: int, held: list[dict[str, int]]) -> str:
    """What a rank holds, for people."""
    parts = ", ".join(f"{readable(size)} of {part}" for part, size in held[rank].items() if part != "peak")
    return f"rank {rank} keeps {parts}"


def _bytes(tensors: Iterable[Any]) -> int:
    found: list[Tensor] = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in found)
