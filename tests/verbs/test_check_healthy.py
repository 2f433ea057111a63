"""`check` finds nothing in trainings of many kinds in which nothing is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import healthy


@pytest.mark.parametrize("name", healthy.IN_SUITE)
def test_a_healthy_training_raises_nothing(run: Callable[..., Any], name: str) -> None:
    # scripts/check_healthy.py runs every training on its own, with all checks.
    skipped = () if name in healthy.WHOLE else ("skip=[data,labels,baselines,loop]",)
    result = run("check", "json=true", *healthy.WORDS, *healthy.IN_SUITE[name], *skipped)
    assert result.out, result.err
    checks = json.loads(result.out)["checks"]
    found = {each["name"]: each["evidence"] for each in checks if each["status"] != "pass" and each["fix"]}
    assert not found
    assert result.status == 0
