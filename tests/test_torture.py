"""The short form of `scripts/torture.py`: a few of each kind of fault, by the code that the long form runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import forked
import pytest

import torture
from faults import damage, ending, table, writing
from runner.checkpoint import file

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.mark.slow
@pytest.mark.extended
def test_whatever_is_done_to_a_run_nothing_is_lost(workdir: Path) -> None:
    done = forked.run(["--short", "--json", "table.json"], timeout=1200, script=str(SCRIPTS / "torture.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((workdir / "table.json").read_text())
    assert {row["section"] for row in rows} == {*torture.SECTIONS}
    assert all(row["injected"] or row["note"] for row in rows)


def test_a_broken_promise_is_counted_and_said() -> None:
    said: list[str] = []
    row = table.Row("kills", "SIGKILL")
    row.count("", said.append)
    assert not row.broken
    row.count("other bits", said.append)
    assert row.broken
    assert (row.injected, row.kept) == (2, 1)
    assert said == ["BROKEN kills, SIGKILL: other bits"]


def test_a_line_that_is_there_twice_or_missing_would_be_found() -> None:
    whole: ending.Lines = {"metrics.jsonl": [{"loss": 1.0}, {"loss": 2.0}], "tensorboard loss/val": [(1, math.nan)]}
    assert ending.difference(whole, {name: list(found) for name, found in whole.items()}) == ""
    twice = whole | {"metrics.jsonl": [{"loss": 1.0}, {"loss": 2.0}, {"loss": 2.0}]}
    assert ending.difference(whole, twice) == "metrics.jsonl, line 3: {'loss': 2.0} instead of nothing"
    assert "tensorboard loss/val, line 1: nothing" in ending.difference(whole, whole | {"tensorboard loss/val": []})


def test_a_damaged_checkpoint_that_is_believed_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"damaged")
    assert damage._believed(tmp_path / "a.safetensors") == ""
    monkeypatch.setattr(file, "read", lambda path: {})
    assert damage._believed(tmp_path / "a.safetensors") == "a damaged checkpoint was read"


def test_a_reported_checkpoint_that_is_gone_or_half_there_would_be_found(tmp_path: Path, train: Any) -> None:
    words = ("data=synthetic", "data.dataset.samples=48", "data.image_size=8", "model=mlp", "max_steps=2")
    run = train(*words, "evaluate.test=false", f"hydra.run.dir={tmp_path / 'run'}").directory  # type: ignore[attr-defined]
    assert writing._damage(run) == ""
    (run / "checkpoints" / "best.safetensors").unlink()
    assert "best is of step None" in writing._damage(run)
    (run / "checkpoints" / "last.safetensors").unlink()
    assert "last is of step None" in writing._damage(run)
    (run / "checkpoints" / "last.safetensors").write_bytes(b"half")
    assert "last.safetensors: is truncated" in writing._damage(run)
