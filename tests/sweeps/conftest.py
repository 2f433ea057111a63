"""Fixtures of these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running_sweeps import COMMANDS
from tiny_runs import made_once, tiny, trained

__all__ = ["made_once", "tiny", "trained"]


@pytest.fixture
def sweep(run: Callable[..., Any], tiny: tuple[str, ...], workdir: Path) -> Callable[..., tuple[Any, Path]]:
    """Sweep over tiny runs; gives the result and the sweep's folder."""

    def call(*words: str) -> tuple[Any, Path]:
        result = run("train", *tiny, *words)
        return result, workdir / (result.out.strip().splitlines() or ["."])[-1]

    return call


@pytest.fixture
def refused(run: Callable[..., Any], tiny: tuple[str, ...], workdir: Path) -> Callable[..., str]:
    """The errors of a sweep over tiny runs that is refused before it makes a folder."""

    def call(*words: str) -> str:
        result = run("train", *tiny, *words)
        assert result.status == 2, result.out + result.err
        assert "Traceback" not in result.err
        assert list(workdir.iterdir()) == []
        return result.err

    return call


@pytest.fixture
def commands_launcher(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The words that choose a launcher of the user's, which runs the commands of jobs."""
    (workdir / "mine.py").write_text(COMMANDS)
    launcher = workdir / "my_conf/hydra/launcher/commands.yaml"
    launcher.parent.mkdir(parents=True)
    launcher.write_text("_target_: mine.Commands\nwords: [nice]\n")
    monkeypatch.syspath_prepend(workdir)
    return ("--config-dir=my_conf", "hydra/launcher=commands")
