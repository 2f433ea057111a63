"""What `bench` does: build the baseline, measure the candidates in turns with it, and report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from runner.build.describe import describe
from runner.config.cores import cores
from runner.config.errors import first_line
from runner.config.schema.verbs import Bench
from runner.config.sources import Sources
from runner.runtime.device import missing_compiler
from runner.runtime.precision import choose_precision
from runner.tracking.formats import number
from runner.verbs._report import Report
from runner.verbs.bench import stats
from runner.verbs.bench.candidate_runner import CANNOT, CandidateRunner, Workbench
from runner.verbs.bench.candidates import BASELINE, Candidate, Facts, Skipped, candidates
from runner.verbs.bench.stats import Result, Round, Sizes, Spread
from runner.verbs.bench.timing import run

_FEWEST_ROUNDS = 3


class BenchResult(NamedTuple):
    """What is written and returned."""

    record: dict[str, Any]  # for `bench.json`
    speeds: list[tuple[str, Spread]]  # samples a second by name, for the plot; the first is the reference
    best: float  # samples a second of what is recommended


class Comparison:
    """Measures candidates in turns with the baseline, within the time that there is."""

    def __init__(self, config: Bench, bench: Workbench, report: Report, sources: Sources) -> None:
        self.config, self.bench, self.report = config, bench, report
        self.deadline = time.perf_counter() + config.budget_s
        self.rounds: list[Round] = []
        self.results: dict[str, Result] = {}  # the baseline first
        self.notes: list[str] = []
        first = CandidateRunner(bench)
        # Two steps load kernels and libraries, which would count against whoever comes first.
        run(first.training, first.loader, 2)
        report.header(f"{config.name}  as configured", describe(config, first.training))
        report.warnings(first.training.warnings)
        bench.keep_statistics(first.training.data)
        self.baseline = CandidateRunner(bench)
        self.candidates: list[Candidate]
        self.skipped: list[Skipped]
        self.candidates, self.skipped = candidates(config, facts_of(self.baseline), sources)
        self.keep = True  # whether a candidate stays in memory after its turn

    def choose_sizes(self, step_s: float, build_s: float, compare: int, warmup: int, shares: float) -> Sizes:
        """How much to measure in one of so many shares of the time that is left."""
        config = self.config
        steps = config.steps or stats.usual_steps(step_s)
        wanted = Sizes(steps, min(warmup, steps), config.repeats, compare)
        sizes = wanted.within((self.deadline - time.perf_counter()) / shares, step_s, build_s)
        self.notes += stats.note_of_fewer(wanted, sizes, step_s, config.budget_s)
        return sizes

    def take_turns(
        self, runners: list[CandidateRunner], repeats: int, measure: Callable[[CandidateRunner], Round]
    ) -> None:
        """Measure each candidate once a round, so that a change of the machine's speed affects all alike.

        A candidate that fails is removed from `runners`.
        """
        with self.report.counting("bench", repeats * len(runners)) as begin:
            self._take_turns(runners, repeats, measure, begin)
        for runner in runners:
            result = self.results[runner.name]
            result.seconds = [turn[runner.name] for turn in self.rounds if runner.name in turn]
            result.ratios = stats.ratios(self.rounds, runner.name)

    def _take_turns(
        self,
        runners: list[CandidateRunner],
        repeats: int,
        measure: Callable[[CandidateRunner], Round],
        begin: Callable[[str], None],
    ) -> None:
        for done in range(repeats):
            if done >= _FEWEST_ROUNDS and time.perf_counter() > self.deadline:
                self.notes.append(f"{done} measurements instead of {repeats}, because time ran out")
                break
            turn: Round = {}
            for runner in list(runners):
                begin(runner.name)
                try:
                    turn |= measure(runner)
                except CANNOT as error:
                    if runner is self.baseline:
                        raise
                    self.drop(runner, first_line(error))
                    runners.remove(runner)
                if not self.keep:
                    runner.release()
            self.rounds.append(turn)

    def drop(self, runner: CandidateRunner, why: str) -> None:
        """Go on without a candidate."""
        self.results.pop(runner.name, None)
        self.skipped.append((runner.name, why))
        runner.release()

    def ranked(self) -> tuple[list[Result], Result]:
        """The results, the baseline first, then the fastest; and what is recommended, which may be the baseline."""
        reference, *others = self.results.values()
        others.sort(key=lambda result: -result.ratio.median)
        return [reference, *others], stats.recommended(others) or reference

    def verdict_text(self, result: Result) -> str:
        """The verdict for people; of the baseline there is none."""
        return "" if result.candidate is BASELINE else result.verdict or "pays"

    def finish(
        self, lines: list[str], record: dict[str, Any], best: Result, speeds: list[tuple[str, Spread]]
    ) -> BenchResult:
        """Show sentences, what was skipped and notes, and complete the record."""
        self.report.lines(*lines)
        self.report.skipped(self.skipped)
        self.report.lines(*(f"note: {note}" for note in self.notes))
        common = {
            "device": str(self.baseline.device),
            "recommended": list(best.candidate.words),
            "left_out": [{"what": what, "why": why} for what, why in self.skipped],
            "notes": self.notes,
        }
        return BenchResult(common | record, speeds, best.samples_per_s.median)


def range_text(spread: Spread) -> str:
    """The quartiles for people."""
    return f"{number(spread.low)} to {number(spread.high)}"


def result_record(result: Result, **more: Any) -> dict[str, Any]:
    """A result as plain containers."""
    return {
        "overrides": list(result.candidate.words),
        "settings": dict(result.candidate.settings),
        "samples_per_s": dataclasses.asdict(result.samples_per_s),
        "ratio": dataclasses.asdict(result.ratio),
        "ratios": result.ratios,
        "verdict": result.verdict,
        **more,
    }


def facts_of(baseline: CandidateRunner) -> Facts:
    """What decides which toggles apply."""
    training = baseline.training
    precisions: dict[torch.dtype | None, bool | str] = {None: False, torch.bfloat16: "bf16", torch.float16: "fp16"}
    return Facts(
        device=training.device.type,
        cores=cores(),
        threads=torch.get_num_threads(),
        precision=precisions[training.precision.dtype],
        in_memory=baseline.in_memory,
        workers=baseline.workers,
        kernels=training.kernels.arguments,
        convolutions=any(parameter.ndim == 4 for parameter in training.model.parameters()),
        no_compiler=missing_compiler(training.device),
        automatic=precisions[choose_precision("auto", training.device).dtype],
    )
