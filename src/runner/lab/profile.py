"""Profile training steps of the real loop: where the time and the memory go."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from runner.base.errors import DiskFull, UserError
from runner.base.files import write_atomically, write_json
from runner.base.secrets import mask_words
from runner.config import stored
from runner.config.app import Composition
from runner.config.schema.verbs import Profile
from runner.data.workers import loader_in_ranges
from runner.engine.callbacks import LINES, Log
from runner.engine.errors import Diverged
from runner.engine.loop import Loop
from runner.engine.plan import Limits
from runner.engine.step import backward, forward, share_of, update_weights
from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT, step_in_ranges
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint, output_folder
from runner.run.metrics import build_callbacks
from runner.run.run import Run
from runner.runtime.core_wait import core_wait, waited_for_core
from runner.runtime.memory import Peak, memory_history, peak_memory, reset_peak_memory
from runner.tracking.environment import environment
from runner.tracking.formats import amount, compact, percent
from runner.tracking.verb_report import Report, mib
from runner.train import build_run, busy

DATA, HOST, DEVICE = "data", "host", "device"
_PART = {WAIT: DATA, PREPARE: DATA, FORWARD: DEVICE, BACKWARD: DEVICE, OPTIMIZER: DEVICE}
_UNUSUAL = 10  # times the median


class Ranges:
    """Shows ranges to Nsight (NVTX) and to `torch.profiler`, and measures how much of a step is data, host and device.

    On CUDA, times are those between events on the compute stream, so that nothing waits for the device until `steps` is
    called. Work on other streams, such as copying the next batch, takes no time unless the compute stream waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.annotate = False  # whether torch.profiler sees the ranges
        self._device, self._cuda = device, device.type == "cuda"
        self._inside = HOST
        self._marks: list[tuple[str, Any]] = []  # what begins, and when
        self._step = contextlib.ExitStack()  # the range of the step in the trace

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context for a range."""
        outer = self._inside
        nvtx = torch.cuda.nvtx.range(name) if self._cuda else contextlib.nullcontext()
        with torch.profiler.record_function(name) if self.annotate else contextlib.nullcontext(), nvtx:
            self._begin(_PART[name])
            yield
            self._begin(outer)

    def boundary(self, last: bool = False) -> None:
        """A step ends, and the next one begins unless this was the `last`."""
        self._begin(HOST, step=True)
        self._step.close()
        if self.annotate and not last:
            self._step.enter_context(torch.profiler.record_function("step"))

    def reset(self) -> None:
        """Forget all steps; the next one begins now."""
        self._marks.clear()
        self.boundary()

    def steps(self) -> list[Counter[str]]:
        """Seconds of data, host and device of each step; waits for a CUDA device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        found = list[Counter[str]]()
        for (name, began), (_, ended) in itertools.pairwise(self._marks):
            if name == "step":
                found.append(Counter())
            seconds = began.elapsed_time(ended) / 1000 if self._cuda else ended - began
            found[-1][HOST if name == "step" else name] += seconds
        return found

    def _begin(self, part: str, step: bool = False) -> None:
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            moment.record(torch.cuda.current_stream(self._device))
        self._inside = part
        self._marks.append(("step" if step else part, moment))


