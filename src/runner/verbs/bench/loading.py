"""`bench data`: reading alone, computing alone, and both together, for the user's config and other ways to the data."""

from __future__ import annotations

import dataclasses
import itertools

from runner.config.errors import first_line
from runner.verbs.bench import stats
from runner.verbs.bench.candidate_runner import CANNOT, CandidateRunner, room_for
from runner.verbs.bench.candidates import BASELINE, Candidate
from runner.verbs.bench.comparison import BenchResult, Comparison
from runner.verbs.bench.report import STEP, advice, bottleneck_sentence, data_record, show_data
from runner.verbs.bench.stats import Result, Round
from runner.verbs.bench.timing import run

_WARMUP = 2


class DataComparison(Comparison):
    """Measures the data paths in turns."""

    def run(self) -> BenchResult:
        """Measure everything that there is time for, and show it."""
        self.skipped = []  # what does not apply to the data is not worth a word
        self.results[BASELINE.name] = Result(BASELINE, self.baseline.samples)
        runners = [self.baseline, *(runner for candidate in self.candidates if (runner := self._build(candidate)))]
        step_s = self.baseline.measure(3, 1) * self.baseline.samples
        # Each candidate reads and trains; the baseline also computes on one batch.
        sizes = self.choose_sizes(step_s, 0.0, compare=2, warmup=_WARMUP, shares=2 * len(runners) + 1)
        self.keep = room_for(self.baseline, len(runners))
        # An epoch for each measurement, so that none finds in the disk cache what another one has read.
        epochs = itertools.count(1)

        def measure(runner: CandidateRunner) -> Round:
            name, (steps, warmup) = runner.name, sizes.beside_readers(runner.read_ahead, step_s)
            turn = {_reading(name): runner.measure(steps, warmup, next(epochs), "reading")}
            if runner is self.baseline:
                turn[STEP] = runner.measure(steps, warmup, part="computing")
            return turn | {name: runner.measure(steps, warmup, next(epochs))}

        self.take_turns(runners, sizes.repeats, measure)
        for name, result in self.results.items():
            result.reading = [turn[_reading(name)] for turn in self.rounds]
            result.verdict = stats.verdict_on_speed(result.ratios)
        measured = {"steps": sizes.steps, "warmup": sizes.warmup, "repeats": len(self.rounds)}
        return self._result(measured)

    def _result(self, sizes: dict[str, int]) -> BenchResult:
        results, best = self.ranked()
        reference = results[0]
        steps = [turn[STEP] for turn in self.rounds]
        computing = stats.rates(steps)
        bottleneck = stats.bottleneck(reference.reading, steps, reference.seconds)
        show_data(self.report, results, computing, sizes["repeats"])
        found = {
            "bottleneck": dataclasses.asdict(bottleneck),
            "computing_samples_per_s": dataclasses.asdict(computing),
            "ways": [data_record(result) for result in results],
        }
        lines = [bottleneck_sentence(bottleneck), advice(bottleneck, best is not reference)]
        record = self.finish(best, sizes, found, lines)
        speeds = [(result.candidate.name, result.samples_per_s) for result in results]
        speeds[1:1] = [("reading alone", stats.rates(reference.reading)), (STEP, computing)]
        return BenchResult(record, speeds, best.samples_per_s.median)

    def _build(self, candidate: Candidate) -> CandidateRunner | None:
        try:
            runner = CandidateRunner(self.bench, candidate)
            run(runner.training, runner.loader, 1)
        except CANNOT as error:
            self.skipped.append((candidate.name, first_line(error)))
            return None
        self.results[runner.name] = Result(candidate, runner.samples)
        return runner


def _reading(name: str) -> str:
    return f"reading, {name}"
