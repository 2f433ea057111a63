"""What `bench` shows and writes: tables, a picture, `bench.json`, and the overrides that it recommends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from runner.tracking.console import Console
from runner.tracking.environment import environment
from runner.tracking.files import write_json
from runner.tracking.formats import number
from runner.tracking.plots import bars
from runner.verbs.bench.candidates import LeftOut
from runner.verbs.bench.stats import Result, Spread

NOTHING = "nothing to change"
_MIB = 2**20


def recommendation(words: Sequence[str]) -> str:
    """The last but one line that `bench` prints."""
    return f"recommended: {' '.join(words) or NOTHING}"


def in_order(results: Sequence[Result]) -> list[Result]:
    """The baseline, then the others from the fastest to the slowest."""
    baseline, *others = results
    return [baseline, *sorted(others, key=lambda result: -result.ratio.median)]


def show_results(console: Console, results: Sequence[Result], device: torch.device, repeats: int) -> None:
    """The table of a comparison."""
    baseline = results[0]
    memory = "peak MiB" if device.type == "cuda" else "peak RSS MiB"
    columns = [
        *("overrides", "samples/s", "step ms", "quartiles", "ratio", memory, "saved MiB"),
        *("loss", "difference", "same bits", "start s", "verdict"),
    ]
    rows = [
        [
            result.candidate.name,
            number(result.samples_per_s.median),
            number(result.step_ms.median),
            f"{number(result.step_ms.low)} to {number(result.step_ms.high)}",
            f"{result.ratio.median:.2f}",
            f"{result.peak_bytes / _MIB:.1f}",
            "" if result.saved_bytes is None else f"{result.saved_bytes / _MIB:.2f}",
            number(result.loss),
            "" if result is baseline else f"{result.loss - baseline.loss:+.2g}",
            {True: "yes", False: "no", None: ""}[result.repeats],
            f"{result.start_s:.2f}",
            "" if result is baseline else result.verdict or "pays",
        ]
        for result in results
    ]
    console.table(f"medians of {repeats} measurements of each, made in turns", columns, rows)


def show_left_out(console: Console, left_out: Sequence[LeftOut]) -> None:
    """What was not measured, and why."""
    if left_out:
        console.table("left out", ["what", "why"], [list(pair) for pair in left_out])


def result_record(result: Result, baseline: Result) -> dict[str, Any]:
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


def write(
    record: dict[str, Any], folder: Path, speeds: Sequence[tuple[str, Spread]], reference: float, title: str
) -> dict[str, Any]:
    """Write `bench.json` and `bench.png`.

    Args:
        record: what was found out.
        folder: where to.
        speeds: samples a second by name, for the picture.
        reference: speed that the others are compared with.
        title: of the picture.

    Returns:
        The record with `environment` and `written`.
    """
    picture, path = folder / "bench.png", folder / "bench.json"
    bars(
        [name for name, _ in speeds],
        [(spread.median, spread.low, spread.high) for _, spread in speeds],
        reference,
        "samples/s, median and quartiles",
        picture,
        title,
    )
    record = record | {"environment": environment(), "written": [str(path), str(picture)]}
    write_json(path, record)
    return record
