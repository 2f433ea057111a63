"""Calls of `check` on cached compositions."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import forked
import pytest
import yaml


@pytest.fixture
def short_runs_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainings that `audit` and `bench` start are forked from a process with torch loaded, which saves its import."""

    def start(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return forked.run(command[3:])

    monkeypatch.setattr("runner.lab.short_runs.subprocess.run", start)


@pytest.fixture
def composed_check(compose: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """The checks by name of a call with a tuple of words and others, whose exit status must fit them.

    Hydra takes most of the time of a call. So it composes these and choices of groups, once for each; other words are put
    into a copy of the composition.
    """
    from runner.lab.check import run as check_run

    def call(base: tuple[str, ...], *words: str) -> dict[str, dict[str, Any]]:
        choices = [word for word in words if re.fullmatch(r"(task|loss|optimizer|transform|scheduler)=\w+", word)]
        composition = compose("json=true", *base, *choices, verb="check")
        for word in words:
            if word not in choices:
                _put(composition.values, *word.split("=", 1))
        out, status = io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            try:
                check_run.run(composition)
            except SystemExit as stop:
                status = stop.code  # type: ignore[assignment]
        found = json.loads(out.getvalue())
        failed = any(each["status"] == "fail" for each in found["checks"])
        assert status == int(failed)
        assert found["ok"] is not failed
        return {each["name"]: each for each in found["checks"]}

    return call


def _put(values: dict[str, Any], key: str, text: str) -> None:
    """Set a key as Hydra would: a dictionary is merged, unless it names another target."""
    *sections, last = key.split(".")
    for section in sections:
        values = values[section]
    before = values.get(last)
    value = float(text) if re.fullmatch(r"[\d.]+e-?\d+", text) else yaml.safe_load(text)  # to YAML, 1e-6 is a text
    if isinstance(value, dict) and isinstance(before, dict):
        same = value.get("_target_", before.get("_target_")) == before.get("_target_")
        value = {**before, **value} if same else value
    values[last] = value
