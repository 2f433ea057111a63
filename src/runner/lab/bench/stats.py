"""The statistics of measurements, and what they recommend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from runner.lab.bench.candidates import BASELINE, Candidate

# A gain that nobody would notice is no reason to change a config, however surely it was measured.
_SMALLEST_GAIN = 1.02
# Of candidates this close to the fastest, the one with the fewest overrides is recommended.
_AS_FAST = 0.98


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


@dataclass
class Result:
    """The measurements of a candidate."""

    candidate: Candidate  # what was measured
    samples: float  # samples of an optimizer step
    loss: float  # mean training loss over the first steps
    first_s: float = 0.0  # seconds a sample in the first steps, without the very first
    start_s: float = 0.0  # seconds to build it and make the very first step
    peak_bytes: int = 0  # most memory in use, beyond what was in use before it was built
    saved_bytes: int | None = None  # what the graph of a batch keeps for backward; None if that cannot be counted
    seconds: list[float] = field(default_factory=list)  # seconds a sample, of each measurement
    ratios: list[float] = field(default_factory=list)  # speed relative to the baseline, round by round

    @property
    def step_ms(self) -> Spread:
        """Milliseconds of an optimizer step."""
        return Spread.of([1000 * self.samples * seconds for seconds in self.seconds])

    @property
    def samples_per_s(self) -> Spread:
        """Samples a second."""
        return Spread.of([1 / seconds for seconds in self.seconds])

    @property
    def ratio(self) -> Spread:
        """Speed relative to the baseline, above 1 for faster."""
        return Spread.of(self.ratios)

    @property
    def verdict(self) -> str:
        """The reason why it is not recommended; empty if it pays, and for the baseline.

        A gain pays if it is at least 2 % in the median, and no round is slower: with seven rounds, chance alone makes all of
        them faster for 1 in 128 candidates.
        """
        if self.candidate is BASELINE:
            return ""
        if not self.candidate.same_training:
            return "another training"
        if not math.isfinite(self.loss):
            return "loss not finite"
        if statistics.median(self.ratios) >= _SMALLEST_GAIN and min(self.ratios) > 1:
            return ""
        return "slower" if max(self.ratios) < 1 else "no clear gain"


def paying(results: Iterable[Result]) -> list[Result]:
    """The candidates that pay, the fastest first."""
    fit = [result for result in results if result.candidate is not BASELINE and not result.verdict]
    return sorted(fit, key=lambda result: -result.ratio.median)


def recommended(results: Iterable[Result]) -> Result | None:
    """The fastest of those that pay; of those nearly as fast, the one with the fewest overrides."""
    fit = paying(results)
    close = [result for result in fit if result.ratio.median >= _AS_FAST * fit[0].ratio.median]
    return min(close, key=lambda result: len(result.candidate.words), default=None)
