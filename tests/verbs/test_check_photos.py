"""`check` on images like photographs: each fault is found by the check that is for it, and healthy trainings raise nothing."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import check_photo_zoo
from check_zoo import Case

from runner.verbs._check import work

BASE = (
    *("threads=1", "device=cpu", "data=digits", "data.dataset={_target_: check_photos.dataset}", "data.split.val=0.2"),
    *("data.normalize={mean: null, std: null}", "data.batch_size=16", "transform=standard", "epochs=6"),
    "model={_target_: check_photo_zoo.Net, num_classes: null}",
)


@pytest.fixture
def check(compose: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """The checks by name. Words are put into one composition, as Hydra takes most of the time of a call."""

    def call(*words: str) -> dict[str, dict[str, Any]]:
        composition = compose("json=true", "budget_s=300", *BASE, verb="check")
        for word in words:
            key, _, text = word.partition("=")
            *sections, last = key.split(".")
            place, value = composition.values, yaml.safe_load(text)
            for section in sections:
                place = place[section]
            before = place.get(last)
            merged = isinstance(value, dict) and isinstance(before, dict)
            if merged and value.get("_target_", before.get("_target_")) == before.get("_target_"):
                value = {**before, **value}
            place[last] = value
        out = io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(SystemExit),
        ):
            work._check(composition)
        return {each["name"]: each for each in json.loads(out.getvalue())["checks"]}

    return call


@pytest.mark.parametrize("case", check_photo_zoo.CASES, ids=lambda case: f"{case.fault} {case.check}".replace(" ", "-"))
def test_each_fault_is_found_by_the_check_for_it(check: Callable[..., Any], case: Case) -> None:
    checks = check(*case.words, f"only=[{case.check}]")
    assert checks["build"]["status"] == "pass", checks["build"]
    found = checks[case.check]
    assert found["status"] == case.status, found
    assert case.evidence in found["evidence"]
    assert found["fix"]
