"""A sweep, a run or a folder of runs seen from its files while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedProgram
from lock_holder import held_elsewhere
from running_sweeps import until
from stored_sweeps import LAUNCH, live_text, make_job, make_ledger

from runner.sweeps.ledger import Ledger
from runner.sweeps.table import changes, follow, headline_of, look, progress_line, result_of, seconds_left, short
from runner.tracking.console import Console
from runner.tracking.run_files import PROGRESS, Progress


def job(
    folder: Path, words: list[str], status: str, progress: Progress | None = None, value: float | None = None
) -> None:
    best = {} if value is not None else {"best": None}
    error, started = "it broke" if status == "failed" else None, "2026-11-20T10:00:00+00:00"
    make_job(folder, words, value, status=status, error=error, started=started, **best)
    if progress is not None:
        (folder / ".lock").write_text("process 1 on elsewhere")  # counts as alive
        (folder / PROGRESS).write_text(json.dumps(dataclasses.asdict(progress)))


def progress(**more: object) -> Progress:
    known = {"global_step": 30, "total_steps": 120, "epoch": 2, "total_epochs": 8, "seconds_left": 90.0}
    return Progress(**{**known, "device": "cpu", "train": {"loss": 0.5}, "time": time.time(), **more})  # type: ignore[arg-type]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of four jobs: one finished, one failed, one running, one pending."""
    words = [["epochs=8", f"optimizer.lr=0.{number}", "seed=0"] for number in range(1, 5)]
    folder = tmp_path / "sweep"
    job(folder / "0", words[0], "finished", value=0.75)
    job(folder / "1", words[1], "failed")
    job(folder / "2", words[2], "running", progress(metric="val/accuracy", last=0.5, best=0.875, best_step=20))
    states = zip(("finished", "failed", "started"), words, strict=False)
    make_ledger(folder, words, [{"event": event, "overrides": own} for event, own in states], swept=["optimizer.lr"])
    return folder


def test_a_sweep_is_seen_with_the_progress_and_the_metric_so_far_of_its_jobs(sweep):
    view = look(sweep)
    assert [row.status for row in view.rows] == ["finished", "failed", "running", "pending"]
    results = [("val/accuracy", 0.75), ("", None), ("val/accuracy", 0.875), ("", None)]
    assert [result_of(row) for row in view.rows] == results
    counts = "1 of 4 jobs finished, 1 running, 1 failed, 1 pending"
    assert f"{counts}, best val/accuracy 0.75 (job 0), about " in view.headline
    assert look(sweep.parent).headline.startswith(counts), "a folder with nothing but a sweep is that sweep"
    assert changes(view, view) == []
    assert changes(None, view) == ["job 2 running: optimizer.lr=0.3"], "nothing of what had ended before"
    assert not view.done
    assert progress_line(view).endswith("; job 2 step 30/120 val/accuracy 0.875")
    running = next(line for line in live_text(sweep, 120) if " running " in line)
    assert re.search(r" running +━━────── 25% +0\.875 +cpu .*  1:30$", running)


def test_before_an_evaluation_the_loss_is_shown_and_silence_is_told(sweep):
    (sweep / "2" / PROGRESS).write_text(json.dumps(dataclasses.asdict(progress(time=time.time() - 600))))
    assert result_of(look(sweep).rows[2]) == ("train loss", 0.5)
    assert re.search(r" train loss 0\.5 .* silent for 10:00$", "\n".join(live_text(sweep, 120)), re.MULTILINE)


@pytest.mark.parametrize("columns", [160, 80, 70])
def test_a_live_table_fits_and_has_the_jobs_that_run_and_counts_the_others(tmp_path, columns):
    for number in range(40):
        folder, words = tmp_path / "photos" / "sweeps" / str(number), [f"seed={number}", "optimizer.weight_decay=0.05"]
        now = progress(metric="val/accuracy", last=0.5, best=0.875, best_step=20) if number == 39 else None
        job(folder, words, "finished" if now is None else "running", now, 0.5)
    lines = live_text(tmp_path, columns, 16)
    assert max(map(len, lines)) <= columns
    assert "and 30 finished" in lines
    running = " ".join(lines[-6:])
    assert all(part in running for part in ("seed=39", "running", "25%", "0.875", "1:30"))


