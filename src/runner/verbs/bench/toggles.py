"""`bench`: the user's config against the same with a toggle switched, with a preset, and with what pays combined."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

from runner.config.errors import first_line
from runner.tracking.formats import amount, number
from runner.verbs._report import mib
from runner.verbs.bench import stats
from runner.verbs.bench.candidate_runner import CANNOT, CandidateRunner, TooSlow, room_for
from runner.verbs.bench.candidates import BASELINE, Candidate
from runner.verbs.bench.comparison import BenchResult, Comparison, range_text, result_record
from runner.verbs.bench.stats import Result, Round

# A candidate that is slower in its first steps than this would only take time from the others.
_TOO_SLOW = 5.0
_SHORT_S = 0.01  # a step is never too slow below this: on a busy machine, waiting for a core takes as long
_COMBINATIONS = 3
_SEEDS = 2
_WARMUP = 3
# Estimates are made with the baseline, and candidates may be slower.
_MARGIN = 1.3
_NO_TIME = "no time was left; set a larger budget_s"
_NOT_REPEATED = "some candidates were not repeated, because time ran out"


class ToggleComparison(Comparison):
    """Measures candidates in turns with the baseline."""

    def run(self) -> BenchResult:
        """Measure everything that there is time for, and show it."""
        config, baseline, found = self.config, self.baseline, self.candidates
        first = baseline.first_steps(3)
        others = 1 + _COMBINATIONS * config.combine * (len(found) > 1)
        shares = _MARGIN * (len(found) + others + 1)
        self._sizes = self.choose_sizes(first.step_s, first.build_s, config.compare_steps, _WARMUP, shares)
        self.report.line(f"measuring {amount(len(found), 'candidate')} in turns with it")
        self._make_first_steps(baseline)
        self.keep = room_for(baseline, len(found) + 1)
        runners = [runner for candidate in found if (runner := self._try(candidate)) is not None]
        self._measure([baseline, *runners])
        seed_losses = [] if config.tolerance is not None else self._losses_with_seeds()
        allowed = stats.allowed_difference(config.tolerance, self.results[BASELINE.name].loss, seed_losses)
        self._judge(runners, allowed)
        if config.combine:
            self._combine(allowed)
        late = time.perf_counter() - self.deadline
        if late > 0.1 * config.budget_s:
            self.notes.append(f"took {config.budget_s + late:.0f} s, more than budget_s={config.budget_s:g}")
        return self._result(seed_losses, allowed)

    def _result(self, seed_losses: list[float], allowed: float) -> BenchResult:
        results, best = self.ranked()
        reference, sizes = results[0], self._sizes
        memory = "peak MiB" if self.baseline.device.type == "cuda" else "peak RSS MiB"
        columns: dict[str, Callable[[Result], str]] = {
            "overrides": lambda result: result.candidate.name,
            "samples/s": lambda result: number(result.samples_per_s.median),
            "step ms": lambda result: number(result.step_ms.median),
            "quartiles": lambda result: range_text(result.step_ms),
            "ratio": lambda result: f"{result.ratio.median:.2f}",
            memory: lambda result: mib(result.peak_bytes, 1),
            "saved MiB": lambda result: "" if result.saved_bytes is None else mib(result.saved_bytes),
            "loss": lambda result: number(result.loss),
            "difference": lambda result: "" if result is reference else f"{result.loss - reference.loss:+.2g}",
            "same bits": lambda result: {True: "yes", False: "no", None: ""}[result.repeats],
            "start s": lambda result: f"{result.start_s:.2f}",
            "verdict": self.verdict_text,
        }
        rows = [[cell(result) for cell in columns.values()] for result in results]
        self.report.table(f"medians of {sizes.repeats} alternating measurements of each", [*columns], rows)
        baseline, *others = [self._record(result, reference) for result in results]
        record = {
            "sizes": dataclasses.asdict(sizes),
            "seed_losses": seed_losses,
            "allowed_loss_difference": allowed,
            "baseline": baseline,
            "candidates": others,
        }
        spread = f" (the spread over {1 + len(seed_losses)} seeds)" if seed_losses else ""
        line = f"losses are means over the first {sizes.compare} steps; a difference up to {allowed:.2g} is accepted{spread}"
        return self.finish([line], record, best, [(result.candidate.name, result.samples_per_s) for result in results])

    @staticmethod
    def _record(result: Result, reference: Result) -> dict[str, Any]:
        return result_record(
            result,
            kind=result.candidate.kind,
            step_ms=dataclasses.asdict(result.step_ms),
            seconds_per_sample=result.seconds,
            peak_memory_bytes=result.peak_bytes,
            saved_bytes=result.saved_bytes,
            loss=result.loss,
            loss_difference=result.loss - reference.loss,
            same_bits=result.repeats,
            start_s=result.start_s,
        )

    def _try(self, candidate: Candidate) -> CandidateRunner | None:
        """A candidate after its first steps; None if it cannot be run, or is not worth the time."""
        why = _NO_TIME
        usual = self.results[BASELINE.name].step_s
        # Twice, because something else may have kept the machine busy the first time.
        for _ in range(2 if time.perf_counter() <= self.deadline else 0):
            try:
                runner = CandidateRunner(self.bench, candidate)
                self._make_first_steps(runner, max(_TOO_SLOW * usual, _SHORT_S))
                if useless := _without_effect(runner):
                    self.drop(runner, useless)
                    return None
                return runner
            except TooSlow as error:
                why = f"{error.args[0] / usual:.1f} times slower than the baseline in its first steps"
            except CANNOT as error:
                why = first_line(error)
                break
        self.skipped.append((candidate.name, why))
        return None

    def _make_first_steps(self, runner: CandidateRunner, longest_s: float = math.inf) -> None:
        self.results[runner.name] = runner.first_steps(self._sizes.compare, longest_s)
        if not self.keep:
            runner.release()

    def _measure(self, runners: list[CandidateRunner]) -> None:
        """Take turns, and remove from `runners` what fails."""
        self.take_turns(runners, self._sizes.repeats, self._turn)

    def _turn(self, runner: CandidateRunner) -> Round:
        # The same time for a slower candidate, not the same number of steps.
        usual, own = (self.results[name].step_s for name in (BASELINE.name, runner.name))
        sizes = dataclasses.replace(self._sizes, steps=max(1, round(self._sizes.steps * min(1.0, usual / own))))
        return {runner.name: runner.measure(*sizes.beside_readers(runner.read_ahead, own))}

    def _judge(self, runners: list[CandidateRunner], allowed: float) -> None:
        """Repeat the first steps and compare the weights, count saved memory, and decide on a verdict."""
        baseline = self.results[BASELINE.name]
        if baseline.repeats is None:
            self._repeat(self.baseline, baseline)
        remaining = [(runner, self.results[runner.name]) for runner in runners if runner.name in self.results]
        # First those that may be recommended.
        for runner, result in sorted(remaining, key=lambda pair: not stats.pays(pair[1].ratios)):
            if stats.pays(result.ratios) or time.perf_counter() < self.deadline:
                self._repeat(runner, result)
            elif _NOT_REPEATED not in self.notes:
                self.notes.append(_NOT_REPEATED)
            result.verdict = stats.verdict(result, baseline, allowed, bool(self.config.deterministic))
            runner.release()

    def _repeat(self, runner: CandidateRunner, result: Result) -> None:
        result.repeats = runner.first_steps(self._sizes.compare).digest == result.digest
        result.saved_bytes = runner.saved_bytes()

    def _losses_with_seeds(self) -> list[float]:
        self.baseline.configure()
        first = self.config.seed + 1
        return [self.baseline.loss_with_seed(seed, self._sizes.compare) for seed in range(first, first + _SEEDS)]

    def _combine(self, allowed: float) -> None:
        """Start from what pays most, and keep adding what also pays in combination."""
        best, *others = [result.candidate for result in stats.paying(self.results.values())] or [BASELINE]
        tried = 0
        for other in others:
            if best.clashes(other):
                continue
            candidate = best.combined(other)
            first = self.results[BASELINE.name]
            if tried and self._sizes.seconds(first.step_s, first.build_s) > self.deadline - time.perf_counter():
                self.skipped.append((candidate.name, _NO_TIME))
                break
            tried += 1
            before = len(self.rounds)
            runner = self._try(candidate)
            if runner is None:
                continue
            # The best so far is measured again, as the machine may have changed its speed since.
            incumbent = CandidateRunner(self.bench, best)
            self._measure([self.baseline, incumbent, runner])
            incumbent.release()
            self._judge([runner], allowed)
            gains = stats.ratios(self.rounds[before:], candidate.name, best.name)
            result = self.results.get(candidate.name)
            if result is not None and not result.verdict and stats.pays(gains):
                best = candidate


def _without_effect(runner: CandidateRunner) -> str:
    """The warning that a candidate's settings change nothing here; empty if one of them does."""
    warnings = [warning for warning in runner.training.warnings if "has no effect" in warning]
    found = [next((text for text in warnings if text.startswith(key)), "") for key, _ in runner.candidate.settings]
    return found[0] if found and all(found) else ""
