"""Checkpoints made without a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import forging
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
            "position": {"epoch": 1, "batch": 0, "global_step": step, "evaluation_due": False},
            "config": "seed: 0\n",
            "classes": ["cat", "dog"],
            "metrics": {
                "best": None,
                "last": {"val/loss": 0.5},
                "callbacks": {},
                "data": {},
                "sources": {},
                "images": [1, 8, 8],
            },
            "versions": {"torch": "2"},
        }
        return made | keys

    return make


@pytest.fixture
def forge_header() -> Callable[..., None]:
    """Write a file of the current layout with checksums that fit, whatever its header says."""

    def make(path: Path, metadata: dict[str, Any], entries: dict[str, Any], data: bytes = b"", text: str = "") -> None:
        known = {"format": str(FORMAT), "sha256": "0" * 64} | metadata
        header = text or json.dumps({"__metadata__": known, **entries}, separators=(",", ":"))
        path.write_bytes(forging.sealed_header(header.encode()) + data)

    return make
