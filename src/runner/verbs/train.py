"""Train a model: one run, a sweep with --multirun, or a resume with ckpt_path=."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.verbs._help import asks_for_help, print_help
from runner.verbs._launch import claimed, complete_verb, launch_verb

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    if asks_for_help(argv):
        return print_help("train", __doc__, argv)
    outcome = launch_verb("train", argv, job, claimed(lambda values: Path(str(values["name"])) / "sweeps"))
    if outcome.sweep is None or outcome.status == 2 or not outcome.sweep.is_dir():  # no job was started
        return outcome.status
    return max(outcome.status, _report(outcome.sweep))


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    from runner.train import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    return complete_verb("train", argv, job)


def _report(sweep: Path) -> int:
    """Print the table of a sweep; returns 1 if any of its jobs failed."""
    from runner.tracking.console import Console
    from runner.tracking.sweep import print_table, summarise

    failed = print_table(summarise(sweep), Console(None))
    print(sweep)
    return int(failed)
