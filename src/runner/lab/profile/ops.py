"""The operations of the traced steps, as rows that can be sorted, written and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT
from runner.tracking.formats import aligned, percent
from runner.tracking.verb_report import mib

_RANGES = {"step", WAIT, PREPARE, FORWARD, BACKWARD, OPTIMIZER}
SMALL_OP_MS = 0.02
"""Operations on the CPU that are shorter cost about as much to call as to compute."""


@dataclass(frozen=True)
class Op:
    """All calls of one operation, or of one kernel of a GPU."""

    name: str  # as torch or the driver calls it
    kernel: bool  # whether it ran on a GPU
    calls: float  # how many, a step
    self_ms: float  # milliseconds a step, without operations that it calls
    total_ms: float  # milliseconds a step, theirs included; 0 for kernels
    memory_bytes: float  # allocated less freed in it, without theirs, a step


def ops_in(profiler: Any, steps: int) -> list[Op]:
    """The operations in a trace of so many steps, the most time first; without ranges."""
    found = []
    for event in profiler.key_averages():
        # Ranges of this program contain operations, and would be counted twice
        if event.key in _RANGES or getattr(event, "is_user_annotation", False) or event.key.startswith("[memory]"):
            continue
        kernel = event.device_type.name == "CUDA"
        found.append(
            Op(
                name=event.key,
                kernel=kernel,
                calls=event.count / steps,
                self_ms=(event.self_device_time_total if kernel else event.self_cpu_time_total) / 1000 / steps,
                total_ms=0.0 if kernel else event.cpu_time_total / 1000 / steps,
                memory_bytes=(event.self_cpu_memory_usage + event.self_device_memory_usage) / steps,
            )
        )
    return sorted(found, key=lambda op: -op.self_ms)


def small_share(ops: Sequence[Op]) -> float | None:
    """Share of the host's self time that goes into operations shorter than `SMALL_OP_MS`; None if there are none."""
    host = [op for op in ops if not op.kernel]
    total = sum(op.self_ms for op in host)
    small = sum(op.self_ms for op in host if op.self_ms < SMALL_OP_MS * op.calls)
    return small / total if total else None


def table_of(ops: Sequence[Op]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows; shares are of the self time of all of `ops`."""
    total = sum(op.self_ms for op in ops) or 1.0
    rows = [
        [
            op.name if len(op.name) <= 72 else op.name[:71] + "~",
            f"{op.calls:g}",
            f"{op.self_ms:.3f}",
            percent(op.self_ms / total),
            f"{op.total_ms:.3f}" if not op.kernel else "",
            mib(op.memory_bytes),
        ]
        for op in ops
    ]
    return ["operation", "calls", "self ms", "share", "total ms", "memory MiB"], rows


def text_of(ops: Sequence[Op], steps: int) -> str:
    """The tables as text: kernels of a GPU first, then what the host did."""
    parts = []
    for title, kernel in (("kernels of the GPU", True), ("operations on the host", False)):
        if some := [op for op in ops if op.kernel is kernel]:
            parts += [f"{title}, means of {steps} traced steps", *aligned(*table_of(some)), ""]
    return "\n".join(parts)
