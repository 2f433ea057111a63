"""Checks of constructor arguments, and whether there is a network for trained weights."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from runner.base.errors import UserError

_PATIENCE_S = 4.0


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


def unknown(key: str, problem: str, word: str, choices: Sequence[str]) -> UserError:
    """The error for a word that is not one of many choices, with those that are spelled most like it."""
    close = difflib.get_close_matches(word.lower(), choices, n=3, cutoff=0.5)
    return UserError(key, problem, f"such as {', '.join(close)}" if close else ", ".join(choices[:100]), *close[:1])


def reachable(url: str) -> bool:
    """True if an address answers within seconds, with any status: downloads retry for a minute, or wait without end."""
    try:
        urlopen(Request(url, method="HEAD"), timeout=_PATIENCE_S).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def cache_alone() -> Iterator[str]:
    """Read what is in the cache without trying for a minute to reach a hub that does not answer; gives why, or nothing."""
    from huggingface_hub import constants

    before, why = constants.HF_HUB_OFFLINE, ""
    if not before and not reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
        why = f"{constants.ENDPOINT} does not answer, and {constants.HF_HUB_CACHE} does not have them"
    try:
        yield why
    finally:
        constants.HF_HUB_OFFLINE = before
