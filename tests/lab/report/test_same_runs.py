"""`sweep`, `watch` and `report` of the same files: the same states, the same best, the same command that repeats a job."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from stored_sweeps import live_text, make_job, make_ledger, table_text
from tiny_runs import TINY

import runner
from runner.lab.report.page import content_of
from runner.sweeps.rows import rows_in
from runner.sweeps.table import look, summarise

RATES = ("optimizer.lr=0.1", "optimizer.lr=0.2", "optimizer.lr=0.3")


def make_run(folder: Path, words: list[str], status: str, value: float | None = None, **more: Any) -> Path:
    """The files of a run: `metric` and `mode` of its best value may be given, and anything else of its summary."""
    given = {name: more.pop(name, default) for name, default in (("metric", "val/accuracy"), ("mode", "max"))}
    best = None if value is None else {**given, "value": value, "loss": 0.1, "global_step": 5}
    known = {"error": "it broke" if status == "failed" else None, "monitor": given["metric"], "last": {}}
    make_job(folder, words, **{"status": status, "best": best, **known, **more})
    base = OmegaConf.create({"optimizer": {"lr": 0.5}, "seed": 0, "model": {"_target_": "a.Model"}})
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.merge(base, OmegaConf.from_dotlist(words))))
    (folder / "metrics.jsonl").write_text('{"global_step": 1, "split": "train", "loss": 0.5}\n')
    return folder


def states(folder: Path) -> dict[str, str]:
    """The state of each run in the table of the sweep, after it was seen to be the same in the other two."""
    found = {row.job: row.status for row in rows_in(folder)}
    view = look(folder)
    assert {row.job: row.status for row in view.rows} == found
    text = "\n".join(live_text(folder, 80))
    assert all(status in text for status in found.values())
    reported = {str(run.path.relative_to(folder)): run.status for run in runner.runs(folder)}
    assert reported == {job: status for job, status in found.items() if status != "pending"}
    return found


def test_a_job_that_was_killed_before_it_wrote_anything_is_reported_with_its_reason(tmp_path: Path) -> None:
    words = [[rate, f"seed={seed}"] for rate in RATES[:2] for seed in (0, 1)]
    make_run(tmp_path / "0", words[0], "finished", 0.9)
    (tmp_path / "1").mkdir()
    make_run(tmp_path / "2", words[2], "running")
    killed = {"event": "failed", "sentence": "killed by SIGKILL: perhaps out of memory"}
    events = [{"event": "finished"}, killed, dict(killed)]
    make_ledger(tmp_path, words, [event | {"overrides": own} for event, own in zip(events, words, strict=False)])
    assert states(tmp_path) == {"0": "finished", "1": "died", "2": "died", "-": "pending"}
    found = runner.runs(tmp_path)
    assert [run.error for run in found][1:] == [killed["sentence"]] * 2
    assert [run.repeat for run in found][1:] == [f"python -m runner train {' '.join(own)}" for own in words[1:3]]
    assert found.notes == (f"{tmp_path}: 1 of 4 jobs have not started",)
    alone, *others = runner.runs(tmp_path / "2", tmp_path)
    assert (alone.error, len(others)) == (killed["sentence"], 2)


def test_seeds_of_a_budget_are_one_row_though_each_measured_its_own_number_of_steps(tmp_path: Path) -> None:
    for number, (budget, seed) in enumerate([("10m", 0), ("10m", 1), ("20m", 0), (None, 0)]):
        words = [f"seed={seed}", *([f"budget={budget}"] if budget else ["max_steps=500"])]
        folder = make_run(tmp_path / f"{number}", words, "finished", 0.9 - number / 100)
        config = yaml.safe_load((folder / "config.yaml").read_text()) | {"max_steps": 500 + number, "budget": budget}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    table = runner.report(tmp_path).table
    assert [len(row.runs) for row in table.rows] == [2, 1, 1]
    assert [row.values["budget"] for row in table.rows] == ["10m", "20m", None]
    assert "max_steps" not in runner.report(tmp_path / "0", tmp_path / "1", tmp_path / "2").table.keys


def test_a_planned_job_whose_folder_was_removed_is_pending_in_both(tmp_path: Path) -> None:
    words = [[rate] for rate in RATES[:2]]
    make_run(tmp_path / "0", words[0], "finished", 0.9)
    make_ledger(tmp_path, words, [{"event": "finished", "overrides": own} for own in words])
    assert states(tmp_path) == {"0": "finished", "-": "pending"}
    assert runner.runs(tmp_path).notes == (f"{tmp_path}: 1 of 2 jobs have not started",)


def test_a_search_keeps_trials_without_a_folder_and_never_calls_a_pruned_one_the_best(tmp_path: Path) -> None:
    words = [[rate, "sweep=optuna", "search.trials=4"] for rate in RATES]
    make_run(tmp_path / "0", words[0], "finished", 0.9)
    make_run(tmp_path / "1", words[1], "pruned", 0.99)
    ended = {"status": "finished", "metric": "val/accuracy", "value": 0.97, "sentence": None}
    events = [{"event": "finished"}, {"event": "pruned"}, {"event": "finished"} | ended]
    make_ledger(tmp_path, None, [event | {"overrides": own} for event, own in zip(events, words, strict=True)])
    assert states(tmp_path) == {"0": "finished", "1": "pruned", "2": "finished"}
    assert look(tmp_path).headline == "2 of 3 jobs finished, 1 pruned, best val/accuracy 0.97 (job 2)"
    table = runner.report(tmp_path).table
    assert [row.runs[0].path.name for row in table.rows] == ["2", "0", "1"]
    assert [row.best for row in summarise(tmp_path)] == [False, False, True]
    best = content_of(runner.runs(tmp_path))["runs"]
    assert [run["lost"] for run in best] == [False, True, False]


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        ({"status": "failed", "error": "lr must be positive\nTraceback"}, "failed", "lr must be positive"),
        ({"status": "nonsense"}, "died", "no run has the status nonsense"),
        ({"status": "running"}, "died", "it is still marked as running: it was killed"),
        ({"status": None}, "died", "no run has the status None"),
        ("{", "died", "its summary.json is damaged, so its result is unknown"),
        (None, "died", "it left no summary.json"),
        (
            {"status": "finished", "monitor": "val/accuracy", "last": {"accuracy": None}},
            "failed",
            "its objective is not finite: val/accuracy is nan",
        ),
    ],
)
def test_a_state_is_told_from_the_others(tmp_path: Path, content: Any, status: str, reason: str) -> None:
    make_run(tmp_path / "0", [RATES[0]], "finished", 0.9)
    make_run(tmp_path / "1", [RATES[1]], "finished", 0.9)
    file = tmp_path / "1" / "summary.json"
    file.unlink()
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert states(tmp_path) == {"0": "finished", "1": status}
    text = table_text(rows_in(tmp_path))
    assert f"error: job 1 {status}: " in text
    assert reason in text
    assert "Traceback" not in text
    assert reason in str(runner.runs(tmp_path)[1].error)


def test_the_best_is_the_smallest_also_where_the_first_run_failed_before_it_had_a_value(tmp_path: Path) -> None:
    make_run(tmp_path / "0", [RATES[0]], "failed", metric="val/loss")
    for number, value in enumerate((0.5, 0.2), 1):
        make_run(tmp_path / str(number), [RATES[number]], "finished", value, metric="val/loss", mode="min")
    for number, (status, value) in enumerate((("failed", 0.1), ("finished", None)), 3):
        make_run(tmp_path / str(number), [f"seed={number}"], status, value, metric="val/loss", mode="min")
    assert [row.best for row in summarise(tmp_path)] == [False, False, True, False, False]
    found = runner.report(tmp_path, sort="status")
    assert found.runs[0].monitor == "val/loss"
    assert [row.runs[0].path.name for row in runner.report(tmp_path).table.rows][:2] == ["2", "1"]
    assert content_of(found.runs)["mode"] == "min"


def test_a_setting_of_which_all_repetitions_failed_is_below_those_with_a_result(tmp_path: Path) -> None:
    for seed, (rate, status, value) in enumerate([(0, "failed", 0.99), (1, "finished", 0.8), (1, "failed", 0.99)]):
        make_run(tmp_path / str(seed), [RATES[rate], f"seed={seed}"], status, value)
    rows = runner.report(tmp_path).table.rows
    assert [row.values["val/accuracy"].mean for row in rows] == [0.8, 0.99]
    assert [row.status for row in rows] == ["1 finished, 1 failed", "failed"]
    lines = json.loads((summarise(tmp_path), (tmp_path / "sweep.json").read_text())[1])["table"]
    assert [(line["mean"], line["finished"]) for line in lines] == [(0.8, 1), ("-", "-")]


def test_a_text_is_sorted_backwards_too_and_what_is_missing_is_last(tmp_path: Path) -> None:
    for number, started in enumerate(("2026-01-01", None, "2026-01-03")):
        make_run(tmp_path / str(number), [RATES[number]], "finished", 0.9, started=started)
    for sort, expected in (("started", ["0", "2", "1"]), ("-started", ["2", "0", "1"])):
        rows = runner.report(tmp_path, sort=sort).table.rows
        assert [row.runs[0].path.name for row in rows] == expected


def test_a_run_without_a_config_belongs_to_its_repetitions(tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / str(seed), [RATES[0], f"seed={seed}"], "finished", 0.9)
    make_run(tmp_path / "3", [RATES[1], "seed=0"], "finished", 0.8)
    (tmp_path / "1" / "config.yaml").unlink()
    table = runner.report(tmp_path).table
    assert table.keys == ("optimizer.lr",)
    assert [len(row.runs) for row in table.rows] == [3, 1]
    (tmp_path / "3" / "config.yaml").unlink()
    assert runner.report(tmp_path).table.keys == ("optimizer.lr",)


def test_each_metric_has_its_own_table_of_spreads(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"{seed}", ["data=a", f"seed={seed}"], "finished", 0.9)
        make_run(tmp_path / f"{seed + 2}", ["data=b", f"seed={seed}"], "finished", 0.3, metric="val/loss", mode="min")
    text = table_text(summarise(tmp_path))
    assert re.findall("^spread of (.*)$", text, re.MULTILINE) == ["val/accuracy", "val/loss"]


def test_the_job_that_nothing_is_switched_off_in_has_a_name(tmp_path: Path) -> None:
    for number, words in enumerate(([], ["ema=null"])):
        for seed in (0, 1):
            make_run(tmp_path / str(2 * number + seed), [*words, f"seed={seed}"], "finished", 0.9)
    rows = summarise(tmp_path)
    assert re.search("^base +seed +2 ", table_text(rows), re.MULTILINE)
    make_run(tmp_path / "other" / "0", [], "finished", 0.9)
    make_run(tmp_path / "other" / "1", ["ema=null"], "finished", 0.9)
    assert re.search("^ *0 +base +finished", table_text(summarise(tmp_path / "other")), re.MULTILINE)


def test_the_command_that_repeats_a_job_is_the_same_everywhere(tmp_path: Path) -> None:
    words = [RATES[0], "sweep.retry=all", "sweep=optuna", "search.trials=4"]
    make_run(tmp_path / "0", words, "failed")
    make_ledger(tmp_path, None, [{"event": "failed", "overrides": words}], flags=["--config-dir=mine"])
    expected = f"python -m runner train --config-dir=mine {RATES[0]}"
    [row], [run], [seen] = summarise(tmp_path), runner.runs(tmp_path), look(tmp_path).rows
    assert row.repeat == run.repeat == seen.repeat == expected
    alone = make_run(tmp_path / "elsewhere" / "alone", [RATES[0]], "failed")
    (alone / "environment.json").write_text(json.dumps({"command": ["train", "-cd", "mine", RATES[0]]}))
    assert look(alone).rows[0].repeat == runner.runs(alone)[0].repeat == expected.replace("--config-dir", "-cd")


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "runs" / "0", [], "finished", 0.9)
    monkeypatch.chdir(tmp_path)
    assert len(runner.runs(folder, "runs", "runs/../runs/0", os.fspath(tmp_path), "runs/**")) == 1


def test_a_run_that_was_continued_elsewhere_is_no_repetition_of_a_baseline(tmp_path: Path) -> None:
    make_run(tmp_path / "0", ["seed=0"], "failed", 0.5)
    make_run(tmp_path / "1", ["seed=0"], "finished", 0.9, resumed_from=str(tmp_path / "0" / "checkpoints" / "last"))
    text = tmp_path / "baseline.json"
    runner.report(tmp_path, save_baseline=text)
    [setting] = json.loads(text.read_text())["settings"]
    assert (len(setting["runs"]), setting["failed"]) == (1, 0)


def test_sweep_finds_the_sweep_below_a_folder_or_names_those_there_are(run: Any, workdir: Path) -> None:
    sweeps = workdir / "outputs" / "mine" / "sweeps"
    make_run(sweeps / "2026-01-01" / "0", [RATES[0]], "finished", 0.9)
    make_ledger(sweeps / "2026-01-01", [[RATES[0]], [RATES[1]]], [{"event": "finished", "overrides": [RATES[0]]}])
    assert run("sweep", "outputs/mine").out == run("sweep", str(sweeps / "2026-01-01")).out
    make_run(workdir / "outputs" / "mine" / "2026-01-03", [], "finished", 0.5)
    shutil.copytree(sweeps / "2026-01-01", sweeps / "2026-01-02")
    refused = run("sweep", "outputs/mine")
    assert refused.status == 2
    assert "2026-01-02, outputs/mine/sweeps/2026-01-01" in refused.err
    # A sweep that waits between two jobs is not over, whatever lies beside it.
    assert look(Path("outputs/mine")).done
    (sweeps / "2026-01-02" / ".lock").write_text("process 1 on elsewhere")
    assert not look(Path("outputs/mine")).done
    assert len(look(Path("outputs/mine")).rows) == 3


@pytest.mark.parametrize("option", ["csv", "md", "json", "html", "save_baseline"])
def test_a_file_named_minus_is_standard_output(
    option: str, run: Any, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(workdir / "runs" / "0", [], "finished", 0.9)
    (folder / "config.yaml").unlink()
    done = run("report", "runs", f"{option}=-")
    assert done.status == 0, done.err
    assert not (workdir / "-").exists()
    assert "config.yaml is missing" in done.err
    assert run("report", "runs", f"{option}=file").status == 0
    assert done.out == (workdir / "file").read_text()


def test_damaged_lines_of_metrics_are_told_where_metrics_are_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "0", [], "finished", 0.9)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\0\0\0\nnot json\n{"global_step": 2}\n{"global')  # the last one is being written
    assert runner.report(tmp_path).notes == ()
    notes = runner.report(tmp_path, html=tmp_path / "page.html").notes
    assert notes == (f"{folder}: metrics.jsonl has 2 damaged lines, skipped",)


def test_averaged_weights_are_compared_under_the_name_of_the_metric(tmp_path: Path) -> None:
    make_run(tmp_path / "0", [], "finished", 0.5)
    make_run(tmp_path / "1", ["ema=0.9"], "finished", 0.9, metric="val/ema_accuracy")
    make_run(tmp_path / "2", ["swa=0.5"], "finished", 0.8, metric="val/swa_accuracy")
    assert [row.values["val/accuracy"].mean for row in runner.report(tmp_path).table.rows] == [0.9, 0.8, 0.5]
    assert [run.value("val/ema_accuracy") for run in runner.runs(tmp_path)] == [None, 0.9, None]
    assert [(row.metric, row.best) for row in summarise(tmp_path)] == [
        ("val/accuracy", False),
        ("val/accuracy", True),
        ("val/accuracy", False),
    ]


def test_a_resumed_run_is_in_the_row_of_the_one_that_never_stopped(run: Any, workdir: Path) -> None:
    words = ("train", *TINY, "epochs=2", "transform=none", "performance=baseline")
    for name, more in (("never", ()), ("stopped", ("max_steps=1",)), ("other", ("transform=standard",))):
        assert run(*words, f"hydra.run.dir=runs/{name}", *more).status == 0
    assert run("train", "ckpt_path=runs/stopped", "max_steps=null", "hydra.run.dir=runs/resumed").status == 0
    table = runner.report("runs", columns="transform,performance").table
    rows = {frozenset(each.path.name for each in row.runs): row.values["transform"] for row in table.rows}
    assert rows == {frozenset({"never", "resumed"}): "none", frozenset({"other"}): "standard"}
    shutil.rmtree("runs/stopped")
    assert len(runner.report("runs").table.rows) == 2


FLIP = "transform.train=[{_target_: a.Flip, p: 0.5}]"
NODES = "transform.sample_train=[{_target_: a.Crop, size: 8}, {_target_: a.Flip}]"
OF_TASKS = [
    ("detection", "map", ["experiment=detection_torchvision", NODES, "optimizer.lr=0.1"], 0.25),
    ("detection", "map", ["experiment=detection_torchvision", NODES, "optimizer.lr=0.2"], 0.125),
    ("classification", "accuracy", ["model._target_=a.Own"], 0.5),
    ("classification", "accuracy", ["model=resnet18_cifar", FLIP], 0.75),
    ("classification", "accuracy", ["model=resnet18_cifar", FLIP], 0.25),
    ("segmentation", "miou", ["experiment=segmentation", "loss=dice"], 0.875),
]


def runs_of_three_tasks(folder: Path) -> None:
    """Runs of `OF_TASKS`, and one that failed before its config was written."""
    for number, (task, metric, words, value) in enumerate(OF_TASKS):
        chosen = {key: value for key, _, value in (word.partition("=") for word in words[:1]) if "." not in key}
        path = make_run(
            folder / task / str(number), [*words, f"seed={number}"], "finished", value, metric=f"val/{metric}",
            choices={"model": "mlp", "task": task} | chosen, test={metric: 0.0625},
        )  # fmt: skip
        # As in a real run, the options of groups are components in the config
        config = yaml.safe_load((path / "config.yaml").read_text())
        model = config["model"] if isinstance(config["model"], dict) else {"_target_": "a.ResNet"}
        config |= {"model": model, "task": {"_target_": f"runner.tasks.{task}"}}
        (path / "config.yaml").write_text(yaml.safe_dump(config))
    make_run(folder / "z" / "broken", ["model=mlp"], "failed")
    (folder / "z" / "broken" / "config.yaml").unlink()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_each_task_has_a_table_that_begins_with_run_status_and_metric(
    run: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    runs_of_three_tasks(workdir / "runs")
    monkeypatch.setenv("COLUMNS", str(width))
    out = run("report", "runs", "md=t.md", "csv=t.csv").out
    tables = re.split(r"\n(?=\w+: \d of)", out)
    assert [each.splitlines()[0] for each in tables] == [
        "classification: 3 of 4 runs finished, 1 failed",
        "detection: 2 of 2 runs finished",
        "segmentation: 1 of 1 runs finished",
    ]
    heads = [each.splitlines()[1].split() for each in tables]
    assert [head[:3] for head in heads] == [["run", "status", f"val/{name}"] for name in ("accuracy", "map", "miou")]
    assert heads[1][3:] == ["test/map", "optimizer.lr", "time"]
    first = [line.split("  ")[0] for line in tables[0].splitlines()[3:6]]
    assert first == ["classification/2", "classification/3 and 1 more", "z/broken"]
    if width > 80:
        assert re.search(r"classification/3 and 1 more +finished +0.5 . 0.35 +\S.* resnet18_cifar", tables[0])
        assert re.search(r"classification/2 +finished +0.5 +\S+ +Own", tables[0])
    assert "[Flip(p=0.5)]" in tables[0] or re.search("no room for .*transform.train", tables[0])
    assert max(len(line) for each in tables for line in each.splitlines()[:6]) <= width
    for text in (out, Path("t.md").read_text()):
        assert "_target_" not in text
    assert "## segmentation" in Path("t.md").read_text()
    assert [name for name in Path("t.csv").read_text().split(",") if re.fullmatch("val/.*[a-z]", name)][::2] == [
        "val/accuracy",
        "val/map",
        "val/miou",
    ]
    found = runner.report("runs", columns="val/map,optimizer.lr", sort="-val/map")
    assert [table.head for table in found.tables] == [
        ["run", "status", "optimizer.lr", "time"],
        ["run", "status", "val/map", "optimizer.lr", "time"],
        ["run", "status", "optimizer.lr", "time"],
    ]


def test_the_page_has_one_line_for_each_run_of_a_task(workdir: Path) -> None:
    runs_of_three_tasks(workdir / "runs")
    runner.report("runs", html="page.html")
    tasks = json.loads(Path("page.html").read_text().split('type="application/json">')[1].split("</script>")[0])
    assert [(each["task"], each["metric"]) for each in tasks] == [
        ("classification", "val/accuracy"),
        ("detection", "val/map"),
        ("segmentation", "val/miou"),
    ]
    assert [run["keys"] for run in tasks[1]["runs"]] == [
        {"optimizer.lr": 0.1, "seed": 0},
        {"optimizer.lr": 0.2, "seed": 1},
    ]
    assert {run["keys"]["model"] for run in tasks[0]["runs"]} == {"mlp", "Own", "resnet18_cifar"}


@pytest.mark.parametrize("option", ["csv", "md", "json", "html"])
def test_a_text_that_is_no_unicode_is_written_escaped(tmp_path: Path, option: str) -> None:
    make_run(tmp_path / "0", [], "failed")
    (tmp_path / "0" / "overrides.yaml").write_text('["notes=\\ud800"]')
    runner.report(tmp_path, columns="notes", **{option: tmp_path / "file"})  # type: ignore[arg-type]
    assert "\\ud800" in (tmp_path / "file").read_text()
