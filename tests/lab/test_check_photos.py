"""`check` on images like photographs: each fault is found by the check that is for it, and healthy trainings raise nothing."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extended import some

sys.path.insert(0, str(Path(__file__).parent))
import check_held_out
import check_photo_zoo
import check_zoo
import healthy
from check_zoo import Case, first_of_each

from runner.lab.check.run import CHECKS

BASE = (
    *("threads=1", "device=cpu", "data=digits", "data.dataset={_target_: check_photos.dataset}", "data.split.val=0.2"),
    *("data.normalize={mean: null, std: null}", "data.batch_size=16", "transform=standard", "epochs=6"),
    "model={_target_: check_photo_parts.Net, num_classes: null}",
)


@pytest.fixture
def check(composed_check: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """The checks by name, of a healthy training and further words."""
    return functools.partial(composed_check, BASE)


@pytest.mark.parametrize(
    "case",
    some(check_photo_zoo.CASES, *first_of_each(check_photo_zoo.CASES, *check_zoo.CASES)),
    ids=lambda case: f"{case.fault} {case.check}".replace(" ", "-"),
)
def test_each_fault_is_found_by_the_check_for_it(check: Callable[..., Any], case: Case) -> None:
    checks = check(*case.words, f"only=[{case.check}]")
    assert checks["build"]["status"] == "pass", checks["build"]
    found = checks[case.check]
    assert found["status"] == case.status, found
    assert case.evidence in found["evidence"]
    assert found["fix"]


def test_a_loss_without_a_gradient_is_found_where_it_is_built(check: Callable[..., Any]) -> None:
    checks = check("loss={_target_: check_photo_parts.Loss, fault: detached}", "only=[loss-minimum]")
    assert checks["build"]["status"] == "fail"
    assert "no gradient" in checks["build"]["evidence"]


@pytest.mark.parametrize(
    "case",
    some(check_held_out.CASES, *first_of_each(check_held_out.CASES, *check_zoo.CASES, *check_photo_zoo.CASES)),
    ids=lambda case: case.fault.replace(" ", "-"),
)
def test_faults_that_no_check_was_written_for_are_found(check: Callable[..., Any], case: Case) -> None:
    words = [*case.words]
    if not any(word.startswith("data.dataset") for word in words):
        words.insert(0, "data.dataset={_target_: check_held_out.dataset}")
    found = check(*words, f"only=[{case.check}]")[case.check]
    assert found["status"] in ("warn", "fail"), found


@pytest.mark.parametrize("names", some(check_photo_zoo.COMBINED, 1), ids=", ".join)
def test_healthy_trainings_raise_nothing(check: Callable[..., Any], names: tuple[str, ...]) -> None:
    checks = check(*(word for name in names for word in check_photo_zoo.HEALTHY[name]))
    assert not [each for each in checks.values() if each["status"] not in ("pass", "skip")]
    assert sum(each["status"] == "pass" for each in checks.values()) > 45


@pytest.mark.parametrize("name", some(list(healthy.TRAININGS), [*healthy.TRAININGS].index("mlp, adam")))
def test_a_healthy_training_of_another_kind_raises_nothing(run: Callable[..., Any], name: str) -> None:
    skipped = () if name in healthy.WHOLE else ("skip=[data,labels,baselines]",)
    result = run("check", "json=true", *healthy.WORDS, *healthy.TRAININGS[name], *skipped)
    assert result.out, result.err
    checks = json.loads(result.out)["checks"]
    assert not {each["name"]: each["evidence"] for each in checks if each["status"] != "pass" and each["fix"]}
    assert result.status == 0


def test_there_are_many_faults_and_every_new_check_has_one() -> None:
    named = {case.check for case in check_photo_zoo.CASES + check_held_out.CASES}
    groups = ("batches", "settings")
    assert named >= {each.name for each in CHECKS if each.group in groups}
    assert len(check_photo_zoo.CASES) >= 80
    assert len(check_photo_zoo.HEALTHY) >= 20
    assert sorted(check_photo_zoo.HEALTHY) == sorted(name for names in check_photo_zoo.COMBINED for name in names)
