"""Compare the toggles for speed and memory on this machine; `bench data` compares input and compute."""

from __future__ import annotations

import os
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
        return print_help("bench", __doc__, argv)
    return launch_verb("bench", expand_shorthand(argv), job, claimed(lambda values: Path("benchmarks"))).status


def expand_shorthand(argv: Sequence[str]) -> list[str]:
    """The words after the verb with `part=data` in place of a leading `data`."""
    return ["part=data", *argv[1:]] if list(argv[:1]) == ["data"] else list(argv)


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    from runner.verbs.bench.work import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    if "COMP_LINE" in os.environ:
        os.environ["COMP_LINE"] = os.environ["COMP_LINE"].replace("runner data ", "runner ", 1)
    return complete_verb("bench", argv, job)
