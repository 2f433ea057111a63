"""Lengths of time as people type them."""

import pytest

from runner.base.durations import seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", 7200), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("1d2h3m4s", 93784), ("1:30:00", 5400), ("5:00", 300),
        ("2-12:00:00", 216000), ("5400", 5400), ("0.5", 0.5), ("1h 30m", 5400),
    ],
)  # fmt: skip
def test_a_length_of_time(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "2x", "h", "0", "-5", "0h", "1:2:3:4", "inf", "nan", "30m1h"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        seconds(text)
