"""A sweep, a run or a folder of runs seen from its files while it runs."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console as Rich

from runner.sweeps.events import Event
from runner.sweeps.follow import Display, PoolDisplay, follow
from runner.sweeps.ledger import Ledger
from runner.sweeps.view import headline_of, lines_of, look, progress_line, seconds_left, short, table_of
from runner.tracking.console import Console
from runner.tracking.progress_file import NAME, Progress


def job(
    folder: Path, words: list[str], status: str, progress: Progress | None = None, value: float | None = None
) -> None:
    folder.mkdir(parents=True)
    (folder / "overrides.yaml").write_text(yaml.safe_dump(words))
    best = None if value is None else {"metric": "val/accuracy", "mode": "max", "value": value, "global_step": 5}
    summary = {"status": status, "error": "it broke" if status == "failed" else None, "best": best, "wall_s": 61}
    (folder / "summary.json").write_text(json.dumps(summary | {"started": "2026-11-20T10:00:00+00:00"}))
    if progress is not None:
        (folder / ".lock").write_text("process 1 on elsewhere")  # counts as alive
        (folder / NAME).write_text(json.dumps(dataclasses.asdict(progress)))


def progress(**more: object) -> Progress:
    known = {
        "global_step": 30,
        "total_steps": 120,
        "epoch": 2,
        "total_epochs": 8,
        "seconds_left": 90.0,
        "device": "cpu",
    }
    return Progress(**{**known, "train": {"loss": 0.5}, "time": time.time(), **more})  # type: ignore[arg-type]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of four jobs: one finished, one failed, one running, one pending."""
    words = [["epochs=8", f"optimizer.lr=0.{number}", "seed=0"] for number in range(1, 5)]
    folder = tmp_path / "sweep"
    job(folder / "0", words[0], "finished", value=0.75)
    job(folder / "1", words[1], "failed")
    job(folder / "2", words[2], "running", progress(metric="val/accuracy", last=0.5, best=0.875, best_step=20))
    ledger = Ledger(folder)
    jobs = {str(number): each for number, each in enumerate(words)}
    ledger.append("launch", swept=["optimizer.lr"], base={}, jobs=jobs, flags=[], retry="failed", fail_fast=False)
    for number, event in enumerate(("finished", "failed", "started")):
        ledger.append(event, job=str(number), overrides=words[number], folder=str(number))
    return folder


def test_a_sweep_is_seen_with_the_progress_and_the_metric_so_far_of_its_jobs(sweep):
    view = look(sweep)
    assert [seen.row.status for seen in view.jobs] == ["finished", "failed", "running", "pending"]
    running = view.jobs[2]
    assert (running.share, running.result, running.left) == ("25% step 30/120", ("val/accuracy", 0.875), "1:30")
    assert view.jobs[0].result == ("val/accuracy", 0.75)
    assert "1 of 4 finished, 1 running, 1 failed, 1 pending, best val/accuracy 0.75 (job 0), about " in view.headline
    assert not view.done
    assert progress_line(view).endswith("; job 2 25% step 30/120 val/accuracy 0.875")


def test_before_an_evaluation_the_loss_is_shown_and_silence_is_told(sweep):
    (sweep / "2" / NAME).write_text(json.dumps(dataclasses.asdict(progress(time=time.time() - 600))))
    running = look(sweep).jobs[2]
    assert running.result == ("train loss", 0.5)
    assert running.left == "silent for 10:00"


