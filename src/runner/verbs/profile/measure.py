"""Steps of the real loop, measured in phases: warm-up, timing, tracing, memory."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from runner.build.metrics import build_callbacks
from runner.build.run import Run
from runner.config.errors import UserError
from runner.config.schema.profile import Profile
from runner.data.profiler_ranges import loader_in_ranges
from runner.engine.callbacks import Log
from runner.engine.errors import Diverged
from runner.engine.loop import Loop
from runner.engine.plan import Limits
from runner.engine.step import backward, forward, update_weights
from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, step_in_ranges
from runner.instrument.saved_tensors import SavedTensors
from runner.runtime.memory import Peak, memory_history, peak_memory, reset_peak_memory
from runner.runtime.stopwatch import Step, Stopwatch

_MEMORY_STEPS = 1
_UNUSUAL = 10  # times the median
# When a phase ends at the latest, as a share of the time there is.
_DEADLINES = {"warm-up": 0.3, "timing": 0.7, "tracing": 0.9, "memory": 1.0}


@dataclass
class Measured:
    """What the phases found.

    Attributes:
        steps: those of the timed phase, but for `unusual` ones.
        samples: trained on in these.
        unusual: seconds of timed steps whose computing took many times longer than that of the others, as when a batch
            of another size is compiled or tuned for; waiting for data makes no step unusual.
        peak: memory at most in that phase.
        saved: what the graph kept in one step; None for a compiled model, whose graph cannot be observed.
        traced: steps in the trace.
        profiler: holds the trace; None if none was wanted.
        snapshot: file with the memory history of one step, on CUDA.
        counts: steps of each phase.
        cut: phases that were ended early, as the time was up.
    """

    steps: list[Step] = field(default_factory=list)
    samples: int = 0
    unusual: list[float] = field(default_factory=list)
    peak: Peak = field(default_factory=lambda: Peak(0, ""))
    saved: SavedTensors | None = None
    traced: int = 0
    profiler: Any = None
    snapshot: Path | None = None
    counts: dict[str, int] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)

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


@dataclass
class _Phase:
    """Steps between two calls."""

    name: str
    steps: int
    begin: Callable[[], None]
    end: Callable[[Loop], None]


class Phases:
    """A callback that runs a loop through the phases and ends it; must be the last in the list."""

    def __init__(
        self, config: Profile, training: Run, stopwatch: Stopwatch, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self.found = Measured()
        self._config, self._training, self._watch, self._folder, self._tell = config, training, stopwatch, folder, tell
        phases = [
            _Phase("warm-up", config.warmup_steps, lambda: None, lambda loop: None),
            _Phase("timing", config.steps, self._begin_timing, self._end_timing),
            _Phase("tracing", config.trace_steps, self._begin_tracing, self._end_tracing),
            _Phase("memory", _MEMORY_STEPS, self._begin_memory, self._end_memory),
        ]
        self._phases = [phase for phase in phases if phase.steps]
        self._done = 0
        self._samples: list[int] = []
        self._context = contextlib.ExitStack()

    @property
    def steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self._phases)

    def on_start(self, loop: Loop) -> None:
        """Begin the first phase."""
        self._began = time.perf_counter()
        self._begin(loop)

    def on_boundary(self, loop: Loop) -> None:
        """Count a step; go on to the next phase when this one has had its steps or its time."""
        self._done += 1
        self._samples.append(loop.samples_seen)
        phase = self._phases[0]
        late = time.perf_counter() - self._began > _DEADLINES[phase.name] * self._config.budget_s
        over = late or self._done == phase.steps
        self._watch.boundary(last=over)
        if not over:
            return
        self.found.counts[phase.name] = self._done
        if self._done < phase.steps:
            self.found.cut.append(phase.name)
        phase.end(loop)
        self._phases.pop(0)
        if self._phases:
            self._begin(loop)
        else:
            loop.request_stop("everything is measured")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop what is still recording, after an error."""
        self._context.__exit__(kind, error, traceback)

    def __enter__(self) -> Phases:
        return self

    def _begin(self, loop: Loop) -> None:
        phase = self._phases[0]
        self._tell(f"{phase.name}: {phase.steps} step{'s' if phase.steps > 1 else ''}")
        self._done, self._samples = 0, [loop.samples_seen]
        phase.begin()
        self._watch.reset()
        self._watch.boundary()

    def _begin_timing(self) -> None:
        reset_peak_memory(self._training.device)

    def _end_timing(self, loop: Loop) -> None:
        counts = [after - before for before, after in itertools.pairwise(self._samples)]
        self.found.take(self._watch.steps(), counts)
        self.found.peak = peak_memory(self._training.device)

    def _begin_tracing(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._training.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self.found.profiler = torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True)
        self._context.enter_context(self.found.profiler)
        self._watch.annotate = True

    def _end_tracing(self, loop: Loop) -> None:
        self._watch.annotate = False
        self._watch.reset()
        if self._training.device.type == "cuda":
            torch.cuda.synchronize(self._training.device)
        self._context.close()
        self.found.traced = self._done

    def _begin_memory(self) -> None:
        if self._training.device.type == "cuda":
            self.found.snapshot = self._context.enter_context(memory_history(self._folder / "memory.pickle"))
        if not self._config.compile:
            self.found.saved = self._context.enter_context(SavedTensors(self._training.model))

    def _end_memory(self, loop: Loop) -> None:
        self._context.close()


def measure(config: Profile, training: Run, folder: Path, tell: Callable[[str], None]) -> Measured:
    """Train a few steps as `train` does, without checkpoints and evaluations, and measure them.

    Raises:
        UserError: if the loss is not finite.
    """
    stopwatch = Stopwatch(training.device)
    phases = Phases(config, training, stopwatch, folder, tell)
    extra = build_callbacks(config, training.task, training.monitor)
    at_once = max(1, config.steps * config.accumulate // 5)
    loop = Loop(
        training.state,
        loader_in_ranges(training.data.train.loader, stopwatch, at_once),
        training.plan,
        training.parts,
        Limits(None, phases.steps),
        None,
        [*extra.values(), Log(config.log.every_steps, []), phases],
        training.monitor,
        step=step_in_ranges(stopwatch, forward, backward, update_weights),
    )
    try:
        with phases:
            loop.run()
    except Diverged as error:
        raise UserError(f"{error}; a run that does not train cannot be profiled: lower optimizer.lr") from error
    return phases.found
