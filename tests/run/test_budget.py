"""`budget=10m`: the number of steps that fit is measured and stored, and the run is one with this number as `max_steps`."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.data.module import DataModule
from runner.run import budget

SMALL = (
    "data=synthetic",
    "data.dataset.samples=100",
    "data.image_size=8",
    "data.batch_size=16",
    "model=small_cnn",
    "model.width=4",
)
FAST = ("threads=1", "logger=none", "log.progress=false", "log.curves=false")
OF_THE_MACHINE = ("samples_per_s", "data_wait", "peak_memory_mib")
SEEN = """
opened = []


class Seen:
    def open(self, directory, resume_step):
        opened.append(str(directory))

    def log(self, *words):
        pass

    flush = close = log
"""
RUN = (*SMALL, "model.dropout=0.2", "ema=0.9", "budget=100s")


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make parts of a run cost other times than those measured, so that a test does not depend on the machine."""
    measure = budget._measure

    def set_to(**seconds: float) -> None:
        given = {"start": 0.0, "end": 0.001, "step": 1.0, "evaluation": 1.0} | seconds
        monkeypatch.setattr(budget, "_measure", lambda *words, **more: measure(*words, **more)._replace(**given))
        # So that the time that the test has taken does not count
        monkeypatch.setattr(budget.time, "time", lambda: 0.0)

    monkeypatch.setattr(budget, "_MOST_S", 0.05)
    return set_to


def stored(result: Any) -> tuple[Any, ...]:
    config = yaml.safe_load((result.directory / "config.yaml").read_text())
    return config["budget"], config["epochs"], config["max_steps"]


def test_the_number_is_stored_and_gives_the_bits_and_metrics_of_a_run_with_this_number(
    train: Any, costs: Any, workdir: Path
) -> None:
    costs()
    left = workdir / "run" / ".measured" / "checkpoints"  # of a killed measurement
    left.mkdir(parents=True)
    found = train(*RUN, "epochs=null", f"hydra.run.dir={workdir / 'run'}")
    # 98 seconds are left: 84 steps in 14 epochs of 6 steps, each of which ends with an evaluation
    assert stored(found) == ("100s", None, 84)
    (row,) = (line for line in found.out.splitlines() if line.strip().startswith("budget "))
    assert "100s, 84 steps" in row
    assert "1 s a step" in row
    assert found.summary["budget"] == "100s"
    assert sorted(path.name for path in found.directory.iterdir() if path.name.startswith(".")) == [".lock"]
    typed = train(*RUN[:-1], "epochs=null", "max_steps=84")
    assert found.summary["weights_sha256"] == typed.summary["weights_sha256"]
    for split in ("train", "val", "test"):
        one, other = (
            [{name: value for name, value in line.items() if name not in OF_THE_MACHINE} for line in each.logged(split)]
            for each in (found, typed)
        )
        assert one
        assert one == other


@pytest.mark.extended
def test_evaluations_a_test_and_a_start_leave_less_for_steps(train: Any, costs: Any) -> None:
    costs(evaluation=12.0, start=10.0, end=4.0)
    assert stored(train(*RUN))[2] == 24  # each epoch of 6 steps takes 18 seconds of 84
    assert stored(train(*RUN, "evaluate.every_epochs=null", "ema=null"))[2] == 84
    assert stored(train(*RUN, "evaluate.every_epochs=null", "evaluate.every_steps=30"))[2] == 60
    # The end of an epoch is one evaluation, even if it is one by the number of steps, too
    costs(evaluation=10.0)
    assert stored(train(*RUN, "evaluate.every_steps=3"))[2] == 21


def test_a_killed_run_has_the_bits_of_an_undisturbed_one(train: Any, killed: Any, costs: Any) -> None:
    costs()
    directory = killed(30, *FAST, *RUN, "checkpoint.every_steps=10")
    again = train(f"ckpt_path={directory}", "callbacks=none", "budget=100s")
    assert "resumed from" in again.out
    assert stored(again) == ("100s", None, 84)
    assert again.summary["weights_sha256"] == train(*RUN[:-1], "epochs=null", "max_steps=84").summary["weights_sha256"]
    # More steps may be typed, which is then the length; also of a checkpoint without a run around it
    shutil.copy(again.directory / "checkpoints" / "last.safetensors", "lone.safetensors")
    assert stored(train("ckpt_path=lone.safetensors", "max_steps=90")) == ("100s", None, 90)


def test_the_same_words_continue_an_interrupted_run_with_its_number(run: Any, bomb: Any, costs: Any) -> None:
    costs()
    words = ("train", *bomb(30, signal.SIGTERM), *RUN, "resume=auto")
    first = run(*words)
    assert (first.status, stored(first)[2]) == (75, 84)
    costs(step=2.0)  # measured again, fewer steps would fit
    again = run(*words)
    assert again.status == 0, again.err
    assert again.directory == first.directory
    assert again.summary["global_step"] == stored(again)[2] == 84
    assert again.summary["budget_used"] >= first.summary["budget_used"]
    # Another budget is another run
    assert run(*words[:-1], "budget=50s", "resume=auto").directory != first.directory


def test_too_few_steps_are_refused_and_less_than_an_epoch_is_a_warning(train: Any, rejected: Any, costs: Any) -> None:
    costs(step=5.5, evaluation=0.0)
    assert "budget: 100s allows 17 steps" in rejected("train", *FAST, *RUN).err
    costs(step=4.0, evaluation=0.0)
    assert "less than one epoch: 24 steps of 90" in train(*RUN, "data.batch_size=1").out


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ("budget=5m max_steps=100", "max_steps", "budget"),
        ("budget=5m epochs=3", "epochs", "budget"),
        ("budget=soon", "budget", "cannot be soon"),
        ("budget=0", "budget", "cannot be 0"),
    ],
)
def test_a_second_length_is_refused(rejected: Any, words: str, key: str, reason: str) -> None:
    problems = [line for line in rejected("train", *words.split()).err.splitlines() if f"{key}: " in line]
    assert any(reason in line for line in problems)