def test_time_left_counts_no_time_for_jobs_that_were_skipped(tmp_path):
    ledger, now = Ledger(tmp_path), time.time()
    plan = {str(number): [f"seed={number}"] for number in range(6)}
    launch = LAUNCH | {"jobs": plan}
    ended: list[dict[str, Any]] = [
        {"event": "finished" if n < 3 else "failed", "job": str(n), "overrides": [], "folder": str(n)} for n in range(4)
    ]
    first, second = ({"event": "launch", "time": now - ago, **launch} for ago in (1000, 60))
    lines = [first, *ended[:3], second]
    (tmp_path / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seconds_left(Ledger.read(tmp_path)) is None, "three were skipped, and none of this launch has ended"
    ledger.append(**ended[3])
    assert seconds_left(Ledger.read(tmp_path)) == pytest.approx(120, abs=5)
    assert headline_of(Ledger.read(tmp_path)).startswith("3 finished, 1 failed, about 2:0")


def _fails(job: Path) -> None:
    (job / PROGRESS).unlink()
    summary = json.loads((job / "summary.json").read_text())
    (job / "summary.json").write_text(json.dumps(summary | {"status": "failed", "error": "out of memory"}))


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (_fails, "failed: optimizer.lr=0.3: out of memory"),
        (lambda job: (job / ".lock").unlink(), "died: optimizer.lr=0.3: it is still marked as running: it was killed"),
    ],
    ids=["failed", "died"],
)
def test_without_a_terminal_changes_are_told_in_lines_until_nothing_runs(sweep, end, told):
    stream, later = io.StringIO(), threading.Timer(0.5, end, [sweep / "2"])
    later.start()
    follow(sweep, Console(None, stream=stream))
    later.join()
    first, second, third = stream.getvalue().splitlines()
    assert first == "job 2 running: optimizer.lr=0.3"
    assert second.startswith("1 of 4 jobs finished, 1 running")
    assert third.startswith(f"job 2 {told}; log: ")
    assert "again: python -m runner train epochs=8 optimizer.lr=0.3 seed=0" in third


def test_settings_are_short_unless_that_is_ambiguous():
    assert short(["optimizer.lr=0.1", "seed=0"]) == ["lr=0.1", "seed=0"]
    assert short(["optimizer.lr=0.1", "averaging.lr=0.2"]) == ["optimizer.lr=0.1", "averaging.lr=0.2"]


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
    followed = run("watch", str(sweep))
    assert followed.status == 0
    assert "1 of 4 jobs finished" in followed.out
    assert followed.out == run("sweep", str(sweep)).out


@pytest.fixture
def owner(sweep) -> Iterator[subprocess.Popen[str]]:
    """A process that the running job of the sweep belongs to."""
    with held_elsewhere(sweep / "2") as process:
        yield process


def test_on_a_terminal_the_live_table_gives_way_to_the_last_one(sweep, owner, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    screen, slave = os.openpty()
    process = subprocess.Popen([sys.executable, "-m", "runner", "watch", str(sweep)], stdout=slave)
    os.close(slave)
    text = b""
    while "━━────── 25%".encode() not in text:
        assert select.select([screen], [], [], 60)[0], text
        text += os.read(screen, 4096)
    assert b"job 2 running" not in text, "there is a table, so there are no lines"
    owner.kill()
    owner.wait()
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(screen, 4096):
            text += part
    os.close(screen)
    assert process.wait(60) == 0, "it ends with what it follows"
    below = text.partition(b"1 of 4 jobs finished, 1 failed")[2]
    assert b"error: job 2 died: it is still marked as running: it was killed" in below


def test_an_interrupted_watch_shows_the_table_and_leaves_the_runs_alone(sweep, owner):
    watch = ForkedProgram(["watch", str(sweep)])
    until(lambda: watch.out().startswith("job 2 running: optimizer.lr=0.3\n"), watch)
    watch.send_signal(signal.SIGINT)
    out, _ = watch.communicate(60)
    assert watch.returncode == 0
    assert re.search("^ *2 +optimizer.lr=0.3 +running +━━────── 25% +0.875 +cpu ", out, re.MULTILINE)
    assert owner.poll() is None


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
        (["sweep", "nowhere"], "there is no nowhere"),
        (["sweep", "empty", "--folow"], "unknown flag '--folow'"),
        (["sweep", "empty"], "python -m runner report empty"),
        (["sweep", "mine/0"], "mine"),
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
