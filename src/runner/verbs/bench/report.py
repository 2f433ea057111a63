"""What `bench` shows and writes: tables, sentences, and the records of `bench.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from runner.tracking.formats import number
from runner.verbs._report import Report, mib
from runner.verbs.bench.stats import Bottleneck, Result, Spread, rates

STEP = "a step on one batch"


def _range(spread: Spread) -> str:
    return f"{number(spread.low)} to {number(spread.high)}"


def show_toggles(report: Report, results: Sequence[Result], on_cuda: bool, repeats: int) -> None:
    """The table of a comparison of toggles, the baseline first."""
    baseline = results[0]
    columns = [
        *("overrides", "samples/s", "step ms", "quartiles", "ratio", "peak MiB" if on_cuda else "peak RSS MiB"),
        *("saved MiB", "loss", "difference", "same bits", "start s", "verdict"),
    ]
    rows = [
        [
            result.candidate.name,
            number(result.samples_per_s.median),
            number(result.step_ms.median),
            _range(result.step_ms),
            f"{result.ratio.median:.2f}",
            mib(result.peak_bytes, 1),
            "" if result.saved_bytes is None else mib(result.saved_bytes),
            number(result.loss),
            "" if result is baseline else f"{result.loss - baseline.loss:+.2g}",
            {True: "yes", False: "no", None: ""}[result.repeats],
            f"{result.start_s:.2f}",
            "" if result is baseline else result.verdict or "pays",
        ]
        for result in results
    ]
    report.table(f"medians of {repeats} measurements of each, made in turns", columns, rows)


def toggle_record(result: Result, baseline: Result) -> dict[str, Any]:
    """A result as plain containers."""
    return {
        "overrides": list(result.candidate.words),
        "kind": result.candidate.kind,
        "settings": dict(result.candidate.settings),
        "samples_per_s": dataclasses.asdict(result.samples_per_s),
        "step_ms": dataclasses.asdict(result.step_ms),
        "ratio": dataclasses.asdict(result.ratio),
        "seconds_per_sample": result.seconds,
        "ratios": result.ratios,
        "peak_memory_bytes": result.peak_bytes,
        "saved_bytes": result.saved_bytes,
        "loss": result.loss,
        "loss_difference": result.loss - baseline.loss,
        "same_bits": result.repeats,
        "start_s": result.start_s,
        "verdict": result.verdict,
    }


def show_data(report: Report, results: Sequence[Result], computing: Spread, repeats: int) -> None:
    """The table of a comparison of data paths, the configured one first."""
    rows = [[STEP, "", number(computing.median), _range(computing), "", ""]]
    for result in results:
        reading, speed = rates(result.reading), result.samples_per_s
        verdict = "" if result is results[0] else result.verdict or "pays"
        speeds = (number(reading.median), number(speed.median), _range(speed), f"{result.ratio.median:.2f}")
        rows.append([result.candidate.name, *speeds, verdict])
    columns = ["overrides", "reading alone", "training", "quartiles", "ratio", "verdict"]
    report.table(f"samples/s, medians of {repeats} measurements of each, made in turns", columns, rows)


def data_record(result: Result) -> dict[str, Any]:
    """A data path as plain containers."""
    return {
        "overrides": list(result.candidate.words),
        "settings": dict(result.candidate.settings),
        "reading_samples_per_s": dataclasses.asdict(rates(result.reading)),
        "samples_per_s": dataclasses.asdict(result.samples_per_s),
        "ratio": dataclasses.asdict(result.ratio),
        "ratios": result.ratios,
        "verdict": result.verdict,
    }


def bottleneck_sentence(found: Bottleneck) -> str:
    """The bottleneck in words."""
    factor = f"{found.factor:.1f} times as long as"
    sentence = {
        "input": f"input: reading a batch takes {factor} computing on it",
        "compute": f"compute: computing on a batch takes {factor} reading it",
        "neither": "neither: reading a batch takes about as long as computing on it",
    }[found.kind]
    return f"bottleneck: {sentence}; waiting for input is {found.waiting:.0%} of a step"


def advice(found: Bottleneck, pays: bool) -> str:
    """What to do about a bottleneck; `pays` if one of the data paths does."""
    if pays:
        return "the settings below feed the model faster"
    if found.kind == "compute":
        return "none of the data paths helps; python -m runner bench compares what makes a step faster"
    return (
        "none of the data paths helps: make reading a sample cheaper "
        "(smaller files, a batch transform instead of a sample transform)"
    )
