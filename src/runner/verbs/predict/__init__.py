"""Predict the classes of images: files, folders or a split, written as CSV, JSON lines or Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.verbs._help import asks_for_help, print_help
from runner.verbs._launch import claimed, complete_verb, launch_verb, with_lists

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    if asks_for_help(argv):
        return print_help("predict", __doc__, argv)
    return launch_verb("predict", expand_shorthand(argv), job, claimed(lambda values: Path("predictions"))).status


def expand_shorthand(argv: Sequence[str]) -> list[str]:
    """The words after the verb with `input=[a.png,b.png]` in place of `input=a.png,b.png`, a sweep to Hydra."""
    return with_lists(argv, ["input", "features", "tta"])


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    from runner.verbs.predict.work import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    return complete_verb("predict", argv, job)
