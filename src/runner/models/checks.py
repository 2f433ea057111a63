"""Checks of constructor arguments."""

from __future__ import annotations


def at_least(name: str, value: int, minimum: int = 1) -> None:
    """Raise a `ValueError` that names the argument if `value` is below `minimum`."""
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def share(name: str, value: float) -> None:
    """Raise a `ValueError` that names the argument if a dropout rate is outside [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