class Measurement:
    """A callback that leads a loop through the phases and ends it; must be the last in the list."""

    def __init__(self, config: Profile, device: torch.device, folder: Path, tell: Callable[[str], None]) -> None:
        self.ranges = Ranges(device)
        self.steps: list[Counter[str]] = []  # seconds of data, host and device of timed steps, but for `unusual` ones
        self.samples = 0  # trained on in these
        self.unusual: list[float] = []  # seconds of timed steps that computed many times longer than the others
        self.peak = Peak(0, "")
        self.profiler: Any = None  # holds the trace; None if none was wanted
        self.snapshot: Path | None = None  # file with the memory history of one step, on CUDA
        self.counts: dict[str, int] = {}  # steps of each phase
        self.cut: list[str] = []  # phases that ended early, as the time was up
        self._config, self._device, self._folder, self._tell = config, device, folder, tell
        self.phases = self._phases()
        self._samples: list[int] = []  # seen before each step of a phase

    def _phases(self) -> Generator[tuple[str, int, float]]:
        """Yields name, steps, and when the phase ends at the latest, as a share of the time there is."""
        cuda = self._device.type == "cuda"
        # The first steps allocate, tune and compile, which is not what later ones cost
        yield "warm-up", self._config.warmup_steps, 0.3
        # Timed without the profiler, whose overhead is largest in small steps
        reset_peak_memory(self._device)
        yield "timing", self._config.steps, 0.7
        self.peak = peak_memory(self._device)
        self._take(self.ranges.steps(), [after - before for before, after in itertools.pairwise(self._samples)])
        if self._config.trace_steps:
            kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
            # The profiler records few steps, as its trace grows quickly
            with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as self.profiler:
                self.ranges.annotate = True
                yield "tracing", self._config.trace_steps, 0.9
                self.ranges.annotate = False
                if cuda:
                    torch.cuda.synchronize(self._device)
        if cuda:  # recording stacks slows a step down, so that memory has a step of its own
            with memory_history(self._folder / "memory.pickle") as self.snapshot:
                yield "memory", 1, 1.0

    def _take(self, steps: list[Counter[str]], samples: list[int]) -> None:
        # A smaller batch may be compiled or tuned for; waiting for data makes no step unusual
        limit = _UNUSUAL * statistics.median(step[DEVICE] for step in steps)
        self.unusual = [step.total() for step in steps if step[DEVICE] > limit]
        self.steps = [step for step in steps if step[DEVICE] <= limit]
        self.samples = sum(count for step, count in zip(steps, samples, strict=True) if step[DEVICE] <= limit)

    def shares(self) -> dict[str, float]:
        """Data, host and device as shares of a step; on a GPU that was traced, the time between its kernels is the host's."""
        sums = sum(self.steps, Counter[str]())
        shares = {part: sums[part] / sums.total() for part in (DATA, HOST, DEVICE)}
        events = self.profiler.key_averages() if self.profiler is not None else []
        kernels = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
        if kernels:
            busy = sum(event.self_device_time_total for event in kernels) / 1e6 / self.counts["tracing"]
            shares[DEVICE] = min(busy / (sums.total() / len(self.steps)), 1 - shares[DATA])
            shares[HOST] = 1 - shares[DATA] - shares[DEVICE]
        return shares

    def on_start(self, loop: Loop) -> None:
        """Begin the first phase."""
        self._began = time.perf_counter()
        self._next(loop)

    def on_boundary(self, loop: Loop) -> None:
        """Count a step; go on to the next phase when this one has had its steps or its time."""
        self._samples.append(loop.samples_seen)
        done, late = len(self._samples) - 1, time.perf_counter() - self._began > self._deadline * self._config.budget_s
        over = late or done == self._steps
        self.ranges.boundary(last=over)
        if over:
            self.counts[self._phase] = done
            if done < self._steps:
                self.cut.append(self._phase)
            self._next(loop)

    def _next(self, loop: Loop) -> None:
        for phase in self.phases:
            self._phase, self._steps, self._deadline = phase
            if self._steps:
                self._tell(f"{self._phase}: {amount(self._steps, 'step')}")
                self._samples = [loop.samples_seen]
                self.ranges.reset()
                return
        loop.request_stop("everything is measured")


