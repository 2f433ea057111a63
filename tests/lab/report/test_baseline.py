"""Baselines: what is an alarm, what is none, and what is named."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import runner
from runner.lab.report.baseline import compare

MACHINE = {"cpu": "one", "cores": 2, "devices": [], "threads": 1}


def measured(seed: int, count: int = 5, **factors: float) -> dict[str, Any]:
    """What `measure` finds in noisy runs, some of whose means are multiplied."""
    draw = random.Random(seed)
    means = {"val/accuracy": 0.95, "loss": 0.5, "step": 12.0, "memory": 800.0, "startup": 2.0}
    spreads = {"val/accuracy": 0.005, "loss": 0.02, "step": 0.05, "memory": 0.01, "startup": 0.1}

    def value(name: str) -> float:
        noise = draw.gauss(0, spreads[name])
        mean = means[name] * factors.get(name.split("/")[0], 1.0)
        return mean + noise if name == "val/accuracy" else mean * (1 + noise)

    runs = []
    for number in range(count):
        loss = value("loss")
        run = {"seed": number, "metric": {"val/accuracy": value("val/accuracy")}, "mode": {"val/accuracy": "max"}}
        curve = [[step, loss] for step in range(1, 11)]
        runs.append(run | {"curve": curve} | {name: value(name) for name in ("step", "memory", "startup")})
    setting = {"varied": {}, "config": {"optimizer.lr": 0.01}, "runs": runs, "failed": 0}
    return {"format": 1, "machine": MACHINE, "code": {"torch": "2.0"}, "settings": [setting]}


def test_repetitions_are_no_alarm() -> None:
    alarms = [compare(measured(2 * at), measured(2 * at + 1), {}).worse for at in range(300)]
    assert sum(alarms) <= 3


def test_a_metric_that_the_first_run_lacks_keeps_its_direction() -> None:
    before = measured(0)
    before["settings"][0]["runs"][0] |= {"metric": {}, "mode": {}}
    assert not compare(before, measured(1, val=1.03), {}).worse
    found = compare(before, measured(1, val=0.96), {})
    assert [each.measure for each in found.measures if each.verdict == "worse"] == ["val/accuracy"]


@pytest.mark.parametrize(
    ("factors", "named"),
    [
        ({"val": 0.96}, "val/accuracy"),
        ({"loss": 1.2}, "training loss"),
        ({"loss": 0.7}, "is augmentation or regularisation missing?"),
        ({"step": 1.5}, "time of a step"),
        ({"memory": 1.2}, "memory"),
        ({"startup": 2.5}, "start-up"),
        *(
            ({"val": 1.03} | more, None)
            for more in ({}, {"loss": 0.7}, {"step": 0.5}, {"memory": 0.5}, {"startup": 0.3})
        ),
    ],
)
def test_a_change_for_the_worse_is_caught_and_named_and_one_for_the_better_is_not(factors: Any, named: Any) -> None:
    now = measured(1, **factors)
    now["settings"][0]["config"]["optimizer.lr"] = 0.02
    found = compare(measured(0), now, {})
    assert found.worse == bool(named)
    assert {each.verdict for each in found.measures} == {"worse" if named else "better", "same"}
    for reason in found.reasons:
        assert named in reason
        assert "optimizer.lr was 0.01, now 0.02" in reason


def test_a_busy_quarter_of_an_hour_is_no_alarm() -> None:
    before, now = measured(0), measured(1, step=1.5, startup=2.5)
    for run in now["settings"][0]["runs"]:
        run["fastest"] = 12.0
    now["settings"][0]["runs"][2]["startup"] = 2.2
    assert compare(before, now, {}).reasons == []
    before["settings"][0]["runs"][0]["fastest"] = 9.0
    assert compare(before, now, {}).reasons[0].startswith("time of a step")


def test_a_tolerance_allows_a_change() -> None:
    now = measured(1, step=1.5)
    assert compare(measured(0), now, {"step": 1.0}).worse is False
    assert compare(measured(0), now, {"step": 0.0}).worse is True
    assert compare(measured(0), measured(1, loss=0.5), {"loss": float("inf")}).worse is False


@pytest.mark.parametrize(
    ("before", "now", "tolerance", "verdict", "allowed"),
    [
        ([0.95], [0.946], {}, "same", "0.005"),
        ([0.95], [0.944], {}, "worse", "0.005"),
        ([0.94, 0.95, 0.96], [0.925], {}, "same", "0.03"),  # three standard deviations of the baseline
        ([0.94, 0.95, 0.96], [0.90, 0.93], {}, "worse", "0.03"),
        ([0.94, 0.95, 0.96], [0.99], {}, "better", "0.03"),
        ([0.94, 0.95, 0.96], [0.925], {"metric": 0.02}, "worse", "0.02"),
        ([0.94, 0.95, 0.96], [0.5], {"metric": float("inf")}, "same", "any"),
        ([40.0, 41.0], [38.5], {}, "same", "5%"),
    ],
)
def test_the_tolerance_is_that_of_the_user_or_covers_the_seeds_of_the_baseline(
    before: list[float], now: list[float], tolerance: dict[str, float], verdict: str, allowed: str
) -> None:
    both = [measured(0, len(values)) for values in (before, now)]
    for side, values in zip(both, (before, now), strict=True):
        for run, value in zip(side["settings"][0]["runs"], values, strict=True):
            run["metric"]["val/accuracy"] = value
    found = compare(both[0], both[1], tolerance)
    first = found.measures[0]
    assert (first.measure, first.verdict, first.allowed) == ("val/accuracy", verdict, allowed)
    assert first.before.endswith(f"(n {len(before)})")
    assert ("±" in first.before) == (len(before) > 1)
    assert any("no spread over seeds" in note for note in found.notes) == (len(before) == 1)


def test_another_machine_or_a_busy_one_is_not_compared_in_time() -> None:
    now = measured(1, step=3.0, memory=2.0)
    now["machine"] = MACHINE | {"cpu": "other"}
    found = compare(measured(0), now, {})
    assert not found.worse
    assert "cpu was one, now other" in found.notes[0]
    busy = measured(1, step=3.0)
    busy["settings"][0]["runs"][0]["waited"] = 0.9
    assert not compare(measured(0), busy, {}).worse


def test_failed_runs_and_unknown_settings_are_said() -> None:
    before, now = measured(0), measured(1)
    now["settings"][0]["failed"] = 2
    assert "2 runs failed" in compare(before, now, {}).reasons[0]
    before["settings"][0]["varied"] = now["settings"][0]["varied"] = {"optimizer.lr": 0.01}
    other = copy.deepcopy(now["settings"][0]) | {"varied": {"optimizer.lr": 9}, "config": {"optimizer.lr": 9}}
    now["settings"] = [measured(3)["settings"][0] | {"varied": {"optimizer.lr": 0.01}}, other]
    found = compare(before, now, {})
    assert not found.worse
    assert found.notes == ["optimizer.lr=9 is not in the baseline"]


def test_the_command_line_saves_compares_and_exits_with_4(many: Any, run: Any, workdir: Path) -> None:
    before = [str(many(20) / str(number)) for number in range(5)]
    assert run("report", *before, "save_baseline=baseline.json").status == 0
    same = run("report", *before, "against=baseline.json")
    assert same.status == 0, same.err
    assert "no worse than the baseline" in same.out
    for number in range(5):
        shutil.copytree(before[number], workdir / "now" / str(number))
        path = workdir / "now" / str(number) / "summary.json"
        summary = json.loads(path.read_text())
        summary["test"]["accuracy"] -= 0.05
        path.write_text(json.dumps(summary))
    worse = run("report", "now", "against=baseline.json", "json=report.json", "tolerance.metric=0.01")
    assert worse.status == 4, worse.out
    assert "worse: test/accuracy" in worse.out
    assert json.loads(Path("report.json").read_text())["comparison"]["worse"] is True
    assert run("report", "now", "against=baseline.json", "tolerance.metric=0.1").status == 0
    runs_as_baseline = runner.report("now", against=many(20) / "0").comparison
    assert runs_as_baseline is not None
    assert run("report", str(many(40) / "39"), "save_baseline=none.json").status == 2


def test_a_run_notes_its_start_up_and_how_long_it_waited_for_a_core(train_once: Any) -> None:
    found = train_once("model=small_cnn", "model.width=8", "epochs=1", "limit.train_batches=4").summary
    assert found["startup_s"] > 0
    assert 0 <= found.get("cpu_wait", 0) <= 1


def test_the_workflow_of_a_new_project_is_a_ratchet(run: Any, workdir: Path) -> None:
    assert run("new", "project", "mine").status == 0
    content = yaml.safe_load(Path("mine/.github/workflows/runner.yml").read_text())
    [job] = content["jobs"].values()
    text = "\n".join(step.get("run", "") for step in job["steps"])
    assert "experiment=mine" in text
    assert "against=baseline.json" in text
    assert "save_baseline=baseline.json" in text
