"""What measurements amount to: pure functions of numbers, so that a decision can be tested without a clock."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from runner.verbs.bench.candidates import BASELINE, Candidate

# A gain that nobody would notice is no reason to change a config, however surely it was measured.
_SMALLEST_GAIN = 1.02
# Of candidates this close to the fastest, the one with the fewest overrides is recommended.
_AS_FAST = 0.98
_CONFIDENCE = 0.99
_ALL_OF = 7  # all of so many above 1 by chance: 1 in 128
# Measured of the slowest models, too, however long it takes: fewer say nothing.
_FEWEST_REPEATS = 4
_FEWEST_COMPARED = 3

Round = dict[str, float]
"""One measurement of each candidate, made in turns: seconds a sample by the candidate's name."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        low, median, high = np.percentile(values, (25, 50, 75)).tolist()
        return cls(median, low, high)


def rates(seconds: Sequence[float]) -> Spread:
    """Samples a second, of seconds a sample."""
    return Spread.of([1 / each for each in seconds])


@dataclass
class Result:
    """What was measured of a candidate."""

    candidate: Candidate  # what was measured
    samples: float  # samples of an optimizer step
    loss: float = math.nan  # mean training loss over the first steps
    digest: str = ""  # fingerprint of the weights after them
    step_s: float = 0.0  # seconds of a usual step among them
    start_s: float = 0.0  # seconds to build it and make the first step, less those of a usual step
    build_s: float = 0.0  # seconds to build it alone
    peak_bytes: int = 0  # most memory in use, beyond what was in use before it was built
    repeats: bool | None = None  # whether the same first steps gave the same weights again; None if not tried
    saved_bytes: int | None = None  # what the graph of a batch keeps for backward; None if that cannot be counted
    seconds: list[float] = field(default_factory=list)  # seconds a sample, of each measurement
    ratios: list[float] = field(default_factory=list)  # speed relative to the baseline, round by round
    verdict: str = ""  # why it is not recommended; empty if it pays

    @property
    def step_ms(self) -> Spread:
        """Milliseconds of an optimizer step."""
        return Spread.of([1000 * self.samples * seconds for seconds in self.seconds])

    @property
    def samples_per_s(self) -> Spread:
        """Samples a second."""
        return rates(self.seconds)

    @property
    def ratio(self) -> Spread:
        """Speed relative to the baseline, above 1 for faster."""
        return Spread.of(self.ratios)


def ratios(rounds: Iterable[Round], name: str, against: str = BASELINE.name) -> list[float]:
    """Speed of one candidate relative to another, for each round that has both: drift of the machine cancels out."""
    return [turn[against] / turn[name] for turn in rounds if name in turn and against in turn]


def pays(ratios: Sequence[float]) -> bool:
    """Whether a gain is worth having and more than noise: at least 2 %, and significantly above none."""
    return bool(ratios) and statistics.median(ratios) >= _SMALLEST_GAIN and surely_above_one(ratios)


def surely_above_one(ratios: Sequence[float]) -> bool:
    """Whether ratios are above 1 by more than chance, at 1 %, as there are as many chances as candidates.

    By a one-sided t-test on their logarithms; or because all of at least seven are above 1, which an outlier in the right
    direction does not spoil.
    """
    from scipy.stats import t

    if len(ratios) < 2:
        return False
    if len(ratios) >= _ALL_OF and min(ratios) > 1:
        return True
    logs = [math.log(ratio) for ratio in ratios]
    quantile = float(t.ppf(_CONFIDENCE, len(logs) - 1))
    # Not ttest_1samp, which warns about equal values, and gives no answer for them.
    return statistics.mean(logs) > quantile * statistics.stdev(logs) / math.sqrt(len(logs))


def allowed_difference(tolerance: float | None, baseline: float, seeds: Sequence[float]) -> float:
    """The largest accepted difference of a loss from the baseline's: `tolerance` as a share, or the spread over seeds."""
    if tolerance is not None:
        return tolerance * abs(baseline)
    known = [loss for loss in (baseline, *seeds) if math.isfinite(loss)]
    return max(known) - min(known) if known else 0.0


