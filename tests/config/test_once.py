"""A single run is composed once, as composing is most of the time until it begins."""

from __future__ import annotations

from typing import Any

import pytest
from hydra._internal.hydra import Hydra


def test_a_run_is_composed_once(compose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    composed, real = [], Hydra.compose_config

    def counted(self: Hydra, *args: Any, **given: Any) -> Any:
        composed.append(given)
        return real(self, *args, **given)

    monkeypatch.setattr(Hydra, "compose_config", counted)
    assert compose("seed=12345").values["seed"] == 12345
    assert len(composed) == 1
