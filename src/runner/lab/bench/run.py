"""`bench`: the toggles, compared on this machine."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runner.base.cores import cores
from runner.base.errors import first_line
from runner.base.files import write_json
from runner.base.secrets import mask_words
from runner.config.app import Composition
from runner.config.schema.verbs import Bench
from runner.config.sources import Sources
from runner.config.targets import called
from runner.data.workers import WorkerLoader
from runner.lab.bench.candidate_runner import CANNOT, CandidateRunner, Workbench, room_for, timed
from runner.lab.bench.candidates import BASELINE, Candidate, RunTraits, candidates
from runner.lab.bench.stats import Result, paying, recommended
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint, output_folder
from runner.runtime.stopwatch import core_wait, waited_for_core
from runner.tracking.environment import environment
from runner.tracking.formats import amount, number
from runner.tracking.plots import bars
from runner.tracking.verb_report import Report, mib
from runner.train import busy


def run(composition: Composition) -> float:
    """Compare the config with each toggle.

    Returns:
        Samples a second of what is recommended, for sweepers.
    """
    config, _ = config_and_checkpoint(composition, Bench)
    report = Report(config.json)
    bench, since = Workbench(config, composition), (time.perf_counter(), waited_for_core())
    # Toggles change switches of the whole process, so they are put back whatever happens
    try:
        results, best, found = Comparison(config, bench, report, composition.sources).run()
    finally:
        bench.close()
        # torch's switches are set again, for the next job of a sweep or of this process
        CandidateRunner(bench).configure()
    folder = output_folder(None, composition.job_dir or composition.run_dir, config.output_root, "benchmarks")
    picture, path = folder / "bench.png", folder / "bench.json"
    names, speeds = [result.candidate.name for result in results], [result.samples_per_s for result in results]
    spreads = [(speed.median, speed.low, speed.high) for speed in speeds]
    title = f"{config.name}, {called(config.model['_target_'], config.model.get('name'))} on {found['device']}"
    bars(names, spreads, spreads[0][0], "samples/s, median and quartiles", target=picture, title=title)
    record: dict[str, Any] = {"overrides": mask_words(composition.overrides), **found}
    record |= {"environment": environment(), "written": [str(path), str(picture)]}
    write_json(path, record)
    if not report.json(record):
        report.line(f"recommended: {' '.join(best.candidate.words) or 'nothing to change'}")
        report.lines(*busy(core_wait(since)))
        report.folder(folder)
    return best.samples_per_s.median


_FEWEST_ROUNDS = 3  # however long they take: fewer say nothing
_LEAST_S, _MOST_STEPS = 0.2, 200  # of a measurement


class Comparison:
    """Measures candidates in turns with the baseline, until the time is over."""

    def __init__(self, config: Bench, bench: Workbench, report: Report, sources: Sources) -> None:
        self._config, self._bench, self._report = config, bench, report
        self._deadline = time.perf_counter() + config.budget_s
        self._results: dict[str, Result] = {}  # the baseline first
        self._notes: list[str] = []
        first = CandidateRunner(bench)
        # Two steps load kernels and libraries, which would count against whoever comes first.
        timed(first.training, first.loader, 2)
        report.header(f"{config.name}  as configured", describe(config, first.training))
        report.warnings(first.training.warnings)
        bench.keep_statistics(first.training.data)
        self._baseline = CandidateRunner(bench)
        self._candidates, self._skipped = candidates(config, traits_of(self._baseline), sources)
        self._keep = True  # whether a candidate stays in memory after its turn

    def run(self) -> tuple[list[Result], Result, dict[str, Any]]:
        """Measure everything that there is time for, and show it.

        Returns:
            The results, the baseline first, then the fastest; which of them is recommended; and a record of it all.
        """
        self._report.line(f"measuring {amount(len(self._candidates), 'candidate')} in turns with it")
        # The baseline comes first: every ratio is one to it
        first = self._results[BASELINE.name] = self._baseline.first_steps(self._config.steps)
        # What takes a few milliseconds measures the scheduler of the system more than the steps.
        self._steps = max(self._config.steps, min(_MOST_STEPS, math.ceil(_LEAST_S / (first.first_s * first.samples))))
        # Candidates that fit into memory stay built, so that a round does not build them again
        self._keep = room_for(self._baseline, len(self._candidates) + 1)
        # Toggles alone first: which of them to combine follows from what they gain.
        self._compare(self._candidates)
        if self._config.combine:
            self._compare(self._combinations())
        reference, *others = self._results.values()
        # The best first, as that is what a reader looks for
        results = [reference, *sorted(others, key=lambda result: -result.ratio.median)]
        best = recommended(others) or reference
        self._show(results)
        baseline, *records = map(_record, results)
        record = {
            "device": str(self._baseline.device),
            "recommended": list(best.candidate.words),
            "left_out": [{"what": what, "why": why} for what, why in self._skipped],
            "notes": self._notes,
            "steps": self._steps,
            "baseline": baseline,
            "candidates": records,
        }
        return results, best, record

    def _compare(self, tried: Sequence[Candidate]) -> None:
        runners = [runner for candidate in tried if (runner := self._try(candidate)) is not None]
        # Nothing to compare, and the baseline has been measured
        if not runners and self._results[BASELINE.name].seconds:
            return
        # Each once a round, so that a change of the machine's speed affects all alike.
        with self._report.counting("bench", self._config.repeats * (1 + len(runners))) as begin:
            for done in range(self._config.repeats):
                # A few rounds are made in any case, or there would be no spread
                if done >= _FEWEST_ROUNDS and time.perf_counter() > self._deadline:
                    self._notes.append(f"{done} measurements instead of {self._config.repeats}, because time ran out")
                    break
                usual = self._turn(self._baseline, None, begin)
                # One that fails late, for example out of memory, is dropped, and the others go on
                for runner in list(runners):
                    try:
                        self._turn(runner, usual, begin)
                    except CANNOT as error:
                        self._results.pop(runner.name)
                        self._skipped.append((runner.name, first_line(error)))
                        runner.release()
                        runners.remove(runner)
        for runner in runners:
            runner.release()

    def _try(self, candidate: Candidate) -> CandidateRunner | None:
        """A candidate after its first steps; None if it cannot be run, or there is no time."""
        why = "no time was left; set a larger budget_s, or fewer steps"
        if time.perf_counter() <= self._deadline:
            try:
                runner = CandidateRunner(self._bench, candidate)
                usual = self._results[BASELINE.name].first_s
                self._results[runner.name] = runner.first_steps(self._config.steps, usual)
                if not self._keep:
                    runner.release()
                return runner
            except CANNOT as error:
                why = first_line(error)
        self._skipped.append((candidate.name, why))
        return None

    def _turn(self, runner: CandidateRunner, usual: float | None, begin: Callable[[str], None]) -> float:
        """Measure a candidate, beside a baseline that took `usual` seconds a sample, or the baseline itself."""
        begin(runner.name)
        seconds, result = runner.measure(self._steps), self._results[runner.name]
        result.seconds.append(seconds)
        result.ratios.append((usual or seconds) / seconds)
        if not self._keep:
            runner.release()
        return seconds

    def _combinations(self) -> list[Candidate]:
        """The two toggles that pay most, together, then with the third, and so on."""
        found: list[Candidate] = []
        for result in paying(self._results.values()):
            if not found:
                found.append(result.candidate)
            elif not found[-1].clashes(result.candidate):
                found.append(found[-1].combined(result.candidate))
        return found[1:]

    def _show(self, results: list[Result]) -> None:
        reference, report = results[0], self._report
        memory = "peak MiB" if self._baseline.device.type == "cuda" else "peak RSS MiB"
        columns: dict[str, Callable[[Result], str]] = {
            "overrides": lambda result: result.candidate.name,
            "samples/s": lambda result: number(result.samples_per_s.median),
            "step ms": lambda result: number(result.step_ms.median),
            "quartiles": lambda result: f"{number(result.step_ms.low)} to {number(result.step_ms.high)}",
            "ratio": lambda result: f"{result.ratio.median:.2f}",
            memory: lambda result: mib(result.peak_bytes, 1),
            "saved MiB": lambda result: "" if result.saved_bytes is None else mib(result.saved_bytes),
            "loss": lambda result: number(result.loss),
            "start s": lambda result: f"{result.start_s:.2f}",
            "verdict": lambda result: "" if result is reference else result.verdict or "pays",
        }
        rows = [[cell(result) for cell in columns.values()] for result in results]
        report.table(f"medians of alternating measurements of {self._steps} steps each", [*columns], rows)
        report.line(f"losses are means over the first {self._config.steps} steps")
        report.skipped(self._skipped)
        report.lines(*(f"note: {note}" for note in self._notes))


def _record(result: Result) -> dict[str, Any]:
    return {
        "kind": result.candidate.kind,
        "overrides": list(result.candidate.words),
        "settings": result.candidate.settings,
        "samples_per_s": dataclasses.asdict(result.samples_per_s),
        "step_ms": dataclasses.asdict(result.step_ms),
        "ratio": dataclasses.asdict(result.ratio),
        "ratios": result.ratios,
        "verdict": result.verdict,
        "seconds_per_sample": result.seconds,
        "peak_memory_bytes": result.peak_bytes,
        "saved_bytes": result.saved_bytes,
        "loss": result.loss,
        "start_s": result.start_s,
    }


def traits_of(baseline: CandidateRunner) -> RunTraits:
    """The properties of a built baseline that decide which toggles apply."""
    training, loader = baseline.training, baseline.loader
    precisions: dict[torch.dtype | None, bool | str] = {None: False, torch.bfloat16: "bf16", torch.float16: "fp16"}
    return RunTraits(
        device=training.device.type,
        cores=cores(),
        threads=torch.get_num_threads(),
        precision=precisions[training.precision.dtype],
        workers=loader.workers if isinstance(loader, WorkerLoader) else None,
        kernels=training.kernels.arguments,
        convolutions=any(parameter.ndim == 4 for parameter in training.model.parameters()),
    )