def verdict(result: Result, baseline: Result, allowed: float, deterministic: bool) -> str:
    """Why a candidate is not to be recommended, or an empty string.

    `allowed` is the largest difference of the losses; `deterministic` is whether it has to repeat bit for bit.
    """
    if not result.candidate.same_training:
        return "another training"
    if not math.isfinite(result.loss):
        return "loss not finite"
    if abs(result.loss - baseline.loss) > allowed:
        return "loss too far off"
    if deterministic and result.repeats is False:
        return "does not repeat"
    return verdict_on_speed(result.ratios)


def verdict_on_speed(ratios: Sequence[float]) -> str:
    """Why a candidate's speed does not pay, or an empty string."""
    if pays(ratios):
        return ""
    return "slower" if surely_above_one([1 / ratio for ratio in ratios]) else "no clear gain"


def paying(results: Iterable[Result]) -> list[Result]:
    """The candidates that pay, the fastest first."""
    fit = [result for result in results if result.candidate.kind != "baseline" and not result.verdict]
    return sorted(fit, key=lambda result: -result.ratio.median)


def recommended(results: Iterable[Result]) -> Result | None:
    """The fastest of those that pay; of those nearly as fast, the one with the fewest overrides."""
    fit = paying(results)
    close = [result for result in fit if result.ratio.median >= _AS_FAST * fit[0].ratio.median]
    return min(close, key=lambda result: len(result.candidate.words), default=None)


@dataclass(frozen=True)
class Sizes:
    """How much is measured of each candidate."""

    steps: int  # optimizer steps of one measurement
    warmup: int  # steps before them that are not timed
    repeats: int  # measurements
    compare: int  # steps from the start after which losses and weights are compared

    def seconds(self, step_s: float, build_s: float) -> float:
        """Time of a candidate as fast as the baseline: two builds, the compared steps twice, the measurements."""
        return 2 * build_s + step_s * (2 * self.compare + 1 + self.repeats * (self.steps + self.warmup))

    def within(self, share_s: float, step_s: float, build_s: float) -> Sizes:
        """As much, or less if that does not fit into a candidate's share of the time; see `seconds`."""
        sizes = self
        while sizes.seconds(step_s, build_s) > share_s:
            compared, measured = 2 * sizes.compare, sizes.repeats * (sizes.steps + sizes.warmup)
            shorter = sizes.steps > 1 or sizes.warmup > 1
            if sizes.compare > _FEWEST_COMPARED and (compared > measured or not shorter):
                less = {"compare": max(_FEWEST_COMPARED, int(0.8 * sizes.compare))}
            elif shorter:
                less = {"steps": max(1, int(0.8 * sizes.steps)), "warmup": max(1, int(0.8 * sizes.warmup))}
            elif sizes.repeats > _FEWEST_REPEATS:
                less = {"repeats": sizes.repeats - 1}
            else:
                break
            sizes = dataclasses.replace(sizes, **less)
        return sizes

    def beside_readers(self, read_ahead: int, step_s: float) -> tuple[int, int]:
        """Steps and warm-up for a candidate whose workers read so many steps ahead.

        Batches that were ready before the clock starts must not make it look faster, so these belong to the warm-up, and
        twice as many are timed; but no more than take half a second and a second.
        """
        steps = max(self.steps, min(2 * read_ahead, math.ceil(1.0 / step_s)))
        return steps, max(self.warmup, min(read_ahead, math.ceil(0.5 / step_s)))


def usual_steps(step_s: float) -> int:
    """Steps of a measurement that take a quarter of a second, at most 200."""
    return max(1, min(200, math.ceil(0.25 / step_s)))


def note_of_fewer(wanted: Sizes, sizes: Sizes, step_s: float, budget_s: float) -> list[str]:
    """A note if less is measured than was asked for."""
    if sizes == wanted:
        return []
    compared = f", {sizes.compare} compared ({wanted.compare})" if sizes.compare != wanted.compare else ""
    return [
        f"fewer steps than requested, because one takes {1000 * step_s:.3g} ms and budget_s={budget_s:g}: "
        f"{sizes.repeats} measurements of {sizes.steps} ({wanted.repeats} of {wanted.steps}){compared}"
    ]
