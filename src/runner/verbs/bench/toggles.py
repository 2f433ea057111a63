"""`bench`: the user's config against the same with a toggle switched, with a preset, and with what pays put together."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from runner.build.describe import describe
from runner.config.app import Composition
from runner.config.cores import cores
from runner.config.schema.bench import Bench
from runner.runtime.device import missing_compiler
from runner.runtime.precision import choose_precision
from runner.tracking.console import Console
from runner.verbs.bench import stats
from runner.verbs.bench.candidate_runner import (
    CANNOT,
    CandidateRunner,
    FirstSteps,
    TooSlow,
    Workbench,
    reason,
    room_for,
)
from runner.verbs.bench.candidates import (
    BASELINE,
    Candidate,
    Facts,
    LeftOut,
    candidates,
    together,
)
from runner.verbs.bench.stats import Result, Round, Sizes
from runner.verbs.bench.timing import run

# A candidate this much slower in its first steps would only cost the others their time.
_TOO_SLOW = 5.0
_COMBINATIONS = 3
_SEEDS = 2
_WARMUP = 3
_FEWEST_ROUNDS = 3
# Candidates may be slower than the baseline, which all estimates are made with.
_MARGIN = 1.3
_NO_TIME = "no time was left; a larger budget_s gives some"


@dataclass
class Findings:
    """What a comparison found out.

    Attributes:
        results: the baseline first.
        left_out: what was not measured, and why.
        notes: what a reader of the figures has to know.
        sizes: how much was measured.
        device: what it was measured on.
        seed_losses: losses of the baseline with other initial weights.
        allowed: largest difference of the losses.
    """

    results: list[Result]
    left_out: list[LeftOut]
    notes: list[str]
    sizes: Sizes
    device: torch.device
    seed_losses: list[float] = field(default_factory=list)
    allowed: float = 0.0


class Comparison:
    """Measures candidates in turns with the baseline.

    Args:
        composition: what the command line amounts to.
        config: the same, validated.
        bench: makes the candidates.
        console: where progress is told.
    """

    def __init__(self, composition: Composition, config: Bench, bench: Workbench, console: Console) -> None:
        self._composition, self._config, self._bench, self._console = composition, config, bench, console
        self._deadline = time.perf_counter() + config.budget_s
        self._rounds: list[Round] = []
        self._first: dict[str, FirstSteps] = {}
        self._results: dict[str, Result] = {}
        self._left_out: list[LeftOut] = []
        self._notes: list[str] = []
        self._keep = True
        self._baseline = CandidateRunner(bench)
        self._sizes = Sizes(1, 1, 1, 2)

    def findings(self) -> Findings:
        """Measure everything that there is time for."""
        config, baseline = self._config, self._baseline
        # Kernels and libraries are loaded with the first calls, which are nobody's fault.
        run(baseline.training, baseline.training.splits.train.loader, 2)
        introduce(self._console, config, baseline)
        self._bench.keep_statistics(baseline.training.splits)
        self._baseline = baseline = CandidateRunner(self._bench)
        found, left_out = candidates(config, facts_of(baseline), self._composition.sources)
        self._left_out += left_out
        self._decide_sizes(len(found))
        plural = "" if len(found) == 1 else "s"
        self._console.line(f"measuring {len(found)} candidate{plural} in turns with it")

        self._enter(baseline)
        self._keep = room_for(baseline, len(found) + 1)
        runners = [runner for candidate in found if (runner := self._entered(candidate)) is not None]
        self._measure([baseline, *runners])
        seeds = [] if config.tolerance is not None else self._seeds()
        result = self._results[BASELINE.name]
        allowed = stats.allowed_difference(config.tolerance, result.loss, seeds)
        self._settle(runners, allowed)
        if config.combine:
            self._combine(allowed)
        late = time.perf_counter() - self._deadline
        if late > 0.1 * config.budget_s:
            self._notes.append(f"took {config.budget_s + late:.0f} s, more than budget_s={config.budget_s:g}")
        return Findings(
            list(self._results.values()), self._left_out, self._notes, self._sizes, baseline.device, seeds, allowed
        )

    def _decide_sizes(self, count: int) -> None:
        config, baseline = self._config, self._baseline
        first = baseline.first_steps(3)
        steps = config.steps or stats.usual_steps(first.step_s)
        wanted = Sizes(steps, min(_WARMUP, steps), config.repeats, config.compare_steps)
        others = 1 + _COMBINATIONS * config.combine * (count > 1)
        share = (self._deadline - time.perf_counter()) / (count + others + 1)
        self._sizes = stats.sized(wanted, first.step_s, first.build_s, share / _MARGIN)
        if self._sizes != wanted:
            now = self._sizes
            self._notes.append(
                f"fewer steps than asked for, as one takes {1000 * first.step_s:.3g} ms and budget_s={config.budget_s:g}: "
                f"{now.repeats} measurements of {now.steps} ({wanted.repeats} of {wanted.steps}), "
                f"{now.compare} compared ({wanted.compare})"
            )

    def _entered(self, candidate: Candidate) -> CandidateRunner | None:
        """A candidate with its first steps made; None if it cannot be run, or is not worth the time."""
        if time.perf_counter() > self._deadline:
            self._left_out.append((candidate.name, _NO_TIME))
            return None
        usual = self._first[BASELINE.name].step_s
        why = ""
        for _ in range(2):  # the first time, something else may have kept the machine busy
            try:
                runner = CandidateRunner(self._bench, candidate)
                self._enter(runner, _TOO_SLOW * usual)
                if useless := self._without_effect(runner):
                    self._drop(runner, useless)
                    return None
                return runner
            except TooSlow as error:
                why = f"{error.args[0] / usual:.1f} times slower than the baseline in its first steps"
            except CANNOT as error:
                why = reason(error)
                break
        self._left_out.append((candidate.name, why))
        return None

    def _without_effect(self, runner: CandidateRunner) -> str:
        """What the program itself says of settings that change nothing here; empty if one of them does."""
        said = [warning for warning in runner.training.warnings if "has no effect" in warning]
        told = [next((text for text in said if text.startswith(key)), "") for key, _ in runner.candidate.settings]
        return told[0] if told and all(told) else ""

    def _enter(self, runner: CandidateRunner, longest_s: float = math.inf) -> None:
        first = runner.first_steps(self._sizes.compare, longest_s)
        name = runner.candidate.name
        self._first[name] = first
        self._results[name] = Result(
            runner.candidate, runner.samples, loss=first.loss, start_s=first.start_s, peak_bytes=first.peak_bytes
        )
        if not self._keep:
            runner.release()

    def _measure(self, runners: Sequence[CandidateRunner]) -> None:
        """Give each one its turn, again and again, so that a change of the machine's speed meets all alike."""
        usual = self._first[BASELINE.name].step_s
        for number in range(self._sizes.repeats):
            if number >= _FEWEST_ROUNDS and time.perf_counter() > self._deadline:
                self._notes.append(f"{number} measurements in place of {self._sizes.repeats}: the time was up")
                break
            turn: Round = {}
            for runner in self._remaining(runners):
                name = runner.candidate.name
                # The same time for a slower candidate, not the same number of steps.
                own = self._first[name].step_s
                sizes = replace(self._sizes, steps=max(1, round(self._sizes.steps * min(1.0, usual / own))))
                try:
                    timed = runner.measure(*sizes.beside_readers(runner.read_ahead, own))
                    turn[name] = timed.seconds / timed.samples
                except CANNOT as error:
                    if runner is self._baseline:
                        raise
                    self._drop(runner, reason(error))
                if not self._keep:
                    runner.release()
            self._rounds.append(turn)
        for runner in self._remaining(runners):
            result = self._results[runner.candidate.name]
            result.seconds = [turn[runner.candidate.name] for turn in self._rounds if runner.candidate.name in turn]
            result.ratios = stats.ratios(self._rounds, runner.candidate.name)

    def _remaining(self, runners: Sequence[CandidateRunner]) -> list[CandidateRunner]:
        return [runner for runner in runners if runner.candidate.name in self._results]

    def _drop(self, runner: CandidateRunner, why: str) -> None:
        """Leave a candidate out after all."""
        del self._results[runner.candidate.name]
        self._left_out.append((runner.candidate.name, why))
        runner.release()

    def _settle(self, runners: Sequence[CandidateRunner], allowed: float) -> None:
        """Make the first steps again and compare the weights, count what is saved, and come to a verdict."""
        baseline = self._results[BASELINE.name]
        if baseline.repeats is None:
            self._repeat(self._baseline, baseline)
        # First those whose answer matters for what is recommended.
        remaining = self._remaining(runners)
        for runner in sorted(remaining, key=lambda runner: not stats.pays(self._results[runner.candidate.name].ratios)):
            result = self._results[runner.candidate.name]
            if stats.pays(result.ratios) or time.perf_counter() < self._deadline:
                self._repeat(runner, result)
            elif (note := "some candidates were not repeated: the time was up") not in self._notes:
                self._notes.append(note)
            result.verdict = stats.verdict(result, baseline, allowed, bool(self._config.deterministic))
            runner.release()

    def _repeat(self, runner: CandidateRunner, result: Result) -> None:
        again = runner.first_steps(self._sizes.compare)
        result.repeats = again.digest == self._first[runner.candidate.name].digest
        result.saved_bytes = runner.saved_bytes()

    def _seeds(self) -> list[float]:
        seeds = range(self._config.seed + 1, self._config.seed + 1 + _SEEDS)
        self._baseline.configure()
        return [self._baseline.seeded(seed, self._sizes.compare) for seed in seeds]

    def _combine(self, allowed: float) -> None:
        """Start from what pays most, and keep adding what pays on top."""
        best, *others = stats.to_combine(self._results.values()) or [BASELINE]
        tried = 0
        for other in others:
            if best.clashes(other):
                continue
            first = self._first[BASELINE.name]
            left = self._deadline - time.perf_counter()
            if tried and self._sizes.seconds(first.step_s, first.build_s) > left:
                self._left_out.append((together(best, other).name, _NO_TIME))
                break
            tried += 1
            before = len(self._rounds)
            candidate = together(best, other)
            runner = self._entered(candidate)
            if runner is None:
                continue
            # The best so far takes its turn as well, as the machine may have changed its speed since.
            incumbent = CandidateRunner(self._bench, best)
            self._measure([self._baseline, incumbent, runner])
            incumbent.release()
            self._settle([runner], allowed)
            gains = stats.ratios(self._rounds[before:], candidate.name, best.name)
            found = self._results.get(candidate.name)
            if found is not None and not found.verdict and stats.pays(gains):
                best = candidate


def introduce(console: Console, config: Bench, baseline: CandidateRunner) -> None:
    """Tell what is compared with, and what its settings do not do."""
    console.header(f"{config.name}  as configured", describe(config, baseline.training))
    for warning in baseline.training.warnings:
        console.warn(warning)


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
