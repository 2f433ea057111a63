"""`bench data`: reading alone, computing alone, and both together, for the user's config and other ways to the data."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

from runner.config.schema.bench import Bench
from runner.tracking.console import Console
from runner.tracking.formats import number
from runner.verbs.bench import stats
from runner.verbs.bench.candidate_runner import CANNOT, CandidateRunner, Workbench, reason, room_for
from runner.verbs.bench.candidates import BASELINE, data_candidates
from runner.verbs.bench.stats import Bottleneck, Result, Round, Sizes, Spread
from runner.verbs.bench.timing import Timed, run
from runner.verbs.bench.toggles import facts_of, introduce

_WARMUP = 2
_FEWEST_ROUNDS = 3
_STEP = "a step on one batch"


@dataclass
class Way:
    """One way to the data.

    Attributes:
        result: its training, as a candidate.
        reading: samples a second of reading alone.
    """

    result: Result
    reading: Spread

    @property
    def both(self) -> Spread:
        """Samples a second of training."""
        return self.result.samples_per_s


@dataclass
class LoadingFindings:
    """What `bench data` found out.

    Attributes:
        ways: the configured one first, then the others from the fastest to the slowest.
        computing: samples a second of steps on a batch that is there already.
        bottleneck: of the configured way.
        left_out: what was not measured, and why.
        notes: what a reader of the figures has to know.
        sizes: how much was measured.
        device: what it was measured on.
    """

    ways: list[Way]
    computing: Spread
    bottleneck: Bottleneck
    left_out: list[tuple[str, str]]
    notes: list[str]
    sizes: Sizes
    device: str

    @property
    def best(self) -> Way:
        """The way that is recommended; the configured one if no other pays."""
        result = stats.recommended(way.result for way in self.ways)
        return next((way for way in self.ways if way.result is result), self.ways[0])

    def record(self) -> dict[str, Any]:
        """The same for `bench.json`."""
        return {
            "device": self.device,
            "recommended": list(self.best.result.candidate.words),
            "bottleneck": dataclasses.asdict(self.bottleneck),
            "sizes": {name: value for name, value in dataclasses.asdict(self.sizes).items() if name != "compare"},
            "computing_samples_per_s": dataclasses.asdict(self.computing),
            "ways": [
                {
                    "overrides": list(way.result.candidate.words),
                    "settings": dict(way.result.candidate.settings),
                    "reading_samples_per_s": dataclasses.asdict(way.reading),
                    "samples_per_s": dataclasses.asdict(way.both),
                    "ratio": dataclasses.asdict(way.result.ratio),
                    "ratios": way.result.ratios,
                    "verdict": way.result.verdict,
                }
                for way in self.ways
            ],
            "left_out": [{"what": what, "why": why} for what, why in self.left_out],
            "notes": self.notes,
        }

    def speeds(self) -> list[tuple[str, Spread]]:
        """Samples a second by name, for the picture; training as configured first."""
        first, *others = self.ways
        return [
            (first.result.candidate.name, first.both),
            ("reading alone", first.reading),
            (_STEP, self.computing),
            *((way.result.candidate.name, way.both) for way in others),
        ]

    def show(self, console: Console) -> None:
        """Table and sentences."""
        rows = [[_STEP, "", number(self.computing.median), *_quartiles(self.computing), "", ""]]
        for way in self.ways:
            result = way.result
            verdict = "" if way is self.ways[0] else result.verdict or "pays"
            reading, ratio = number(way.reading.median), f"{result.ratio.median:.2f}"
            rows.append(
                [result.candidate.name, reading, number(way.both.median), *_quartiles(way.both), ratio, verdict]
            )
        console.table(
            f"samples/s, medians of {self.sizes.repeats} measurements of each, made in turns",
            ["overrides", "reading alone", "training", "quartiles", "ratio", "verdict"],
            rows,
        )
        console.line(sentence(self.bottleneck))
        console.line(advice(self.bottleneck, bool(self.best.result.candidate.words)))


def _quartiles(spread: Spread) -> list[str]:
    return [f"{number(spread.low)} to {number(spread.high)}"]


def sentence(found: Bottleneck) -> str:
    """The bottleneck in words."""
    factor = f"{found.factor:.1f} times as long as"
    told = {
        "input": f"bottleneck: input: reading a batch takes {factor} computing on it",
        "compute": f"bottleneck: compute: computing on a batch takes {factor} reading it",
        "neither": "bottleneck: neither: reading a batch takes about as long as computing on it",
    }[found.kind]
    return f"{told}; waiting for input is {found.waiting:.0%} of a step"


def advice(found: Bottleneck, pays: bool) -> str:
    """What to do about it."""
    if pays:
        return "the settings below feed the model faster"
    if found.kind == "compute":
        return "no way to the data that was tried helps; python -m runner bench compares what makes a step faster"
    return (
        "no way to the data that was tried helps: make reading a sample cheaper "
        "(smaller files, a batch transform in place of a sample transform)"
    )


class Loading:
    """Measures ways to the data in turns.

    Args:
        config: the validated config.
        bench: makes the candidates.
        console: where progress is told.
    """

    def __init__(self, config: Bench, bench: Workbench, console: Console) -> None:
        self._config, self._bench, self._console = config, bench, console
        self._deadline = time.perf_counter() + config.budget_s
        self._left_out: list[tuple[str, str]] = []
        self._notes: list[str] = []
        self._epoch = 0
        self._step_s = math.nan

    def findings(self) -> LoadingFindings:
        """Measure everything that there is time for."""
        baseline = CandidateRunner(self._bench)
        run(baseline.training, baseline.training.splits.train.loader, 2)
        introduce(self._console, self._config, baseline)
        self._bench.keep_statistics(baseline.training.splits)
        baseline = CandidateRunner(self._bench)
        found = data_candidates(self._config, facts_of(baseline))
        runners = [baseline, *(runner for candidate in found if (runner := self._built(candidate)) is not None)]
        sizes = self._sizes(baseline, len(runners))
        keep = room_for(baseline, len(runners))
        rounds = [self._turn(runners, sizes, keep)]
        while len(rounds) < sizes.repeats:
            if len(rounds) >= _FEWEST_ROUNDS and time.perf_counter() > self._deadline:
                self._notes.append(f"{len(rounds)} measurements in place of {sizes.repeats}: the time was up")
                break
            rounds.append(self._turn(runners, sizes, keep))
        first, *others = [_way(runner, rounds) for runner in runners]
        computing = Spread.of([turn[_STEP] for turn in rounds])
        return LoadingFindings(
            [first, *sorted(others, key=lambda way: -way.result.ratio.median)],
            computing.inverse(),
            stats.bottleneck(
                [turn[_reading(BASELINE.name)] for turn in rounds],
                [turn[_STEP] for turn in rounds],
                [turn[BASELINE.name] for turn in rounds],
            ),
            self._left_out,
            self._notes,
            dataclasses.replace(sizes, repeats=len(rounds)),
            str(baseline.device),
        )

    def _built(self, candidate: Any) -> CandidateRunner | None:
        try:
            runner = CandidateRunner(self._bench, candidate)
            run(runner.training, runner.training.splits.train.loader, 1)
        except CANNOT as error:
            self._left_out.append((candidate.name, reason(error)))
            return None
        return runner

    def _sizes(self, baseline: CandidateRunner, count: int) -> Sizes:
        config = self._config
        self._step_s = step_s = _per_sample(baseline.measure(3, 1)) * baseline.samples
        steps = config.steps or stats.usual_steps(step_s)
        wanted = Sizes(steps, min(_WARMUP, steps), config.repeats, 2)
        # Each one reads and trains; the configured one computes on one batch as well.
        share = (self._deadline - time.perf_counter()) / (2 * count + 1)
        sizes = stats.sized(wanted, step_s, 0.0, share)
        if sizes != wanted:
            self._notes.append(
                f"fewer steps than asked for, as one takes {1000 * step_s:.3g} ms and budget_s={config.budget_s:g}: "
                f"{sizes.repeats} measurements of {sizes.steps} ({wanted.repeats} of {wanted.steps})"
            )
        return sizes

    def _turn(self, runners: list[CandidateRunner], sizes: Sizes, keep: bool) -> Round:
        """Measure each one once; one that fails is left out from then on, unless it is the baseline."""
        turn: Round = {}
        for runner in list(runners):
            name, amount = runner.candidate.name, sizes.beside_readers(runner.read_ahead, self._step_s)
            try:
                turn[_reading(name)] = _per_sample(runner.read(*amount, self._next_epoch()))
                if name == BASELINE.name:
                    turn[_STEP] = _per_sample(runner.compute(*amount))
                turn[name] = _per_sample(runner.measure(*amount, self._next_epoch()))
            except CANNOT as error:
                if name == BASELINE.name:
                    raise
                self._left_out.append((name, reason(error)))
                runners.remove(runner)
                runner.release()
                continue
            if not keep:
                runner.release()
        return turn

    def _next_epoch(self) -> int:
        """Every measurement reads an epoch of its own: none finds in the cache of the disk what another one has read."""
        self._epoch += 1
        return self._epoch


def _per_sample(timed: Timed) -> float:
    return timed.seconds / timed.samples


def _reading(name: str) -> str:
    return f"reading, {name}"


def _way(runner: CandidateRunner, rounds: list[Round]) -> Way:
    name = runner.candidate.name
    ratios = stats.ratios(rounds, name)
    result = Result(runner.candidate, runner.samples, seconds=[turn[name] for turn in rounds], ratios=ratios)
    if not stats.pays(ratios):
        result.verdict = stats.why_not_faster(ratios)
    return Way(result, Spread.of([turn[_reading(name)] for turn in rounds]).inverse())
