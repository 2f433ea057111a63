"""Steps of the real loop, measured in phases: warm-up, timing, tracing, memory."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runner.base.errors import UserError
from runner.config.schema.verbs import Profile
from runner.data.workers import loader_in_ranges
from runner.engine.callbacks import LINES, Log
from runner.engine.errors import Diverged
from runner.engine.loop import Loop
from runner.engine.plan import Limits
from runner.engine.step import backward, forward, share_of, update_weights
from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT, step_in_ranges
from runner.run.metrics import build_callbacks
from runner.run.run import Run
from runner.runtime.memory import Peak, memory_history, peak_memory, reset_peak_memory
from runner.runtime.stopwatch import Step, Stopwatch
from runner.tracking.formats import aligned, amount, percent
from runner.tracking.verb_report import mib

_UNUSUAL = 10  # times the median


@dataclass
class Measured:
    """The measurements of all phases."""

    steps: list[Step] = field(default_factory=list)  # those of the timed phase, but for `unusual` ones
    samples: int = 0  # trained on in these
    # Seconds of timed steps whose computing took many times longer than that of the others, as when a batch of another size
    # is compiled or tuned for; waiting for data makes no step unusual.
    unusual: list[float] = field(default_factory=list)
    peak: Peak = field(default_factory=lambda: Peak(0, ""))  # memory at most in that phase
    traced: int = 0  # steps in the trace
    profiler: Any = None  # holds the trace; None if none was wanted
    snapshot: Path | None = None  # file with the memory history of one step, on CUDA
    counts: dict[str, int] = field(default_factory=dict)  # steps of each phase
    cut: list[str] = field(default_factory=list)  # phases that were ended early, as the time was up

    @property
    def seconds(self) -> list[float]:
        """Of each of `steps`."""
        return [sum(step.seconds.values()) for step in self.steps]

    def take(self, steps: Sequence[Step], samples: Sequence[int]) -> None:
        """Add the steps of the timed phase, unusual ones separately."""
        computing = [sum(step.seconds.get(name, 0.0) for name in (FORWARD, BACKWARD, OPTIMIZER)) for step in steps]
        limit = _UNUSUAL * statistics.median(computing)
        for step, count, seconds in zip(steps, samples, computing, strict=True):
            if seconds > limit:
                self.unusual.append(sum(step.seconds.values()))
            else:
                self.steps.append(step)
                self.samples += count


class Phases:
    """A callback that leads a loop through the phases and ends it; must be the last in the list."""

    def __init__(
        self, config: Profile, training: Run, stopwatch: Stopwatch, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self.found = Measured()
        self._config, self._training, self._watch, self._folder, self._tell = config, training, stopwatch, folder, tell
        self.script = self._script()
        self._done = 0
        self._samples: list[int] = []

    def _script(self) -> Generator[tuple[str, int, float]]:
        """The phases: before each yield what it needs, after it what it found.

        Yields name, steps, and when the phase ends at the latest, as a share of the time there is.
        """
        config, training, watch, found = self._config, self._training, self._watch, self.found
        cuda = training.device.type == "cuda"
        # The first steps allocate, tune and compile, which is not what later ones cost
        yield "warm-up", config.warmup_steps, 0.3
        # Timed without the profiler, whose overhead is largest in small steps.
        reset_peak_memory(training.device)
        yield "timing", config.steps, 0.7
        found.take(watch.steps(), [after - before for before, after in itertools.pairwise(self._samples)])
        found.peak = peak_memory(training.device)
        if config.trace_steps:
            kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
            # The profiler records few steps, as its trace grows quickly
            with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as found.profiler:
                watch.annotate = True
                yield "tracing", config.trace_steps, 0.9
                watch.annotate = False
                watch.reset()
                if cuda:
                    torch.cuda.synchronize(training.device)
            found.traced = self._done
        path = self._folder / "memory.pickle"
        history = memory_history(path) if cuda else contextlib.nullcontext()
        with history:
            yield "memory", 1, 1.0
        found.snapshot = path if cuda else None

    def on_start(self, loop: Loop) -> None:
        """Begin the first phase."""
        self._began = time.perf_counter()
        self._next(loop)

    def on_boundary(self, loop: Loop) -> None:
        """Count a step; go on to the next phase when this one has had its steps or its time."""
        self._done += 1
        self._samples.append(loop.samples_seen)
        late = time.perf_counter() - self._began > self._deadline * self._config.budget_s
        over = late or self._done == self._steps
        self._watch.boundary(last=over)
        if over:
            self.found.counts[self._phase] = self._done
            if self._done < self._steps:
                self.found.cut.append(self._phase)
            self._next(loop)

    def _next(self, loop: Loop) -> None:
        for phase in self.script:
            self._phase, self._steps, self._deadline = phase
            if self._steps:
                self._tell(f"{self._phase}: {amount(self._steps, 'step')}")
                self._done, self._samples = 0, [loop.samples_seen]
                self._watch.reset()
                self._watch.boundary()
                return
        loop.request_stop("everything is measured")


def measure(config: Profile, training: Run, folder: Path, tell: Callable[[str], None]) -> Measured:
    """Train a few steps as `train` does, without checkpoints and evaluations, and measure them."""
    stopwatch = Stopwatch(training.device)
    phases = Phases(config, training, stopwatch, folder, tell)
    # Callbacks and logging are part of a step as `train` makes it, so they take part
    extra = build_callbacks(config, training.task, training.monitor)
    at_once = max(1, config.steps * config.accumulate // 5)
    # The few steps of a profile are logged as rarely as those of the whole run
    whole = Limits(config.epochs, config.max_steps).total_steps(training.plan)
    every = max(1, whole // LINES) if config.log.every_steps == "auto" else config.log.every_steps
    loop = Loop(
        training.state,
        loader_in_ranges(training.data.train.loader, stopwatch, at_once),
        training.plan,
        parts=training.parts,
        limits=Limits(None, training.total_steps),
        evaluate=None,
        callbacks=[*extra.values(), Log(every, []), phases],
        monitor=training.monitor,
        step=step_in_ranges(stopwatch, forward, share_of, backward, update_weights),
    )
    try:
        with contextlib.closing(phases.script):  # stops what is still recording, after an error
            loop.run()
    except Diverged as error:
        raise UserError(f"{error}; a run that does not train cannot be profiled: lower optimizer.lr") from error
    return phases.found


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
