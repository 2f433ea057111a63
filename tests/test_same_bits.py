"""`scripts/same_bits.py`: what it trains covers the options of the config, and what it compares is all but the clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.config.sources import shipped
from same_bits import difference, verdict
from same_bits_runs import RUNS

TRAIN = {"global_step": 5, "split": "train", "loss": 2.25, "samples_per_s": 35031.1, "peak_memory_mib": 512.0}
TEST = {"global_step": 5, "split": "test", "loss": 2.5}
SUMMARY = {"status": "finished", "weights_sha256": "67ac", "test": {"loss": 2.5}, "wall_s": 1.5}


def made(folder: Path, records: list[dict[str, Any]], summary: dict[str, Any]) -> Path:
    """A folder with a run."""
    run = folder / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.parametrize("group", ["optimizer", "scheduler", "transform", "loss"])
def test_every_option_of_a_group_is_in_a_run(group: str) -> None:
    options = {path.stem for path in (shipped() / group).glob("[!_]*.yaml")}
    words = {word for commands in RUNS.values() for command in commands for word in command.split()}
    defaults = {"cross_entropy", "none"}  # none computes nothing
    assert {option for option in options - defaults if f"{group}={option}" not in words} == set()


def test_only_times_throughput_and_memory_may_differ(tmp_path: Path) -> None:
    old = made(tmp_path / "old", [TRAIN, TEST], SUMMARY)
    clock = {"samples_per_s": 1.0, "peak_memory_mib": 1.0, "data_wait": 0.5}
    assert difference(old, made(tmp_path / "new", [TRAIN | clock, TEST], SUMMARY | {"wall_s": 9.0})) == ""


@pytest.mark.parametrize(
    ("records", "summary", "found"),
    [
        ([TRAIN | {"loss": 2.250000000000001}, TEST], SUMMARY, "metrics.jsonl:1: loss: 2.25 became 2.250000000000001"),
        ([TRAIN], SUMMARY, "metrics.jsonl:2: global_step: 5 became nothing"),
        ([TRAIN, TEST], SUMMARY | {"weights_sha256": "68ac"}, 'summary.json: weights_sha256: "67ac" became "68ac"'),
        ([TRAIN, TEST], SUMMARY | {"test": {"loss": 2.0}}, 'summary.json: test: {"loss": 2.5} became {"loss": 2.0}'),
    ],
)
def test_the_first_difference_is_reported(
    tmp_path: Path, records: list[dict[str, Any]], summary: dict[str, Any], found: str
) -> None:
    folders = [made(tmp_path / "old", [TRAIN, TEST], SUMMARY), made(tmp_path / "new", records, summary)]
    assert difference(*folders) == f"run/{found}"
    assert verdict([(0, ""), (0, "")], folders) == f"DIFFERENT: run/{found}"


def test_runs_that_leave_nothing_are_not_equal(tmp_path: Path) -> None:
    assert difference(tmp_path / "old", tmp_path / "new") == "no run has a summary"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ((2, "error: 'muon' is not an optimizer"), (0, ""), "new: at the commit: error: 'muon' is not an optimizer"),
        ((1, "ValueError"), (0, ""), "failed at the commit: ValueError"),
        ((0, ""), (2, "error: no such key"), "failed, and did not at the commit: error: no such key"),
        ((2, "error"), (2, "error: no such key"), "failed: error: no such key"),
    ],
)
def test_a_run_that_the_commit_refuses_is_new_and_one_that_fails_is_not(
    tmp_path: Path, old: tuple[int, str], new: tuple[int, str], found: str
) -> None:
    assert verdict([old, new], [tmp_path, tmp_path]) == found
