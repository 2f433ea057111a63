"""What the tests of the command line share: a checkpoint to work on."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

# Half a second of training: 29 samples for it, 3 to validate on, one step.
TINY = (
    *("threads=1", "logger=none", "log.progress=false", "log.curves=false", "device=cpu"),
    *("data=synthetic", "data.dataset.samples=32", "data.image_size=8", "model=small_cnn", "model.width=4"),
    *("epochs=1", "evaluate.test=false"),
)


def words_of(base: Sequence[str], settings: dict[str, Any]) -> tuple[str, ...]:
    """The words `base` with some keys set, instead of those about the same keys."""
    given = {key: re.sub(r'"(\w+)": ', r"\1: ", json.dumps(value)) for key, value in settings.items()}
    keys = {word: word.lstrip("+~").partition("=")[0] for word in base}
    others = [word for word, key in keys.items() if not given.keys() & {key, key.partition(".")[0]}]
    return (*others, *map("=".join, given.items()))


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Overrides that make `train` as small as it can be."""
    return TINY


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, Path]]:
    """Train in a new folder, once for all tests of a process: what was printed, and the directory of the run or sweep."""
    from runner.cli import main

    @functools.cache
    def call(*words: str) -> tuple[str, Path]:
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.chdir(tmp_path_factory.mktemp("made_once"))
            patch.delenv("RUNNER_TRUST", raising=False)
            assert main(["train", *TINY, *words]) == 0
            return out.getvalue(), Path(out.getvalue().strip().splitlines()[-1]).absolute()

    return call


@pytest.fixture
def trained(made_once: Callable[..., tuple[str, Path]]) -> Path:
    """The directory of a finished tiny run; to be read only."""
    return made_once("name=first")[1]
