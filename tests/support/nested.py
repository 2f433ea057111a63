"""Compares nested states, and the files of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def equal(first: Any, second: Any) -> bool:
    """Whether states have the same types and values, tensors bit for bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return type(first) is type(second) and first == second


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
