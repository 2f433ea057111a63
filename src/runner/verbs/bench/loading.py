"""`bench data`: reading alone, computing alone, and both together, for the user's config and other ways to the data."""

from __future__ import annotations

import dataclasses
import time

from runner.config.errors import first_line
from runner.config.schema.verbs import Bench
from runner.verbs._report import Report
from runner.verbs.bench import stats
from runner.verbs.bench.candidate_runner import CANNOT, CandidateRunner, Workbench, room_for
from runner.verbs.bench.candidates import BASELINE, Candidate, data_candidates
from runner.verbs.bench.report import (
    STEP,
    BenchResult,
    DataPath,
    Log,
    advice,
    bottleneck_sentence,
    data_record,
    show_data,
)
from runner.verbs.bench.stats import Result, Round, Sizes, Spread
from runner.verbs.bench.timing import run
from runner.verbs.bench.toggles import FEWEST_ROUNDS, baseline_with_data, facts_of

_WARMUP = 2


class DataComparison:
    """Measures the data paths in turns."""

    def __init__(self, config: Bench, bench: Workbench, report: Report) -> None:
        self._config, self._bench, self._report = config, bench, report
        self._deadline = time.perf_counter() + config.budget_s
        self._log = Log()
        self._epoch = 0

    def run(self) -> BenchResult:
        """Measure everything that there is time for, and show it."""
        baseline = baseline_with_data(self._bench, self._report, self._config)
        found = data_candidates(self._config, facts_of(baseline))
        runners = [baseline, *(runner for candidate in found if (runner := self._build(candidate)) is not None)]
        step_s = baseline.measure(3, 1).per_sample * baseline.samples
        sizes = self._sizes(step_s, len(runners))
        keep = room_for(baseline, len(runners))
        rounds: list[Round] = []
        while len(rounds) < sizes.repeats:
            if len(rounds) >= FEWEST_ROUNDS and time.perf_counter() > self._deadline:
                self._log.notes.append(f"{len(rounds)} measurements instead of {sizes.repeats}: the time was up")
                break
            rounds.append(self._round(runners, sizes, step_s, keep))
        first, *others = [_data_path(runner, rounds) for runner in runners]
        paths = [first, *sorted(others, key=lambda path: -path.result.ratio.median)]
        return self._result(paths, rounds, dataclasses.replace(sizes, repeats=len(rounds)), str(baseline.device))

    def _result(self, paths: list[DataPath], rounds: list[Round], sizes: Sizes, device: str) -> BenchResult:
        steps = [turn[STEP] for turn in rounds]
        computing = Spread.of(steps).inverse()
        reading = [turn[_reading(BASELINE.name)] for turn in rounds]
        bottleneck = stats.bottleneck(reading, steps, [turn[BASELINE.name] for turn in rounds])
        configured = paths[0].result
        best = stats.recommended(path.result for path in paths) or configured
        show_data(self._report, paths, computing, sizes.repeats)
        self._report.line(bottleneck_sentence(bottleneck))
        self._report.line(advice(bottleneck, best is not configured))
        self._log.show(self._report)
        record = {
            "device": device,
            "recommended": list(best.candidate.words),
            "bottleneck": dataclasses.asdict(bottleneck),
            "sizes": {name: value for name, value in dataclasses.asdict(sizes).items() if name != "compare"},
            "computing_samples_per_s": dataclasses.asdict(computing),
            "ways": [data_record(path) for path in paths],
            **self._log.record(),
        }
        speeds = [(path.result.candidate.name, path.result.samples_per_s) for path in paths]
        speeds[1:1] = [("reading alone", paths[0].reading), (STEP, computing)]
        return BenchResult(record, speeds, best.samples_per_s.median)

    def _build(self, candidate: Candidate) -> CandidateRunner | None:
        try:
            runner = CandidateRunner(self._bench, candidate)
            run(runner.training, runner.loader, 1)
        except CANNOT as error:
            self._log.skipped.append((candidate.name, first_line(error)))
            return None
        return runner

    def _sizes(self, step_s: float, count: int) -> Sizes:
        config = self._config
        steps = config.steps or stats.usual_steps(step_s)
        wanted = Sizes(steps, min(_WARMUP, steps), config.repeats, 2)
        # Each candidate reads and trains; the baseline also computes on one batch.
        share = (self._deadline - time.perf_counter()) / (2 * count + 1)
        sizes = stats.sized(wanted, step_s, 0.0, share)
        self._log.notes += stats.note_of_fewer(wanted, sizes, step_s, config.budget_s)
        return sizes

    def _round(self, runners: list[CandidateRunner], sizes: Sizes, step_s: float, keep: bool) -> Round:
        """Measure each candidate once; one that fails is dropped, unless it is the baseline."""
        turn: Round = {}
        for runner in list(runners):
            name, amount = runner.name, sizes.beside_readers(runner.read_ahead, step_s)
            try:
                turn[_reading(name)] = runner.read(*amount, self._next_epoch()).per_sample
                if name == BASELINE.name:
                    turn[STEP] = runner.compute(*amount).per_sample
                turn[name] = runner.measure(*amount, self._next_epoch()).per_sample
            except CANNOT as error:
                if name == BASELINE.name:
                    raise
                self._log.skipped.append((name, first_line(error)))
                runners.remove(runner)
                runner.release()
                continue
            if not keep:
                runner.release()
        return turn

    def _next_epoch(self) -> int:
        """An epoch for each measurement, so that none finds in the disk cache what another one has read."""
        self._epoch += 1
        return self._epoch


def _reading(name: str) -> str:
    return f"reading, {name}"


def _data_path(runner: CandidateRunner, rounds: list[Round]) -> DataPath:
    ratios = stats.ratios(rounds, runner.name)
    result = Result(runner.candidate, runner.samples, seconds=[turn[runner.name] for turn in rounds], ratios=ratios)
    if not stats.pays(ratios):
        result.verdict = stats.why_not_faster(ratios)
    return DataPath(result, Spread.of([turn[_reading(runner.name)] for turn in rounds]).inverse())
