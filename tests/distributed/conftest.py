"""Ranks that stay for all tests, and the modules of those that fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_faults
import rank_functions

from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool()
    yield made
    made.close()


@pytest.fixture
def on_ranks(pool: RankPool, tmp_path: Path) -> Callable[..., list[Any]]:
    """What a function of the `World` gives on each of some ranks, as JSON."""

    def call(function: Callable[..., Any], ranks: int) -> list[Any]:
        pool(rank_functions.write, (tmp_path, function), ranks)
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]

    return call


@pytest.fixture
def here(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a test whose ranks import `rank_faults`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(rank_faults.__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("RUNNER_TRUST", "rank_faults")
    return workdir
