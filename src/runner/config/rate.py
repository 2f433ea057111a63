"""The key `lr`: a short way to say `optimizer.lr`, or to have it found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.config.errors import Problem
from runner.config.schema.train import Train


def use_rate(config: Train, values: dict[str, Any]) -> None:
    """Move a number under `lr` to `optimizer.lr`, in the config and in the plain containers that it was made of."""
    if isinstance(config.lr, float):
        config.optimizer["lr"] = values["optimizer"]["lr"] = config.lr
        config.lr = values["lr"] = None


def two_rates(values: dict[str, Any], words: Sequence[str]) -> list[Problem]:
    """A problem if a command line gives `lr` and `optimizer.lr`."""
    named = {word.split("=")[0].lstrip("+"): word.partition("=")[2] for word in words}
    if values.get("lr") is None or named.get("lr", "null") == "null" or "optimizer.lr" not in named:
        return []
    return [Problem("lr", f"is {named['lr']}, and optimizer.lr is given too", "one of them")]
