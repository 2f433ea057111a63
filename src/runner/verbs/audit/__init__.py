"""Run the same steps twice, or under two settings, and name the first tensor that differs; also of two checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.verbs._help import asks_for_help, print_help
from runner.verbs._launch import claimed, complete_verb, launch_verb

if TYPE_CHECKING:
    from omegaconf import DictConfig

_SHORT = re.compile(r"^\+*vary=([A-Za-z_][\w.]*):(.+)\Z", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    if asks_for_help(argv):
        return print_help("audit", __doc__, argv)
    return launch_verb("audit", expand_shorthand(argv), job, claimed(lambda values: Path("audits"))).status


def expand_shorthand(argv: Sequence[str]) -> list[str]:
    """The words after the verb with `vary.KEY=[A,B]` instead of `vary=KEY:A,B`, which Hydra would read as a sweep."""
    return [_SHORT.sub(r"vary.\1=[\2]" if "," in word else r"vary.\1=\2", word) for word in argv]


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    from runner.verbs.audit.run import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    return complete_verb("audit", argv, job)
