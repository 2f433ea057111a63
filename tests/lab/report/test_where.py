"""Conditions on runs: what they mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from runner.base.errors import UserError
from runner.lab.report.where import condition

RUN: dict[str, Any] = {
    "amp": True, "test/accuracy": 0.99, "optimizer.lr": 1e-3, "model": "SmallCNN", "notes": None, "name": "two words",
    "status": "finished", "seed": 0, "accumulate": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("amp=true and test/accuracy>0.98", True),
        ("amp==true and test/accuracy>=0.99", True),
        ("amp", True),
        ("not amp or test/accuracy<0.5", False),
        ("amp=1", False),
        ("seed=false", False),
        ("seed=0", True),
        ("optimizer.lr=0.001", True),
        ("optimizer.lr in [0.001, 0.1]", True),
        ("optimizer.lr not in [0.001]", False),
        ("test/accuracy>0.9 and test/accuracy<=0.99", True),
        ("model=small_cnn", True),
        ("model='Small*'", True),
        ("model!=mlp", True),
        ("name='two words'", True),
        ("name='a=b'", False),
        ("notes=null", True),
        ("notes>1", False),
        ("status>1", False),
        ("(amp=false or seed<1) and status=finished", True),
        ("test/accuracy > -1", True),
    ],
)
def test_a_condition_means_what_it_says(text: str, holds: bool) -> None:
    assert condition(text, RUN)(RUN.get) is holds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("amp=", "is not a condition"),
        ("acuracy>1", "which no run has"),
        ("acc>0.9", "did you mean 'test/accuracy'"),
        ("test/acuracy>0.5", "did you mean 'test/accuracy'"),
        ("__import__('os').system('true')", "is not a comparison"),
        ("amp=__import__('os')", "which is not a value"),
        ("(lambda: 1)()=1", "no name of a key or metric"),
        ("0 < seed < 1", "join comparisons with and"),
        ("seed=[i for i in amp]", "which is not a value"),
        ("1=1", "no name of a key or metric"),
        ("seed is 0", "an unsupported comparison"),
        ("(" * 500 + "amp" + ")" * 500, "is not a condition"),
    ],
)
def test_anything_else_is_refused_and_never_evaluated(text: str, reason: str) -> None:
    with pytest.raises(UserError, match="where") as caught:
        condition(text, RUN)
    assert reason in str(caught.value)
