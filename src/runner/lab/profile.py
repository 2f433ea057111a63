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
from runner.config.composition import Composition
from runner.config.schema.verbs import Profile
from runner.data.workers import loader_in_ranges
from runner.engine.callbacks import LINES, Log
from runner.engine.errors import Diverged
from runner.engine.loop import Loop
from runner.engine.plan import Limits
from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT, step_in_ranges
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint, output_folder
from runner.run.metrics import build_callbacks
from runner.run.run import Run
from runner.runtime.hardware_metrics import core_wait, waited_for_core
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
    extra = build_callbacks(config, training.task, training.monitor, training.scalars)
    # The few steps of a profile are logged as rarely as those of the whole run
    whole = Limits(config.epochs, config.max_steps).total_steps(training.plan)
    every = max(1, whole // LINES) if config.log.every_steps == "auto" else config.log.every_steps
    loop = Loop(
        step_in_ranges(training.step, found.ranges),
        loader_in_ranges(training.data.train.loader, found.ranges, max(1, config.steps * config.accumulate // 5)),
        training.plan,
        limits=Limits(None, training.total_steps),
        evaluate=None,
        callbacks=[*extra.values(), Log(every, []), found],
        monitor=training.monitor,
        directory=folder,
    )
    try:
        with contextlib.closing(found.phases):  # stops what is still recording, after an error
            loop.run()
    except Diverged as error:
        raise UserError(f"{error}; a run that does not train cannot be profiled: lower optimizer.lr") from error
    return found


def run(composition: Composition) -> float:
    """Profile training steps; returns samples a second, for sweepers."""
    config, found = config_and_checkpoint(composition, Profile)
    report = Report(config.json)
    steps = config.warmup_steps + config.steps + config.trace_steps + 1
    # A schedule has to reach as far as there are steps; nothing else depends on how long the run would be.
    shortened = dataclasses.replace(config, epochs=None, max_steps=steps)
    # Without a checkpoint, the profile begins as a new run would
    training = build_run(shortened, make_cache=found is None, fresh=found is None)
    built = training.config  # with what comes from the data
    config = dataclasses.replace(config, data=built.data, task=built.task, model=built.model)
    with contextlib.closing(training.data):
        given = composition.job_dir or composition.run_dir
        folder = output_folder(config.output, given, config.output_root, "profiles")
        report.header(f"profile of {config.name}  seed {config.seed}  {folder}", describe(config, training))
        report.warnings(found.warnings if found else [], training.warnings)
        since = time.perf_counter(), waited_for_core()
        measured = measure(config, training, folder, report.line)
        waited = core_wait(since)
    device, ms = training.device, [1000 * step.total() for step in measured.steps]
    step = {"mean": statistics.fmean(ms), "median": statistics.median(ms), "min": min(ms), "max": max(ms)}
    record: dict[str, Any] = {
        "overrides": mask_words(composition.overrides),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "precision": training.precision.name,
        "batch_size": config.data.batch_size,
        "accumulate": config.accumulate,
        "steps": measured.counts,
        "cut_short": measured.cut,
        "unusual_steps_ms": [taken * 1000 for taken in measured.unusual],
        "step_ms": step,
        "samples_per_s": measured.samples / sum(each.total() for each in measured.steps),
        "shares": measured.shares(),
        "peak_bytes": measured.peak.bytes,
        "peak_is": measured.peak.what,
        "files": _write(folder, measured, stored.dump(config), device),
        "environment": environment(),
    }
    # It comes last, so that where it is, the others are.
    write_json(folder / "profile.json", record, named=True)
    if report.json(record, folder=str(folder)):
        return float(record["samples_per_s"])
    late = "because budget_s is used up"
    report.lines(*(f"{phase} ended after {measured.counts[phase]} steps, {late}" for phase in measured.cut))
    # Unusual steps would shift the mean, so they are reported and not counted
    if unusual := record["unusual_steps_ms"]:
        why = "compiling or tuning for a batch of another size, or another program on this machine"
        longest = f"which took up to {max(unusual):,.0f} ms"
        report.line(f"skipped: {len(unusual)} of {measured.counts['timing']} steps, {longest} ({why})")
    report.lines(
        f"written: {', '.join(record['files'])}",
        f"peak memory: {mib(measured.peak.bytes)} MiB, {measured.peak.what}",
        f"step: mean {step['mean']:.3f} ms, median {step['median']:.3f} ms, {compact(record['samples_per_s'])} samples/s",
        *busy(waited),
        *(f"{part}: {percent(share)} of a step" for part, share in record["shares"].items()),
    )
    report.folder(folder)
    return float(record["samples_per_s"])


def _write(folder: Path, measured: Measurement, config: str, device: torch.device) -> list[str]:
    """Write trace, table of operations and config; returns the names of the files."""
    written = [measured.snapshot.name] if measured.snapshot is not None else []
    if measured.profiler is not None:
        trace = (folder / "trace.json").resolve()  # torch renames a file, and would replace a link
        try:
            measured.profiler.export_chrome_trace(str(trace))
        finally:  # torch says nothing when it cannot, and leaves a part of it under another name
            trace.with_name(f"{trace.name}.tmp").unlink(missing_ok=True)
        if not trace.is_file():
            why = "is the disk full? Free some space, or set output=FOLDER"
            raise DiskFull(f"torch could not write {folder / 'trace.json'}: {why}")
        order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = measured.profiler.key_averages().table(sort_by=order, row_limit=100, max_name_column_width=72)
        write_atomically(folder / "ops.txt", table.encode(), named=True)
        written += ["trace.json", "ops.txt"]
    write_atomically(folder / "config.yaml", config.encode(), named=True)
    return [*written, "config.yaml"]
