"""`sweep=ablate`: the whole config, and each toggle that is on switched off by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from runner.config import keys
from runner.config.schema import Train
from runner.sweeps.plan import TOGGLES, toggles_off


@pytest.mark.extended
def test_each_toggle_that_is_on_is_off_in_one_job(run, tiny):
    words = ("sweep=ablate", "ema=0.9", "data.shift=0", "model.dropout=0.1", "optimizer.weight_decay=0")
    words += ("transform=none", "grad_clip.norm=1.0")
    result = run("train", *tiny, *words)
    assert result.status == 0, result.err
    folder = Path(result.out.strip().splitlines()[-1])
    found = []
    for job in "0123":
        config = yaml.safe_load((folder / job / "config.yaml").read_text())
        found.append((config["ema"], config["grad_clip"]["norm"], config["model"]["dropout"]))
    assert found == [(0.9, 1.0, 0.1), (None, 1.0, 0.1), (0.9, None, 0.1), (0.9, 1.0, 0)]
    assert not (folder / "4").exists()
    rows = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [row["varied"] for row in rows] == [[], ["ema=null"], ["grad_clip.norm=null"], ["model.dropout=0"]]
    again = run("train", *tiny, *words)
    assert again.out.count(": skipped, ") == 4
    other = run("train", *tiny, *words, "ema=0.8", "sweep.ablate=[ema]", "seed=0,1")
    assert other.status == 0, other.err
    assert "4 of 4 jobs finished" in other.out
    assert Path(other.out.strip().splitlines()[-1]) != folder


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("sweep.ablate=[emma]", "ema=0.9"), "did you mean 'ema'"),
        (("sweep.ablate=[ema]",), "is off already"),
        (("sweep.ablate=[name]",), "cannot be switched off"),
        (("sweep.ablate=[epochs]",), "epochs"),
        (("data.shift=0", "optimizer.weight_decay=0", "transform=none", "model.dropout=0"), "no toggle that is on"),
    ],
)
def test_what_cannot_be_switched_off_is_told(refused, words, reason):
    assert reason in refused("sweep=ablate", *words)


def test_every_toggle_is_a_key_and_has_a_value_that_is_off():
    values = {"sweep": {"ablate": "all"}}
    for key in TOGGLES:
        assert keys.find(Train, key) is not None
        section = values
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = [1] if key == "transform.train" else 0.5
    off = toggles_off(values, Train)
    assert list(off) == list(TOGGLES)
    assert {word.split("=")[1] for word in off.values()} == {"false", "null", "0", "[]"}
