"""Checkpoints made without a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runner.checkpoint import rng
from runner.checkpoint.file import FORMAT


@pytest.fixture
def contents() -> Callable[..., dict[str, Any]]:
    def make(step: int = 7, **keys: Any) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(step)
        model = {"layer.weight": torch.randn(4, 3, generator=generator), "layer.steps": torch.tensor(step)}
        made: dict[str, Any] = {
            "format": FORMAT,
            "model": model,
            "optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "scheduler": {},
            "scaler": None,
            "averaged": None,
            "rng": rng.capture(),
            "position": {"epoch": 1, "batch": 0, "micro_batch": 0, "global_step": step, "evaluation_due": False},
            "config": "seed: 0\n",
            "classes": ["cat", "dog"],
            "metrics": {"best": None, "last": {"val/loss": 0.5}, "callbacks": {}},
            "versions": {"torch": "2"},
        }
        return made | keys

    return make
