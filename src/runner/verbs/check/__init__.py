"""Check data, model, loss and training loop for common mistakes before a run: pass, warn or fail, with evidence and a fix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.verbs._help import asks_for_help, print_help
from runner.verbs._launch import claimed, complete_verb, launch_verb, with_lists

if TYPE_CHECKING:
    from omegaconf import DictConfig

_SHORT = {"--json": "json=true", "--strict": "strict=true", "--train": "train=true"}


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    if asks_for_help(argv):
        return print_help("check", __doc__, argv)
    return launch_verb("check", expand_shorthand(argv), job, claimed(lambda values: Path("checks"))).status


def expand_shorthand(argv: Sequence[str]) -> list[str]:
    """The arguments with `json=true` instead of `--json`, and `only=[a,b]` instead of `only=a,b` or `only=a`."""
    words = with_lists([_SHORT.get(word, word) for word in argv], ["only", "skip"])
    if {"--multirun", "-m"} & set(argv):
        return words
    return [re.sub(r"^(only|skip)=([\w-]+)$", r"\1=[\2]", word) for word in words]


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    from runner.verbs.check.run import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    return complete_verb("check", argv, job)
