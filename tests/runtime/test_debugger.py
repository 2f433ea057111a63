"""`debug=pdb` opens the debugger in the frame that raised, when everything else is done."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, at, **unused):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.calls, self.at = 0, at

    def forward(self, images):
        self.calls += 1
        secret = 4321 + self.calls
        if self.calls == self.at:
            raise ValueError("wrong on purpose")
        return self.layer(images.flatten(1))
"""


@pytest.fixture
def scripted(
    own_module: Callable[..., Path], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Train a model that raises in its call number `at`, with these lines typed."""
    own_module("my_nets", NET)
    monkeypatch.setenv("NO_COLOR", "1")

    def call(at: int, typed: str, *words: str) -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        model = (f"model={{_target_: my_nets.Net, at: {at}}}", "data.batch_size=512")
        return run("train", *model, "threads=1", "logger=none", "epochs=1", "transform=none", *words)

    return call


def test_the_frame_that_raised_can_be_looked_at(scripted: Any) -> None:
    result = scripted(3, "p secret\nwhere\nq\n", "debug=pdb")
    assert result.status == 1
    assert "post_mortem: ValueError: wrong on purpose" in result.out
    assert "4324" in result.out
    assert result.summary["status"] == "failed", "the run is over before the debugger opens"
    assert "wrong on purpose" in result.err


def test_what_a_sentence_was_made_of_can_be_looked_at(scripted: Any) -> None:
    result = scripted(1, "p secret\nq\n", "debug=pdb")
    assert result.status == 2
    assert "model: cannot take images" in result.err
    assert "4322" in result.out


@pytest.mark.parametrize(
    ("at", "words", "rank"),
    [
        (3, (), "0"),  # nobody asked for it
        (0, ("debug=pdb", "data.batch_size=5000", "data.drop_last=true"), "0"),  # a mistake of the user's
        (0, ("debug=pdb",), "0"),  # a sound run
        (3, ("debug=pdb",), "1"),  # a process that is not the first
    ],
)
def test_nothing_is_opened_where_nothing_is_to_be_looked_at(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, at: int, words: tuple[str, ...], rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    found = scripted(at, "p secret\nq\n", *words).out
    assert "post_mortem" not in found
    assert "4324" not in found


def test_a_tracer_goes_on_when_the_debugger_is_left(scripted: Any) -> None:
    before = sys.gettrace()

    def tracer(*_: object) -> None:
        return None

    try:
        sys.settrace(tracer)
        result = scripted(3, "q\n", "debug=pdb")
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert "post_mortem" in result.out
    assert after is tracer
