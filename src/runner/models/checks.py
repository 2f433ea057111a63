"""Checks of constructor arguments that several models share."""

from __future__ import annotations


def at_least(name: str, value: int, minimum: int = 1) -> None:
    """Refuse a whole number that is too small.

    Raises:
        ValueError: `value` is below `minimum`; the message names the argument.
    """
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def share(name: str, value: float) -> None:
    """Refuse a dropout rate that is negative, or that would drop everything.

    Raises:
        ValueError: `value` is outside [0, 1); the message names the argument.
    """
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
