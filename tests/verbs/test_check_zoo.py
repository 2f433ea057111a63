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

HEALTHY = (
    *("check", "json=true", "threads=1", "device=cpu", "budget_s=300"),
    *(
        "data=digits",
        "data.dataset={_target_: check_zoo.shapes}",
        "data.normalize={mean: null, std: null}",
        "data.batch_size=32",
        "data.split.val=0.2",
    ),
    *("model={_target_: check_zoo.Net, num_classes: null}", "transform=standard", "epochs=2"),
)


@pytest.fixture
def check(run: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """The checks by name, of a call whose status has to say what they do."""

    def call(*words: str) -> dict[str, dict[str, Any]]:
        result = run(*HEALTHY, *words)
        assert result.status in (0, 1), result.err
        found = json.loads(result.out)
        checks = {each["name"]: each for each in found["checks"]}
        bad = any(each["status"] == "fail" for each in checks.values())
        assert result.status == int(bad) == int(not found["ok"])
        return checks

    return call


@pytest.mark.parametrize("case", check_zoo.CASES, ids=lambda case: f"{case.fault} {case.check}".replace(" ", "-"))
def test_each_fault_is_found_and_named(check: Callable[..., Any], case: check_zoo.Case) -> None:
    found = check(*case.words)[case.check]
    assert found["status"] == case.status, found
    assert case.evidence in found["evidence"]
    assert found["fix"]


@pytest.mark.parametrize("words", [(), check_zoo.REGRESSION], ids=["classification", "regression"])
def test_nothing_is_found_where_nothing_is_wrong(check: Callable[..., Any], words: tuple[str, ...]) -> None:
    wrong = [each for each in check(*words).values() if each["status"] not in ("pass", "skip")]
    assert not wrong


def test_there_are_faults_enough_and_every_check_has_one() -> None:
    from runner.verbs._check.work import CHECKS

    assert len({case.fault for case in check_zoo.CASES}) >= 25
    alone = {"gradient-scale", "overfit", "training", "beats-baselines"}  # tested beside the zoo
    assert {case.check for case in check_zoo.CASES} == {each.name for each in CHECKS} - alone
