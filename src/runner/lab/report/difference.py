"""The difference of two runs: config, environment, metrics, and whether they have the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runner.config.keys import flatten
from runner.lab.report.reading import MEASURED, Run

_NOT_COMPARED = ("command", "repeating", "variables.SLURM_JOB_ID")


@dataclass(frozen=True)
class Difference:
    """The differences of two runs: for each part, (name, value of the first, value of the second)."""

    config: list[tuple[str, Any, Any]]
    environment: list[tuple[str, Any, Any]]
    metrics: list[tuple[str, Any, Any]]
    sha256: tuple[str | None, str | None]  # of the weights


def difference(first: Run, second: Run) -> Difference:
    """Compare two runs; `audit a=RUN b=RUN` compares their checkpoints tensor by tensor."""
    metrics = [run.metrics | run.speed | {"time_s": run.value("time_s")} for run in (first, second)]
    ordered = dict.fromkeys([*metrics[0], *metrics[1]])
    numbers = [
        (name, metrics[0].get(name), metrics[1].get(name)) for name in sorted(ordered, key=MEASURED.__contains__)
    ]
    environment = differing(flatten(first.environment), flatten(second.environment))
    return Difference(
        config=differing(first.config, second.config),
        environment=[each for each in environment if not each[0].startswith(_NOT_COMPARED)],
        metrics=numbers,
        sha256=(first.summary.get("weights_sha256"), second.summary.get("weights_sha256")),
    )


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys that have another value, with both values; None for one that is not there."""
    keys = dict.fromkeys([*first, *second])
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]
