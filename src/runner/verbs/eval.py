"""Evaluate a checkpoint on a split: metrics, per-class accuracy, confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.verbs._help import asks_for_help, print_help

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    if asks_for_help(argv):
        return print_help("eval", __doc__, argv)
    from runner.config.app import launch
    from runner.config.resolve import problems_in
    from runner.config.schema import Eval

    outcome = launch(
        job,
        Eval,
        "eval",
        argv,
        also=lambda composition: problems_in(composition.values, composition, Eval)[1],
        sweep_root=_sweep_folder,
    )
    return outcome.status


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    from runner.verbs._evaluation import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    from runner.config.app import complete as ask

    return ask(job, "eval", argv)


def _sweep_folder(values: dict[str, Any]) -> Path:
    from runner.tracking.run_directory import claim, timestamp

    return claim(Path(str(values["output_root"])) / "evaluations", timestamp())