@pytest.mark.parametrize("columns", [80, 160])
def test_the_table_fits_the_terminal(sweep, columns):
    rich = Rich(width=columns, file=io.StringIO(), force_terminal=False)
    rich.print(table_of(look(sweep), columns, 20))
    lines = rich.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    text = "\n".join(line.rstrip() for line in lines)
    for part in (
        "lr=0.3",
        "running",
        "━━────── " + " 25%",
        "0.875",
        "cpu",
        "1:30",
        "0.75 best",
        "pending",
        "val/accuracy",
    ):
        assert part in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("columns", "headers"),
    [
        (160, "job settings state progress val/accuracy device time left"),
        (100, "job settings state progress val/accuracy time left"),
        (80, "job settings state progress val/accuracy left"),
        (70, "job state progress val/accuracy left"),
    ],
)
def test_a_narrow_table_omits_columns_rather_than_letters(tmp_path, columns, headers):
    for number in range(12):
        folder = tmp_path / "photos" / "sweeps" / f"2026-11-20_10-00-{number % 2}0" / str(number)
        words = [f"seed={number}", "optimizer.weight_decay=0.05"]
        told = progress(metric="val/accuracy", last=0.5, best=0.875, best_step=20)
        job(folder, words, "running" if number > 8 else "finished", told if number > 8 else None, 0.5)
    rich = Rich(width=columns, height=24, file=io.StringIO(), force_terminal=False)
    rich.print(table_of(look(tmp_path), columns, 10))
    lines = [line.rstrip() for line in rich.file.getvalue().splitlines()]
    head = next(number for number, line in enumerate(lines) if line.startswith("job "))
    assert lines[head].split() == headers.split()
    assert max(map(len, lines)) <= columns
    assert len(lines) <= 14
    running = next(line for line in lines[head:] if "2026-11-20_10-00-10/11" in line)
    assert re.search(r" running +━━──────  25%  0\.875 .*1:30$", running)


def test_a_folder_with_nothing_but_a_sweep_is_that_sweep(sweep):
    assert look(sweep.parent).headline.startswith("1 of 4 finished, 1 running, 1 failed, 1 pending")


def test_a_table_with_too_many_jobs_has_those_that_run_and_counts_the_others(tmp_path):
    for number in range(40):
        job(tmp_path / str(number), [f"seed={number}"], "finished", value=0.5)
    job(tmp_path / "40", ["seed=40"], "running", progress())
    rich = Rich(width=100, file=io.StringIO())
    rich.print(table_of(look(tmp_path), 100, 10))
    text = rich.file.getvalue()
    assert "and 32 finished" in text
    assert "running" in text
    assert len(text.splitlines()) < 15


def test_time_left_counts_no_time_for_jobs_that_were_skipped(tmp_path):
    ledger, now = Ledger(tmp_path), time.time()
    plan = {str(number): [f"seed={number}"] for number in range(6)}
    launch = {"swept": ["seed"], "base": {}, "jobs": plan, "flags": [], "retry": "failed", "fail_fast": False}
    lines = [{"event": "launch", "time": now - 1000, **launch}]
    lines += [
        {"event": "finished", "time": now - 900, "job": str(n), "overrides": [], "folder": str(n)} for n in (0, 1, 2)
    ]
    lines += [{"event": "launch", "time": now - 60, **launch}]
    ledger.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seconds_left(ledger.read()) is None, "three were skipped, and none of this launch has ended"
    ended = {"event": "failed", "time": now, "job": "3", "overrides": [], "folder": "3"}
    ledger.path.write_text(ledger.path.read_text() + json.dumps(ended) + "\n")
    assert seconds_left(ledger.read()) == pytest.approx(120, abs=5)
    assert headline_of(ledger.read()).startswith("3 finished, 1 failed, about 2:0")


def test_without_a_terminal_changes_are_told_in_lines_until_nothing_runs(sweep):
    stream, steps = io.StringIO(), []

    def sleep(_: float) -> None:
        steps.append(1)
        if len(steps) == 8:
            (sweep / "2" / NAME).unlink()
            summary = json.loads((sweep / "2" / "summary.json").read_text())
            (sweep / "2" / "summary.json").write_text(
                json.dumps(summary | {"status": "failed", "error": "out of memory"})
            )
        time.sleep(0.2)

    follow(sweep, Console(None, stream=stream), sleep)
    first, second, third = stream.getvalue().splitlines()
    assert first == "job 2 running: optimizer.lr=0.3"
    assert second.startswith("1 of 4 finished, 1 running")
    assert third.startswith("job 2 failed: optimizer.lr=0.3: out of memory; log: ")
    assert "again: python -m runner train epochs=8 optimizer.lr=0.3 seed=0" in third


