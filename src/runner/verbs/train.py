"""Train a model: one run, a sweep with --multirun, or a resume with ckpt_path=."""

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
        return print_help("train", __doc__, argv)
    from runner.config.app import launch
    from runner.config.resolve import problems_in
    from runner.config.schema import Train

    outcome = launch(
        job,
        Train,
        "train",
        argv,
        also=lambda composition: problems_in(composition.values, composition, Train)[1],
        sweep_root=_claim_sweep,
    )
    return outcome.status if outcome.sweep is None else max(outcome.status, _report(outcome.sweep))


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    from runner.train import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    from runner.config.app import complete as ask

    return ask(job, "train", argv)


def _claim_sweep(values: dict[str, Any]) -> Path:
    from runner.tracking.run_directory import claim, timestamp

    return claim(Path(str(values["output_root"])) / str(values["name"]) / "sweeps", timestamp())


def _report(sweep: Path) -> int:
    """Print the table of a sweep; returns 1 if any of its jobs failed."""
    from runner.tracking.console import Console
    from runner.tracking.sweep import print_table, summarise

    failed = print_table(summarise(sweep), Console(None))
    print(sweep)
    return int(failed)
