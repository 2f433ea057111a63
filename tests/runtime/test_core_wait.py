"""A run on a busy machine says that its speed is not to be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tiny_runs import TINY


@pytest.mark.parametrize(
    "words",
    [("train",), ("profile", "steps=1", "trace_steps=0")],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_busy_machine_is_named_in_one_line_at_the_end(
    words: tuple[str, ...], share: float, run: Callable[..., Any], workdir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What imports the function comes first: an import after the change would keep it
    for module in ("run.run_directory", "lab.profile", "runtime.hardware_metrics"):
        monkeypatch.setattr(f"runner.{module}.waited_for_core", lambda: share * time.perf_counter())
    done = run(*words, *TINY)
    assert done.status == 0, done.err
    said = [line for line in done.out.splitlines()[-6:] if "the machine was busy" in line]
    assert len(said) == (share >= 0.3)
    assert all("50% of the time" in line for line in said)
