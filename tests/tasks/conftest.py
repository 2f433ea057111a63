"""What the tests of tasks share: modules of `tests/support` may be named in configs, and mistakes are sentences."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import own_steps
import pytest


@pytest.fixture(autouse=True)
def _trusted(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_TRUST", "own_steps own_networks")
    monkeypatch.setenv("PYTHONPATH", str(Path(own_steps.__file__).parent), prepend=os.pathsep)  # for commands of verbs


@pytest.fixture
def printed(json_of: Callable[..., Any]) -> Callable[..., Any]:
    """What a verb that succeeds prints with `json=true`: `printed("eval", "ckpt_path=last")["metrics"]`."""
    return lambda *words: json_of(*words, "threads=1")


@pytest.fixture
def refused(rejected: Callable[..., Any]) -> Callable[..., None]:
    """Check that `train`, or the verb that is given, answers words by a sentence with a key and parts of the reason."""

    def call(words: Sequence[str], key: str, *reasons: str, verb: str = "train logger=none") -> None:
        err = rejected(*verb.split(), "threads=1", *words).err
        assert f"{key}:" in err
        assert [reason for reason in reasons if reason not in err] == [], err

    return call