def measure(config: Profile, training: Run, folder: Path, tell: Callable[[str], None]) -> Measurement:
    """Train a few steps as `train` does, without checkpoints and evaluations, and measure them."""
    found = Measurement(config, training.device, folder, tell)
    # Callbacks and logging are part of a step as `train` makes it, so they take part
    extra = build_callbacks(config, training.task, training.monitor)
    # The few steps of a profile are logged as rarely as those of the whole run
    whole = Limits(config.epochs, config.max_steps).total_steps(training.plan)
    every = max(1, whole // LINES) if config.log.every_steps == "auto" else config.log.every_steps
    loop = Loop(
        training.state,
        loader_in_ranges(training.data.train.loader, found.ranges, max(1, config.steps * config.accumulate // 5)),
        training.plan,
        parts=training.parts,
        limits=Limits(None, training.total_steps),
        evaluate=None,
        callbacks=[*extra.values(), Log(every, []), found],
        monitor=training.monitor,
        step=step_in_ranges(found.ranges, forward, share_of, backward, update_weights),
    )
    try:
        with contextlib.closing(found.phases):  # stops what is still recording, after an error
            loop.run()
    except Diverged as error:
        raise UserError(f"{error}; a run that does not train cannot be profiled: lower optimizer.lr") from error
    return found


def run(composition: Composition) -> float:
    """Profile training steps.

    Returns:
        Samples a second, for sweepers.
    """
    config, found = config_and_checkpoint(composition, Profile)
    report = Report(config.json)
    steps = config.warmup_steps + config.steps + config.trace_steps + 1
    # A schedule has to reach as far as there are steps; nothing else depends on how long the run would be.
    shortened = dataclasses.replace(config, epochs=None, max_steps=steps)
    # Without a checkpoint, the profile begins as a new run would
    own = found is None
    training = build_run(shortened, make_cache=own, fresh=own)
    built = training.config  # with what comes from the data
    config = dataclasses.replace(config, data=built.data, task=built.task, model=built.model)
    with contextlib.closing(training.data):
        folder = output_folder(
            config.output, composition.job_dir or composition.run_dir, config.output_root, "profiles"
        )
        report.header(f"profile of {config.name}  seed {config.seed}  {folder}", describe(config, training))
        report.warnings(found.warnings if found else [], training.warnings)
        since = time.perf_counter(), waited_for_core()
        measured = measure(config, training, folder, report.line)
        waited = core_wait(since)
    record = {"overrides": mask_words(composition.overrides), **_record(config, training, measured)}
    _write(folder, record, measured, stored.dump(config))
    if not report.json(record, folder=str(folder)):
        _show(report, record)
        report.lines(
            *busy(waited), *(f"{part}: {percent(share)} of a step" for part, share in record["shares"].items())
        )
        report.folder(folder)
    return float(record["samples_per_s"])


def _record(config: Profile, training: Run, measured: Measurement) -> dict[str, Any]:
    """The content of `profile.json`, as plain containers."""
    device, seconds = training.device, [step.total() for step in measured.steps]
    times = {"mean": statistics.fmean(seconds), "median": statistics.median(seconds)}
    times |= {"min": min(seconds), "max": max(seconds)}
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "precision": training.precision.name,
        "batch_size": config.data.batch_size,
        "accumulate": config.accumulate,
        "steps": measured.counts,
        "cut_short": measured.cut,
        "unusual_steps_ms": [taken * 1000 for taken in measured.unusual],
        "step_ms": {name: taken * 1000 for name, taken in times.items()},
        "samples_per_s": measured.samples / sum(seconds),
        "shares": measured.shares(),
        "peak_bytes": measured.peak.bytes,
        "peak_is": measured.peak.what,
    }


def _show(report: Report, record: dict[str, Any]) -> None:
    counts, unusual, step = record["steps"], record["unusual_steps_ms"], record["step_ms"]
    report.lines(
        *(f"{phase} ended after {counts[phase]} steps, because budget_s is used up" for phase in record["cut_short"])
    )
    # Unusual steps would shift the mean, so they are reported and not counted
    if unusual:
        report.line(
            f"skipped: {len(unusual)} of {counts['timing']} steps, which took up to {max(unusual):,.0f} ms "
            "(compiling or tuning for a batch of another size, or another program on this machine)"
        )
    report.lines(
        f"written: {', '.join(record['files'])}",
        f"peak memory: {mib(record['peak_bytes'])} MiB, {record['peak_is']}",
        f"step: mean {step['mean']:.3f} ms, median {step['median']:.3f} ms, {compact(record['samples_per_s'])} samples/s",
    )


def _write(folder: Path, record: dict[str, Any], measured: Measurement, config: str) -> None:
    written = [measured.snapshot.name] if measured.snapshot is not None else []
    if measured.profiler is not None:
        _write_trace(measured.profiler, folder / "trace.json")
        averages = measured.profiler.key_averages()
        order = "self_device_time_total" if record["device"].startswith("cuda") else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=100, max_name_column_width=72)
        write_atomically(folder / "ops.txt", table.encode(), named=True)
        written += ["trace.json", "ops.txt"]
    write_atomically(folder / "config.yaml", config.encode(), named=True)
    record |= {"files": [*written, "config.yaml"], "environment": environment()}
    # It comes last, so that where it is, the others are.
    write_json(folder / "profile.json", record, named=True)


def _write_trace(profiler: Any, path: Path) -> None:
    """Write a trace; torch says nothing when it cannot, and leaves a part of it under another name.

    Raises:
        DiskFull: if there is no trace afterwards.
    """
    try:
        profiler.export_chrome_trace(str(path.resolve()))
    finally:
        path.resolve().with_name(f"{path.name}.tmp").unlink(missing_ok=True)
    if not path.is_file():
        raise DiskFull(f"torch could not write {path}: is the disk full? Free some space, or set output=FOLDER")
