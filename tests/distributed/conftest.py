"""Ranks that stay for all tests, and the modules of those that fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_faults

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    made = RankPool()
    yield made
    made.close()


@pytest.fixture
def here(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a test whose ranks import `rank_faults`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(rank_faults.__file__).parent))
    monkeypatch.setenv("RUNNER_TRUST", "rank_faults")
    return workdir
