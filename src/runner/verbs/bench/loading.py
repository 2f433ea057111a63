"""`bench data`: reading alone, computing alone, and both together, for the user's config and other ways to the data."""

from __future__ import annotations

import dataclasses
import itertools

from runner.config.errors import first_line
from runner.tracking.formats import number
from runner.verbs.bench import stats
from runner.verbs.bench.candidate_runner import CANNOT, CandidateRunner, room_for
from runner.verbs.bench.candidates import BASELINE, Candidate
from runner.verbs.bench.comparison import BenchResult, Comparison, range_text, result_record
from runner.verbs.bench.stats import Result, Round, rates
from runner.verbs.bench.timing import run

_WARMUP = 2
_STEP = "a step on one batch"


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
                turn[_STEP] = runner.measure(steps, warmup, part="computing")
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
        steps = [turn[_STEP] for turn in self.rounds]
        computing = rates(steps)
        rows = [[_STEP, "", number(computing.median), range_text(computing), "", ""]]
        for result in results:
            reading, speed = rates(result.reading), result.samples_per_s
            speeds = (number(reading.median), number(speed.median), range_text(speed), f"{result.ratio.median:.2f}")
            rows.append([result.candidate.name, *speeds, self.verdict_text(result)])
        columns = ["overrides", "reading alone", "training", "quartiles", "ratio", "verdict"]
        title = f"samples/s, medians of {sizes['repeats']} alternating measurements of each"
        self.report.table(title, columns, rows)
        bottleneck = stats.bottleneck(reference.reading, steps, reference.seconds)
        ways = [
            result_record(result, reading_samples_per_s=dataclasses.asdict(rates(result.reading))) for result in results
        ]
        record = {
            "bottleneck": bottleneck._asdict(),
            "sizes": sizes,
            "computing_samples_per_s": dataclasses.asdict(computing),
            "ways": ways,
        }
        shown = [(result.candidate.name, result.samples_per_s) for result in results]
        shown[1:1] = [("reading alone", rates(reference.reading)), (_STEP, computing)]
        return self.finish(_in_words(bottleneck, best is not reference), record, best, shown)

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


def _in_words(found: stats.Bottleneck, pays: bool) -> list[str]:
    """The bottleneck, and what to do about it; `pays` if one of the data paths does."""
    factor = f"{found.factor:.1f} times as long as"
    sentence = {
        "input": f"input: reading a batch takes {factor} computing on it",
        "compute": f"compute: computing on a batch takes {factor} reading it",
        "neither": "neither: reading a batch takes about as long as computing on it",
    }[found.kind]
    advice = (
        "none of the data paths helps: make reading a sample cheaper "
        "(smaller files, a batch transform instead of a sample transform)"
    )
    if pays:
        advice = "the settings below feed the model faster"
    elif found.kind == "compute":
        advice = "none of the data paths helps; python -m runner bench compares what makes a step faster"
    return [f"bottleneck: {sentence}; waiting for input is {found.waiting:.0%} of a step", advice]
