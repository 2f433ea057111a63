"""`bench`: the user's config against the same with a toggle switched, with a preset, and with what pays combined."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import torch

from runner.build.describe import describe
from runner.config.cores import cores
from runner.config.errors import first_line
from runner.config.schema.verbs import Bench
from runner.config.sources import Sources
from runner.runtime.device import missing_compiler
from runner.runtime.precision import choose_precision
from runner.verbs._report import Report, amount
from runner.verbs.bench import stats
from runner.verbs.bench.candidate_runner import CANNOT, CandidateRunner, FirstSteps, TooSlow, Workbench, room_for
from runner.verbs.bench.candidates import BASELINE, Candidate, Facts, candidates, together
from runner.verbs.bench.report import BenchResult, Log, show_toggles, toggle_record
from runner.verbs.bench.stats import Result, Round, Sizes
from runner.verbs.bench.timing import run

FEWEST_ROUNDS = 3
# A candidate that is slower in its first steps than this would only take time from the others.
_TOO_SLOW = 5.0
_COMBINATIONS = 3
_SEEDS = 2
_WARMUP = 3
# Estimates are made with the baseline, and candidates may be slower.
_MARGIN = 1.3
_NO_TIME = "no time was left; a larger budget_s gives some"
_NOT_REPEATED = "some candidates were not repeated: the time was up"


class ToggleComparison:
    """Measures candidates in turns with the baseline."""

    def __init__(self, config: Bench, bench: Workbench, report: Report, sources: Sources) -> None:
        self._config, self._bench, self._report, self._sources = config, bench, report, sources
        self._deadline = time.perf_counter() + config.budget_s
        self._rounds: list[Round] = []
        self._first: dict[str, FirstSteps] = {}
        self._results: dict[str, Result] = {}
        self._log = Log()
        self._keep = True
        self._sizes = Sizes(1, 1, 1, 2)

    def run(self) -> BenchResult:
        """Measure everything that there is time for, and show it."""
        config = self._config
        self._baseline = baseline = baseline_with_data(self._bench, self._report, config)
        found, self._log.skipped = candidates(config, facts_of(baseline), self._sources)
        self._choose_sizes(len(found))
        self._report.line(f"measuring {amount(len(found), 'candidate')} in turns with it")
        self._make_first_steps(baseline)
        self._keep = room_for(baseline, len(found) + 1)
        runners = [runner for candidate in found if (runner := self._try(candidate)) is not None]
        self._measure([baseline, *runners])
        seed_losses = [] if config.tolerance is not None else self._losses_with_seeds()
        allowed = stats.allowed_difference(config.tolerance, self._results[BASELINE.name].loss, seed_losses)
        self._judge(runners, allowed)
        if config.combine:
            self._combine(allowed)
        late = time.perf_counter() - self._deadline
        if late > 0.1 * config.budget_s:
            self._log.notes.append(f"took {config.budget_s + late:.0f} s, more than budget_s={config.budget_s:g}")
        return self._result(seed_losses, allowed)

    def _result(self, seed_losses: list[float], allowed: float) -> BenchResult:
        reference, *others = self._results.values()
        others.sort(key=lambda result: -result.ratio.median)
        best = stats.recommended(others) or reference
        device, sizes = self._baseline.device, self._sizes
        show_toggles(self._report, [reference, *others], device.type == "cuda", sizes.repeats)
        spread = f" (the spread over {1 + len(seed_losses)} seeds)" if seed_losses else ""
        self._report.line(
            f"losses are means over the first {sizes.compare} steps; a difference up to {allowed:.2g} is accepted{spread}"
        )
        self._log.show(self._report)
        record = {
            "device": str(device),
            "recommended": list(best.candidate.words),
            "sizes": dataclasses.asdict(sizes),
            "seed_losses": seed_losses,
            "allowed_loss_difference": allowed,
            "baseline": toggle_record(reference, reference),
            "candidates": [toggle_record(result, reference) for result in others],
            **self._log.record(),
        }
        speeds = [(result.candidate.name, result.samples_per_s) for result in (reference, *others)]
        return BenchResult(record, speeds, best.samples_per_s.median)

    def _choose_sizes(self, count: int) -> None:
        config = self._config
        first = self._baseline.first_steps(3)
        steps = config.steps or stats.usual_steps(first.step_s)
        wanted = Sizes(steps, min(_WARMUP, steps), config.repeats, config.compare_steps)
        others = 1 + _COMBINATIONS * config.combine * (count > 1)
        share = (self._deadline - time.perf_counter()) / (count + others + 1)
        self._sizes = stats.sized(wanted, first.step_s, first.build_s, share / _MARGIN)
        self._log.notes += stats.note_of_fewer(wanted, self._sizes, first.step_s, config.budget_s)

    def _try(self, candidate: Candidate) -> CandidateRunner | None:
        """A candidate after its first steps; None if it cannot be run, or is not worth the time."""
        why = _NO_TIME
        usual = self._first[BASELINE.name].step_s
        # Twice, because something else may have kept the machine busy the first time.
        for _ in range(2 if time.perf_counter() <= self._deadline else 0):
            try:
                runner = CandidateRunner(self._bench, candidate)
                self._make_first_steps(runner, _TOO_SLOW * usual)
                if useless := _without_effect(runner):
                    self._drop(runner, useless)
                    return None
                return runner
            except TooSlow as error:
                why = f"{error.args[0] / usual:.1f} times slower than the baseline in its first steps"
            except CANNOT as error:
                why = first_line(error)
                break
        self._log.skipped.append((candidate.name, why))
        return None

    def _make_first_steps(self, runner: CandidateRunner, longest_s: float = math.inf) -> None:
        first = runner.first_steps(self._sizes.compare, longest_s)
        self._first[runner.name] = first
        self._results[runner.name] = Result(
            runner.candidate, runner.samples, loss=first.loss, start_s=first.start_s, peak_bytes=first.peak_bytes
        )
        if not self._keep:
            runner.release()

    def _measure(self, runners: Sequence[CandidateRunner]) -> None:
        """Measure each candidate once a round, so that a change of the machine's speed affects all alike."""
        usual = self._first[BASELINE.name].step_s
        for number in range(self._sizes.repeats):
            if number >= FEWEST_ROUNDS and time.perf_counter() > self._deadline:
                self._log.notes.append(f"{number} measurements instead of {self._sizes.repeats}: the time was up")
                break
            turn: Round = {}
            for runner in self._remaining(runners):
                # The same time for a slower candidate, not the same number of steps.
                own = self._first[runner.name].step_s
                sizes = dataclasses.replace(self._sizes, steps=max(1, round(self._sizes.steps * min(1.0, usual / own))))
                try:
                    turn[runner.name] = runner.measure(*sizes.beside_readers(runner.read_ahead, own)).per_sample
                except CANNOT as error:
                    if runner is self._baseline:
                        raise
                    self._drop(runner, first_line(error))
                if not self._keep:
                    runner.release()
            self._rounds.append(turn)
        for runner in self._remaining(runners):
            result = self._results[runner.name]
            result.seconds = [turn[runner.name] for turn in self._rounds if runner.name in turn]
            result.ratios = stats.ratios(self._rounds, runner.name)

    def _remaining(self, runners: Sequence[CandidateRunner]) -> list[CandidateRunner]:
        return [runner for runner in runners if runner.name in self._results]

    def _drop(self, runner: CandidateRunner, why: str) -> None:
        del self._results[runner.name]
        self._log.skipped.append((runner.name, why))
        runner.release()

    def _judge(self, runners: Sequence[CandidateRunner], allowed: float) -> None:
        """Repeat the first steps and compare the weights, count saved memory, and decide on a verdict."""
        baseline = self._results[BASELINE.name]
        if baseline.repeats is None:
            self._repeat(self._baseline, baseline)
        # First those that may be recommended.
        for runner in sorted(
            self._remaining(runners), key=lambda each: not stats.pays(self._results[each.name].ratios)
        ):
            result = self._results[runner.name]
            if stats.pays(result.ratios) or time.perf_counter() < self._deadline:
                self._repeat(runner, result)
            elif _NOT_REPEATED not in self._log.notes:
                self._log.notes.append(_NOT_REPEATED)
            result.verdict = stats.verdict(result, baseline, allowed, bool(self._config.deterministic))
            runner.release()

    def _repeat(self, runner: CandidateRunner, result: Result) -> None:
        again = runner.first_steps(self._sizes.compare)
        result.repeats = again.digest == self._first[runner.name].digest
        result.saved_bytes = runner.saved_bytes()

    def _losses_with_seeds(self) -> list[float]:
        self._baseline.configure()
        first = self._config.seed + 1
        return [self._baseline.loss_with_seed(seed, self._sizes.compare) for seed in range(first, first + _SEEDS)]

    def _combine(self, allowed: float) -> None:
        """Start from what pays most, and keep adding what also pays in combination."""
        best, *others = stats.to_combine(self._results.values()) or [BASELINE]
        tried = 0
        for other in others:
            if best.clashes(other):
                continue
            candidate = together(best, other)
            first = self._first[BASELINE.name]
            if tried and self._sizes.seconds(first.step_s, first.build_s) > self._deadline - time.perf_counter():
                self._log.skipped.append((candidate.name, _NO_TIME))
                break
            tried += 1
            before = len(self._rounds)
            runner = self._try(candidate)
            if runner is None:
                continue
            # The best so far is measured again, as the machine may have changed its speed since.
            incumbent = CandidateRunner(self._bench, best)
            self._measure([self._baseline, incumbent, runner])
            incumbent.release()
            self._judge([runner], allowed)
            gains = stats.ratios(self._rounds[before:], candidate.name, best.name)
            result = self._results.get(candidate.name)
            if result is not None and not result.verdict and stats.pays(gains):
                best = candidate


def _without_effect(runner: CandidateRunner) -> str:
    """The warning that a candidate's settings change nothing here; empty if one of them does."""
    warnings = [warning for warning in runner.training.warnings if "has no effect" in warning]
    found = [next((text for text in warnings if text.startswith(key)), "") for key, _ in runner.candidate.settings]
    return found[0] if found and all(found) else ""


def baseline_with_data(bench: Workbench, report: Report, config: Bench) -> CandidateRunner:
    """The baseline, after it has shown its settings and measured the statistics of the data."""
    first = CandidateRunner(bench)
    # Two steps load kernels and libraries, which would count against whoever comes first.
    run(first.training, first.loader, 2)
    report.header(f"{config.name}  as configured", describe(config, first.training))
    report.warnings(first.training.warnings)
    bench.keep_statistics(first.training.data)
    return CandidateRunner(bench)


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