def test_a_job_that_ended_before_is_not_told_as_a_change(sweep):
    view = look(sweep)
    assert lines_of(view, view) == []
    assert lines_of(None, view) == ["job 2 running: optimizer.lr=0.3"]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_failures_stay_above_the_live_table(sweep, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    display = PoolDisplay(sweep, Console(None, stream=stream))
    assert display.period_s == 1.0
    display.tell(Event("started", 1, 4, "lr=0.1", "CPU 0"))
    display.tell(
        Event("failed", 2, 4, "lr=0.2", "it broke", log=sweep / "logs" / "1.log", repeat="python -m runner train")
    )
    display.tell(None)
    display.stop()
    text = stream.getvalue()
    assert "job 1 of 4" not in text
    assert "job 2 of 4: lr=0.2: failed: it broke" in text
    assert "1 of 4 finished" in text


def test_without_a_terminal_every_event_is_a_line(sweep):
    stream = io.StringIO()
    display = PoolDisplay(sweep, Console(None, stream=stream))
    display.tell(Event("started", 1, 4, "lr=0.1", "CPU 0"))
    display.tell(None)
    display.stop()
    assert (display.period_s, stream.getvalue()) == (None, "job 1 of 4: lr=0.1: started: CPU 0\n")


def test_a_display_looks_at_most_once_a_second(sweep):
    display = Display(sweep, Console(None, stream=io.StringIO()))
    assert display.refresh() is display.refresh()
    assert display.refresh() is not display.refresh(now=True)


def test_settings_are_short_unless_that_is_ambiguous():
    assert short(["optimizer.lr=0.1", "seed=0"]) == "lr=0.1 seed=0"
    assert short(["optimizer.lr=0.1", "averaging.lr=0.2"]) == "optimizer.lr=0.1 averaging.lr=0.2"


def test_watch_takes_a_run_a_sweep_and_a_folder_of_runs(run, sweep, workdir):
    for name in ("2026-11-20_10-00-00", "2026-11-20_11-00-00"):
        job(workdir / "outputs" / "mine" / name, [f"seed={name[-7]}"], "finished", value=float(name[11:13]))
    several = run("watch", "outputs")
    assert several.status == 0
    assert re.search(r"^mine/2026-11-20_11-00-00 +seed=1 +finished +11 +1:01 +<- best$", several.out, re.MULTILINE)
    alone = run("watch", "outputs/mine/2026-11-20_10-00-00").out.splitlines()
    assert alone[0] == "1 of 1 jobs finished"
    assert alone[-1].split() == ["2026-11-20_10-00-00", "seed=0", "finished", "10", "1:01"]
    (sweep / "2" / ".lock").unlink()
    followed = run("sweep", str(sweep), "--follow")
    assert followed.status == 0
    assert "1 of 4 jobs finished" in followed.out
    assert run("watch", str(sweep)).out == followed.out == run("sweep", str(sweep)).out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["watch"], "python -m runner watch"),
        (["watch", "a", "b"], "python -m runner watch"),
        (["watch", "nowhere"], "there is no nowhere"),
        (["watch", "emp"], "did you mean 'empty'?"),
        (["watch", "empty"], "there is no run in empty"),
        (["watch", "file"], "file is a file"),
        (["watch", "empty", "--live"], "unknown flag '--live'"),
        (["sweep"], "python -m runner sweep"),
        (["sweep", "nowhere", "--follow"], "there is no nowhere"),
        (["sweep", "empty", "--folow"], "did you mean '--follow'?"),
        (["sweep", "empty"], "python -m runner report empty"),
        (["sweep", "mine/0"], "mine"),
        (["sync"], "python -m runner sync"),
        (["sync", "nowhere"], "there is no nowhere"),
        (["sync", "empty", "--all"], "unknown flag '--all'"),
        (["sync", "empty"], "logger=mlflow"),
    ],
)
def test_folders_that_are_none_are_named_with_what_is_right(run, workdir, words, key):
    (workdir / "empty").mkdir()
    (workdir / "file").touch()
    job(workdir / "mine" / "0", ["seed=0"], "finished", value=1.0)
    result = run(*words)
    assert result.status == 2
    assert result.err.startswith(f"error: {words[0]}: ")
    assert key in result.err