def test_a_run_of_other_length_cannot_get_a_budget(train_once: Any, rejected: Any) -> None:
    directory = train_once(*SMALL, "epochs=1").directory
    assert "budget: cannot change when resuming" in rejected("train", f"ckpt_path={directory}", "budget=1m").err


def test_a_dry_run_says_that_its_length_is_another(accepted: Any) -> None:
    out = accepted("train", *SMALL, *FAST, "budget=1m", "epochs=null", "dry_run=true").out
    assert "budget=1m: training measures" in out


def test_measured_runs_send_nothing_end_by_signals_and_leave_no_memory(
    run: Any, own_module: Any, costs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_module("seen", SEEN)
    costs()
    training = importlib.import_module("runner.train")
    build_run, models = training.build_run, list[weakref.ref[Any]]()

    def build(*words: Any, **more: Any) -> Any:
        assert [model() for model in models] == [None] * len(models)
        models.append(weakref.ref((made := build_run(*words, **more)).model))
        return made

    monkeypatch.setattr(training, "build_run", build)
    result = run("train", *RUN, *FAST[:1], *FAST[2:], "logger=none", "+logger.mine._target_=seen.Seen")
    assert result.status == 0, result.err
    assert len(models) == 3
    assert importlib.import_module("seen").opened == [str(result.directory)]
    # The first measured run is asked to stop
    before = budget.Clock.on_step
    monkeypatch.setattr(budget.Clock, "on_step", lambda self, loop: (signal.raise_signal(15), before(self, loop)))
    stopped = run("train", *RUN, *FAST)
    assert (stopped.status, stopped.summary["status"]) == (75, "preempted")
    assert sorted(path.name for path in stopped.directory.iterdir() if path.name.startswith(".")) == [".lock"]


def test_steps_that_take_most_of_the_measurement_are_not_free(rejected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, measure = list[Any](), budget._measure

    def slowly(*words: Any, **more: Any) -> Any:
        measured.append(measure(*words, **more))
        return measured[-1]._replace(step=50.0)

    monkeypatch.setattr(budget, "_measure", slowly)
    assert "budget: 100s allows 1 steps" in rejected("train", *FAST, *RUN, "evaluate.every_epochs=10").err
    assert all(cost.step > 0 for cost in measured)
    assert measured[1].evaluation > 0


def test_early_stopping_does_not_end_the_runs_that_are_measured(
    train: Any, costs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs()
    clocks, measure = list[budget.Clock](), budget._measure
    monkeypatch.setattr(
        budget, "_measure", lambda *words, **more: (clocks.append(words[2]), measure(*words, **more))[1]
    )
    # An epoch of one step: two evaluations would end the run before anything was measured
    words = ("data.batch_size=128", "optimizer.lr=1e-9", "callbacks=early_stopping")
    found = train(*RUN, *words, "callbacks.early_stopping.patience=1")
    assert "stopped early" in found.out
    assert len(clocks) == 2
    assert all(clock.evaluations for clock in clocks)


@pytest.mark.extended
@pytest.mark.parametrize(
    "words",
    [
        "scheduler=onecycle",
        "scheduler=cosine scheduler.warmup=0.1",
        "scheduler=wsd",
        "swa=0.75 averaging.lr_factor=0",
        "swa=3 averaging.lr_factor=0",
        "freeze=[stages.0] unfreeze_at=2ep",
        "transform.close_epochs=3",
        "data.batch_size=auto",
    ],
)
def test_what_is_given_in_epochs_or_shares_follows_the_number(
    train: Any, costs: Any, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    costs()
    # `transform.close_epochs` counts from the end of these
    lengths, close_others = list[int](), DataModule.close_others
    monkeypatch.setattr(
        DataModule, "close_others", lambda self, epochs: (lengths.append(epochs), close_others(self, epochs))
    )
    every = (*RUN[:-2], *words.split(), "log.every_steps=1")
    found = train(*every, "budget=100s")
    number, closing = stored(found)[2], lengths[-1]
    typed = train(*every, "epochs=null", f"max_steps={number}")
    assert lengths[-1] == closing > 1
    rates, expected = ([line["lr"] for line in each.logged("train")] for each in (found, typed))
    assert rates == expected
    assert len(rates) == number
    # The floor follows the last step, and a linear fall in 17 steps is one of them above it there
    assert min(rates) == rates[-1] < max(rates) / 16
    assert found.summary["weights_sha256"] == typed.summary["weights_sha256"]


@pytest.mark.extended
def test_the_start_of_a_command_counts(workdir: Path) -> None:
    words = ("train", *SMALL, *FAST, "budget=100s", "max_time=1s", "json=true")
    done = subprocess.run([sys.executable, "-m", "runner", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["budget_used"] * 100 > summary["wall_s"] + 0.1


@pytest.mark.extended
def test_ranks_agree_on_the_number_and_a_restart_keeps_it(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_TRUST", "rank_faults")
    fault = ("+callbacks.mine._target_=rank_faults.Fault", "+callbacks.mine.kill=true", "+callbacks.mine.step=15")
    words = (*SMALL, "model.dropout=0.2", "devices=2", "checkpoint.every_steps=5")
    found = train(*words, *fault, "max_restarts=1", "budget=40s")
    number = stored(found)[2]
    assert found.summary["resumed_from"] is not None
    assert found.summary["global_step"] == number >= 20
    typed = train(*words, "epochs=null", f"max_steps={number}")
    assert typed.summary["weights_sha256"] == found.summary["weights_sha256"]
