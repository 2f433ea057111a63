"""What `scripts/benchmark_peers.py` compares is the same work, and it says so when it is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peers import bare_loop, clock, dataloader_loop, hand_loop, tables
from peers.cases import CASES, Job
from peers.processes import words
from peers.work import Work, work_of
from runner.cli import main
from runner.optim.schedules import Cosine

JOB = Job(case="digits", contender="bare", epochs=3, samples=None, threads=1, seed=0)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return work_of(replace(JOB, folder=str(tmp_path), result=str(tmp_path / "result.json")))


def result_of(work: Work) -> dict[str, Any]:
    return json.loads(Path(work.job.result).read_text())


def test_tricks_of_the_bare_loop_change_no_weight(work: Work) -> None:
    bare, hand = (clock.train(loop, work, clock.Clock()) for loop in (bare_loop, hand_loop))
    torch.testing.assert_close(bare.state_dict(), hand.state_dict(), rtol=1e-3, atol=1e-4)


def test_rates_set_by_hand_are_those_of_runner(work: Work) -> None:
    schedule = Cosine(work.total_steps)
    assert work.rates() == pytest.approx([work.case.lr * schedule.factor(step) for step in range(work.total_steps)])


def test_every_epoch_but_the_first_is_timed(work: Work) -> None:
    timer = clock.Clock()
    timer.write(work, clock.train(dataloader_loop, work, timer))
    found = result_of(work)
    assert len(found["epochs_s"]) == 2
    assert found["step_s"] == pytest.approx(sum(found["epochs_s"]) / 2 / work.steps)
    assert found["quickest_s"] == pytest.approx(min(found["epochs_s"]) / work.steps)


def test_runner_starts_from_the_same_weights_and_ends_as_well(work: Work, tmp_path: Path) -> None:
    job, file = replace(work.job, contender="runner", further=("logger=none",)), tmp_path / "job.json"
    job.write(file)
    assert main(words(job, file)) == 0
    by_runner = result_of(work)
    by_hand = work.score(clock.train(hand_loop, work, clock.Clock()))
    runs = {"runner": [by_runner], "hand": [by_hand | {"step_s": 1.0, "quickest_s": 1.0}]}
    assert len(by_runner["epochs_s"]) == 2
    assert by_hand["accuracy"] > 0.9
    case = CASES["digits"]
    assert tables.unequal(runs, case.loss_tolerance, case.accuracy_tolerance) == []


def test_a_contender_that_learned_less_is_named() -> None:
    good, bad = {"loss": 0.1, "accuracy": 0.98}, {"loss": 0.1, "accuracy": 0.9}
    nan = {"loss": float("nan"), "accuracy": 0.98}
    assert tables.unequal({"a": [good], "b": [good], "c": [good]}, 0.5, 0.02) == []
    (complaint,) = tables.unequal({"a": [good], "b": [good], "c": [bad]}, 0.5, 0.02)
    assert complaint.startswith("c: test accuracy 90.00%")
    assert any(text.startswith("c: ") for text in tables.unequal({"a": [good], "b": [good], "c": [nan]}, 0.5, 0.02))


def test_ratios_are_taken_within_a_round() -> None:
    runs = {"runner": [{"step_s": 1.0}, {"step_s": 4.0}], "hand": [{"step_s": 2.0}, {"step_s": 8.0}]}
    assert tables.ratios(runs, "runner")["hand"] == [2.0, 2.0]


def test_contenders_that_are_not_installed_are_in_the_table() -> None:
    run = {"step_s": 1e-4, "quickest_s": 1e-4, "loss": 0.1, "accuracy": 0.98}
    assert any(
        "lightning is not installed" in line
        for line in tables.table({"bare": [run]}, {"lightning": "lightning"}, "bare")
    )
