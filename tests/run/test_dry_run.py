"""`dry_run=true` builds everything, tries one step and prints the peak memory, and writes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MLP = ("model=mlp", "model.hidden=[16]", "model.dropout=0", "threads=1", "logger=none", "dry_run=true")


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (("accumulate=2", "ema=0.9"), "a step with batches of 64: "),
        (("devices=3", "strategy=fsdp"), "a step with batches of 22, of one of 3 ranks: "),
    ],
)
def test_what_was_built_and_the_peak_of_a_step_are_printed_and_nothing_is_written(
    run: Callable[..., Any], words: tuple[str, ...], step: str
) -> None:
    found = run("train", *MLP, *words)
    assert found.status == 0, found.err
    assert "digits  seed 0  a dry run" in found.out
    assert re.search(r"model +MLP, 1,210 parameters", found.out), found.out
    assert re.search(rf"(?m)^{step}[\d.,]+ [MG]iB \(most resident memory of the process\)", found.out), found.out
    assert list(Path().iterdir()) == []


def test_other_verbs_refuse_a_dry_run(problems: Callable[..., Any]) -> None:
    assert "is for train" in problems("dry_run=true", verb="bench")["dry_run"].message
