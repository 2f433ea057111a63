"""Checks of constructor arguments."""

from __future__ import annotations


def at_least_1(**values: int) -> None:
    """Raise a `ValueError` that names the first argument below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def share(**values: float) -> None:
    """Raise a `ValueError` that names the first dropout rate outside [0, 1)."""
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
