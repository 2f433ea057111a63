"""Profile training steps: where the time and the memory go, and which key to try first."""

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
        return print_help("profile", __doc__, argv)
    return launch_verb("profile", argv, job, claimed(lambda values: Path("profiles") / "sweeps")).status


def job(cfg: DictConfig) -> float | None:
    """One job of the verb, called by Hydra; importable without torch, because launchers pickle it."""
    # Read when torch is loaded: its profiler else tells on standard error what it does, and what it has not seen begin.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from runner.verbs.profile.run import run

    return run(cfg)


def complete(argv: Sequence[str]) -> int:
    """Answer a query of tab completion."""
    return complete_verb("profile", argv, job)
