"""The examples of `scripts/examples`: each trains, and one that is killed within an epoch ends in the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_runs import RUNS, prepare
from extended import some

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = sorted(RUNS)
CONF = f"--config-dir={SCRIPTS / 'examples' / 'conf'}"


@pytest.mark.parametrize("name", some(NAMES, NAMES.index("vae")))
def test_an_example_that_is_killed_ends_in_the_bits_of_one_that_is_not(
    name: str,
    train: Callable[..., Any],
    killed: Callable[..., Path],
    workdir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUNNER_TRUST", "examples")
    monkeypatch.syspath_prepend(SCRIPTS)
    prepare(workdir)
    words = (CONF, f"experiment={name}", *RUNS[name])
    whole = train(*words)
    assert whole.summary["global_step"] > 5
    directory = killed(2, *words, "checkpoint.every_steps=1")
    resumed = train(CONF, f"ckpt_path={directory}", "callbacks=none", "data.num_workers=2")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.summary.get("test") == whole.summary.get("test")


def test_every_example_has_a_short_run() -> None:
    experiments = {path.stem for path in (SCRIPTS / "examples" / "conf" / "experiment").glob("*.yaml")}
    assert experiments == {*RUNS}
