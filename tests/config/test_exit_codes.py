"""What ends a job becomes an exit code, a sentence, and a text; only unexpected errors show a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.base import errors
from runner.base.errors import DIVERGED, FAILED, PREEMPTED, USAGE, DataFailed, UserError, explain
from runner.engine.errors import BadMetric, Diverged, Preempted


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("seed", "cannot be -1"), USAGE, "seed: cannot be -1"),
        (DataFailed("a worker died"), FAILED, "a worker died"),
        (BadMetric("a metric is not a number", "a float"), USAGE, "a metric is not a number\n    allowed: a float"),
        (Diverged("the loss is nan"), DIVERGED, "diverged: the loss is nan"),  # and says what to try
        (Preempted("SIGTERM"), PREEMPTED, "stopped by SIGTERM"),
    ],
)
def test_errors_of_the_program_carry_their_exit_code(error: Exception, code: int, sentence: str) -> None:
    found = explain(error)
    assert found[:2] == (code, sentence)
    assert found[2].startswith(sentence)
    assert "Traceback" not in found[2]
    assert ("grad_clip.norm=1.0" in found[2]) == (code == DIVERGED)


def test_each_exit_code_has_one_meaning() -> None:
    codes = [
        value for name, value in vars(errors).items() if name.isupper() and name[0] != "_" and isinstance(value, int)
    ]
    assert len(codes) == len(set(codes)) >= 7
    table = (Path(__file__).parents[2] / "docs/reference/command_line.md").read_text()
    assert sorted(codes) == [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]


class Foreign(Exception):
    exit_code = 0


def test_an_exit_code_of_other_code_does_not_count() -> None:
    code, sentence, text = explain(Foreign("lost"))
    assert (code, sentence) == (FAILED, "Foreign: lost")
    assert "Foreign: lost" in text
