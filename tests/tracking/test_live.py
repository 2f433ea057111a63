"""What a run shows without a bar and writes for other processes, and how much many lines take in a file."""

from __future__ import annotations

import io
import json
from dataclasses import asdict

import pytest

from runner.checkpoint.file import read
from runner.lab.report.report import runs
from runner.tracking import console as console_module
from runner.tracking.console import Console
from runner.tracking.run_files import PROGRESS, Progress, read_progress


@pytest.fixture
def now(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(console_module, "perf_counter", lambda: clock[0])
    return clock


def test_without_a_bar_a_line_a_minute_says_how_far_a_slow_run_is(now):
    stream = io.StringIO()
    console = Console(None, stream=stream)
    console.start(Progress(0, 1000, total_epochs=10))
    for step in range(1, 31):
        now[0] += 5.0
        console.advance(step, 1)
        if step == 20:
            console.metrics("train", {"loss": 0.5}, step, 1)
    assert stream.getvalue().splitlines() == [
        "epoch 1/10  step 12/1000  eta 1:22:20",
        "epoch 1/10  step 20/1000  train loss 0.5  eta 1:21:40",
    ]


def test_progress_is_there_for_other_processes_while_a_run_trains(tmp_path, now):
    console = Console(None, stream=io.StringIO())
    best = [(0.5, 10)]
    known = Progress(20, 100, total_epochs=5, metric="val/loss", device="cpu")
    console.start(known, best=lambda: best[0], file=tmp_path / PROGRESS)
    begun = read_progress(tmp_path)
    assert (begun.global_step, begun.total_steps, begun.best, begun.best_step) == (20, 100, 0.5, 10)
    for step in range(21, 41):
        now[0] += 0.5
        console.advance(step, 2)
    console.metrics("train", {"loss": 0.25}, 40, 2)
    console.metrics("val", {"loss": 0.75}, 40, 2)
    best[0] = (0.25, 41)
    console.metrics("val", {"loss": 0.25}, 41, 2)
    now[0] += 3
    console.advance(41, 3)
    later = read_progress(tmp_path)
    assert (later.global_step, later.epoch, later.train, later.metric) == (41, 3, {"loss": 0.25}, "val/loss")
    assert (later.last, later.best, later.best_step, later.device) == (0.25, 0.25, 41, "cpu")
    assert later.seconds_left > 0
    console.stop()
    assert list(tmp_path.iterdir()) == []


def test_the_bar_names_the_step_of_the_best_file_where_evaluations_tie(monkeypatch, train):
    shown = []
    stop = Console.stop
    monkeypatch.setattr(Console, "stop", lambda self: (shown.append(self._progress), stop(self)))
    # The first and the last two accuracies are equal, and the loss falls
    result = train(
        "data=synthetic", "data.dataset.samples=80", "data.dataset.classes=4", "data.image_size=8", "data.batch_size=8",
        "model=small_cnn", "model.width=4", "data.split.val=0.3", "epochs=4", "optimizer.lr=1", "evaluate.test=false",
        "transform=standard",
    )  # fmt: skip
    accuracies = {each["global_step"]: each["accuracy"] for each in result.metrics if each["split"] == "val"}
    ties = [step for step, value in accuracies.items() if value == max(accuracies.values())]
    progress, best = shown[0], result.summary["best"]
    kept = read(result.directory / "checkpoints" / "best.safetensors")["position"]["global_step"]
    assert len(ties) > 1
    assert (progress.best, progress.best_step) == (best["value"], best["global_step"])
    assert ties[0] < best["global_step"] == kept == runs(result.directory)[0].summary["best"]["global_step"]


STRANGE = json.dumps(asdict(Progress()) | {"best": "x"})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"global_step": 1}', "\0", "nan", STRANGE])
def test_a_progress_file_of_something_else_is_none(tmp_path, content):
    (tmp_path / PROGRESS).write_text(content)
    assert read_progress(tmp_path) is None


def test_a_folder_that_is_gone_stops_no_run(tmp_path):
    console = Console(None, stream=io.StringIO())
    console.start(Progress(0, 10, total_epochs=1), file=tmp_path / "gone" / PROGRESS)
    console.advance(1, 1)
    console.stop()
