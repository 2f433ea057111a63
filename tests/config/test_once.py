"""A single run is composed once, as composing is most of the time until it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hydra._internal.hydra import Hydra

TELLER = """
from hydra.experimental.callback import Callback

class Tell(Callback):
    def on_run_start(self, config, **_): print("run begins")
    def on_job_start(self, config, *, task_function, **_): print("job of", task_function.__module__)
    def on_run_end(self, config, **_): print("run ended")
"""


def test_a_run_is_composed_once(compose: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    composed, real = [], Hydra.compose_config

    def counted(self: Hydra, *args: Any, **given: Any) -> Any:
        composed.append(given)
        return real(self, *args, **given)

    monkeypatch.setattr(Hydra, "compose_config", counted)
    assert compose("seed=12345").values["seed"] == 12345
    assert len(composed) == 1


def test_callbacks_of_hydra_are_told_of_it(
    train: Callable[..., Any], run: Callable[..., Any], workdir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "teller.py").write_text(TELLER)
    monkeypatch.syspath_prepend(str(workdir))
    out = train("debug=smoke", "model=mlp", "+hydra.callbacks.t._target_=teller.Tell").out
    assert [line for line in out.splitlines() if line.startswith(("run ", "job "))] == [
        "run begins", "job of runner.verbs.train", "run ended",
    ]  # fmt: skip
    mistaken = run("train", "name=${nothere}", "+hydra.callbacks.t._target_=teller.Tell")
    assert mistaken.status == 2
    assert "run begins" not in mistaken.out
