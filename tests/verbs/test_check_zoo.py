"""`check` finds each of many faults by name, and none in a training without one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import check_zoo

from runner.verbs._check.work import CHECKS

HEALTHY = (
    *("threads=1", "device=cpu", "data=digits", "data.dataset={_target_: check_zoo.shapes}", "data.split.val=0.2"),
    *("data.normalize={mean: null, std: null}", "data.batch_size=32", "transform=standard", "epochs=2"),
    "model={_target_: check_zoo.Net, num_classes: null}",
)
SLOW = {"overfit", "zero-input"}  # half of the time of a case


@pytest.fixture
def check(run: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """The checks by name, of a call whose status has to say what they do."""

    def call(*words: str) -> dict[str, dict[str, Any]]:
        result = run("check", "json=true", "budget_s=300", *HEALTHY, *words)
        assert result.status in (0, 1), result.err
        found = json.loads(result.out)
        checks = {each["name"]: each for each in found["checks"]}
        bad = any(each["status"] == "fail" for each in checks.values())
        assert result.status == int(bad) == int(not found["ok"])
        return checks

    return call


@pytest.mark.parametrize("case", check_zoo.CASES, ids=lambda case: f"{case.fault} {case.check}".replace(" ", "-"))
def test_each_fault_is_found_and_named(check: Callable[..., Any], case: check_zoo.Case) -> None:
    left_out = [] if case.check in SLOW else [f"skip=[{','.join(sorted(SLOW))}]"]
    found = check(*case.words, *left_out)[case.check]
    assert found["status"] == case.status, found
    assert case.evidence in found["evidence"]
    assert found["fix"]


@pytest.mark.parametrize("words", [(), check_zoo.REGRESSION], ids=["classification", "regression"])
def test_nothing_is_found_where_nothing_is_wrong(check: Callable[..., Any], words: tuple[str, ...]) -> None:
    made = check("train=true", "train_steps=20", *words)
    assert not [each for each in made.values() if each["status"] not in ("pass", "skip")]
    assert sum(each["status"] == "pass" for each in made.values()) > 35


def test_there_are_faults_enough_and_every_check_has_one() -> None:
    assert len({case.fault for case in check_zoo.CASES}) >= 25
    beside = {"beats-baselines"}  # takes a checkpoint
    assert {case.check for case in check_zoo.CASES} == {each.name for each in CHECKS} - beside


def test_a_run_is_compared_with_baselines(check: Callable[..., Any], run: Callable[..., Any]) -> None:
    found = {}
    for name, words in {"good": ("epochs=6",), "bad": ("optimizer.lr=1e-12",)}.items():
        trained = run("train", *HEALTHY, "logger=none", "log.progress=false", "evaluate.test=false", *words)
        assert trained.status == 0, trained.err
        with_run = (f"ckpt_path={trained.directory}", "trust=[check_zoo]", "only=[baselines,initial-loss]")
        found[name] = check(*with_run)
    assert found["good"]["beats-baselines"]["status"] in ("pass", "warn")
    assert found["bad"]["beats-baselines"]["status"] == "fail"
    assert "commonest class" in found["bad"]["beats-baselines"]["evidence"]
    assert found["bad"]["initial-loss"]["status"] == "skip", "the weights are not those of a start"
