"""Find a learning rate: the loss while the rate grows from step to step, a suggestion and a picture."""

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
        return print_help("find-lr", __doc__, argv)
    return launch_verb("find-lr", argv, job, claimed(lambda values: Path("find-lr") / "sweeps")).status


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    from runner.verbs.find_lr.work import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    return complete_verb("find-lr", argv, job)
