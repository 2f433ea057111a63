"""Lengths of time as people type them."""

from __future__ import annotations

import re

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_WITH_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_WITH_COLONS = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)")
DURATION = "a time such as 2h, 90m, 1h30m, 1:30:00 or a number of seconds"


def seconds(text: str) -> float:
    """The seconds of `2h`, `90m`, `1h30m`, `1d`, `1:30:00` (hours, minutes, seconds), `2-12:00:00` (with days) or `5400`.

    Raises:
        ValueError: if it is none of these, or no time at all.
    """
    text = text.strip().replace(" ", "")
    if found := _WITH_COLONS.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        total = float(days * 86400 + hours * 3600 + minutes * 60 + rest)
    elif text and (found := _WITH_UNITS.fullmatch(text)):
        total = float(sum(int(part or 0) * unit for part, unit in zip(found.groups(), _UNITS.values(), strict=True)))
    else:
        total = float(text)
    if not 0 < total < float("inf"):
        raise ValueError(f"{text} is not a length of time")
    return total
