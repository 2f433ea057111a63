"""A single run is composed once, as composing is most of the time until it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from runs_that_ended_early import lay_down

from runner.run import setup


def test_a_run_is_composed_once(compose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    composed, real = [], Hydra.compose_config

    def counted(self: Hydra, *args: Any, **given: Any) -> Any:
        composed.append(given)
        return real(self, *args, **given)

    monkeypatch.setattr(Hydra, "compose_config", counted)
    assert compose("seed=12345").values["seed"] == 12345
    assert len(composed) == 1


def test_a_command_is_resolved_once_to_be_compared_with_earlier_runs(
    compose: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_down(workdir / "outputs/digits")
    resolved, real = [], setup.resolve_config

    def counted(*given: Any) -> Any:
        resolved.append(given)
        return real(*given)

    monkeypatch.setattr(setup, "resolve_config", counted)
    assert setup.to_continue(compose("resume=auto", "seed=7")) == (None, [])
    assert len(resolved) == 1
