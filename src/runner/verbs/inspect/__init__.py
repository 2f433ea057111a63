"""Inspect a model: layers, parameters, FLOPs, weights, activations, gradients, features; tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.verbs._help import asks_for_help, print_help
from runner.verbs._launch import claimed, complete_verb, launch_verb

if TYPE_CHECKING:
    from omegaconf import DictConfig

_LIST = re.compile(r"^(\+*(?:what|tensors|features))=(?!null$)([\w.,]+)$")


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    if asks_for_help(argv):
        return print_help("inspect", __doc__, argv)
    return launch_verb("inspect", expand_shorthand(argv), job, claimed(lambda values: Path("inspections"))).status


def expand_shorthand(argv: Sequence[str]) -> list[str]:
    """The words after the verb with `features=[A,B]` instead of `features=A,B`, which Hydra would read as a sweep."""
    return [_LIST.sub(r"\1=[\2]", word) for word in argv]


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    from runner.verbs.inspect.run import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    return complete_verb("inspect", argv, job)
