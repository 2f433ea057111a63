"""Runs that end because their time is up, and go on when the same command is given again."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extended import some

from runner.engine.errors import Preempted

SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=4",
    "model=mlp", "model.hidden=[16]", "model.dropout=0.3", "transform=strong", "evaluate.test=false", "threads=1",
    "logger=none", "log.progress=false", "log.curves=false", "log.every_steps=1", "checkpoint.min_seconds=0",
)  # fmt: skip
STOP = """
import os, signal

class Stop:
    def __init__(self, step: int, how: str = "SIGUSR2"): self.step, self.how = step, how
    def on_step(self, loop):
        if loop.state.position.global_step == self.step and not os.path.exists("stopped"):
            open("stopped", "w").close()
            if self.how == "error": raise RuntimeError("a bug")
            os.kill(os.getpid(), getattr(signal, self.how))

class Late:
    def on_step(self, loop):
        import time
        time.sleep(0.05)
"""
STOPPING = ("+callbacks.stop._target_=stop.Stop", "+callbacks.stop.step=9")


@pytest.fixture
def again(run: Callable[..., Any], own_module: Callable[..., Path]) -> Callable[..., Any]:
    """The same command with `resume=auto`, as a scheduler gives it again."""
    own_module("stop", STOP)
    return lambda *words: run("train", *SMALL, *STOPPING, "resume=auto", *words)


@pytest.mark.parametrize("how", ["SIGUSR2", "error"])
def test_the_same_command_goes_on_in_the_same_directory_to_the_same_bits(again: Any, train_once: Any, how: str) -> None:
    first = again(f"+callbacks.stop.how={how}")
    assert first.status == {"SIGUSR2": 75, "error": 1}[how], first.err
    second = again(f"+callbacks.stop.how={how}")
    assert second.status == 0, second.err
    assert second.directory == first.directory
    assert second.summary["status"] == "finished"
    assert second.summary["weights_sha256"] == train_once(*SMALL).summary["weights_sha256"]
    steps = [line["global_step"] for line in second.logged("train")]
    assert steps == sorted(set(steps))
    assert steps[-1] == second.summary["global_step"]
    third = again(f"+callbacks.stop.how={how}")
    assert third.directory != first.directory, "a run that has finished is not gone on with"


def test_another_command_starts_a_run_of_its_own(again: Any) -> None:
    first = again()
    assert first.status == 75
    other = again("seed=3")
    assert other.status == 0
    assert other.directory != first.directory
    assert other.summary["resumed_from"] is None


def test_a_run_without_a_checkpoint_starts_anew_in_its_directory(again: Any, workdir: Path) -> None:
    words = ("+callbacks.stop.how=error", "callbacks.stop.step=3")
    first = again(*words)
    assert first.status == 1
    assert not list((first.directory / "checkpoints").glob("*.safetensors"))
    second = again(*words)
    assert second.status == 0, second.err
    assert second.directory == first.directory
    steps = [line["global_step"] for line in second.logged("train")]
    assert steps == sorted(set(steps))
    assert steps[0] == 1


def test_a_run_without_a_config_starts_anew_with_other_workers_and_not_with_other_settings(
    again: Any, workdir: Path
) -> None:
    words = ("+callbacks.stop.how=error", "+callbacks.stop.step=3", "hydra.run.dir=mine")
    assert again(*words).status == 1
    (workdir / "mine" / "config.yaml").unlink()  # as if it had been killed while it was built
    (workdir / "stopped").touch()
    others = again(*words, "seed=1")
    assert others.status == 2
    assert "holds a run of other settings (seed)" in others.err
    second = again(*words, "data.num_workers=1", "data.placement=disk")
    assert second.status == 0, second.err
    assert second.directory.samefile(workdir / "mine")


@pytest.mark.parametrize("multirun", [False, True], ids=["one", "sweep"])
def test_a_folder_that_was_given_is_gone_on_with_and_left_alone_once_finished(
    again: Any, workdir: Path, multirun: bool
) -> None:
    folder = "hydra.sweep.dir=mine" if multirun else "hydra.run.dir=mine"
    words = ("--multirun", "seed=0", folder) if multirun else (folder,)
    first = again(*words)
    assert first.status == 75, first.err + first.out
    place = workdir / "mine" / ("0" if multirun else "")
    assert json.loads((place / "summary.json").read_text())["status"] == "preempted"
    second = again(*words)
    assert second.status == 0, second.err
    before = (place / "summary.json").read_bytes()
    assert json.loads(before)["status"] == "finished"
    third = again(*words)
    assert third.status == 0, third.err
    assert "has finished already" in third.out
    assert (place / "summary.json").read_bytes() == before


def test_ckpt_path_beside_it_is_refused(again: Any) -> None:
    result = again("ckpt_path=last")
    assert result.status == 2
    assert "resume: is auto" in result.err


def test_when_the_time_is_up_the_run_saves_and_stops(again: Any, train_once: Any) -> None:
    words = ("callbacks.stop._target_=stop.Late", "~callbacks.stop.step", "max_time=1", "log.every_steps=3")
    first = again(*words)
    assert first.status == 75, first.err + first.out
    assert first.summary["error"] == "stopped by max_time=1"
    done = first.summary["global_step"]
    assert 0 < done < 24
    while again(*words).status == 75:
        pass
    ended = json.loads((first.directory / "summary.json").read_text())
    assert ended["status"] == "finished"
    assert ended["weights_sha256"] == train_once(*SMALL).summary["weights_sha256"]


@pytest.mark.extended
def test_bad_neighbours_are_skipped_with_a_warning(again: Any, workdir: Path) -> None:
    first = again()
    assert first.status == 75, first.err
    runs = first.directory.parent
    for name, text in (("9999-01-01_00-00-00", "- 2024-99-99"), ("9999-01-01_00-00-01", "[" * 50_000)):
        (runs / name).mkdir()
        (runs / name / "overrides.yaml").write_text(text)
    for name in ("overrides.yaml", "summary.json"):
        bad = runs / f"9999-01-01_{name}"
        bad.mkdir()
        (bad / "overrides.yaml").write_bytes((first.directory / "overrides.yaml").read_bytes())
        (bad / name).unlink(missing_ok=True)
        os.mkfifo(bad / name)
    second = again()
    assert second.status == 0, second.err
    assert second.directory == first.directory
    for name in ("9999-01-01_00-00-01", "9999-01-01_overrides.yaml", "9999-01-01_summary.json"):
        assert f"resume=auto skips {runs / name}" in second.out


def test_a_finished_run_of_other_settings_does_not_count_as_this_one(run: Any, rejected: Any, workdir: Path) -> None:
    words = (*SMALL, "resume=auto", "hydra.run.dir=mine")
    assert run("train", *words, "max_steps=2").status == 0
    before = (workdir / "mine" / "overrides.yaml").read_bytes()
    other = rejected("train", *words, "max_steps=3")
    assert "mine holds a run of other settings" in other.err
    assert "has finished already" not in other.out
    assert (workdir / "mine" / "overrides.yaml").read_bytes() == before


HOW = ("auto added", "other order", "from a checkpoint", "other hardware")


@pytest.mark.parametrize(
    ("place", "how"), some(itertools.product([(), ("hydra.run.dir=mine",)], HOW), 0, 1, 2, 7, several=True)
)
def test_the_settings_count_and_not_the_words(
    again: Any, run: Any, workdir: Path, how: str, place: tuple[str, ...]
) -> None:
    words = (*SMALL, *STOPPING, *place)
    first = run("train", *words)
    assert first.status == 75, first.err
    if how == "from a checkpoint":
        (workdir / "stopped").unlink()
        older = first.directory / "checkpoints" / "step_0000000006.safetensors"
        resumed = run("train", f"ckpt_path={older}", f"hydra.run.dir={first.directory}", "threads=1")
        assert (resumed.status, resumed.directory) == (75, first.directory), resumed.err
    if how == "other order":
        words = words[::-1]
    if how == "other hardware":
        words = (*(word for word in words if word != "threads=1"), "threads=2")
    second = run("train", *words, "resume=auto")
    assert (second.status, second.directory) == (0, first.directory), second.err + second.out
    assert second.summary["resumed_from"]


def test_a_word_left_out_means_other_settings(again: Any, accepted: Any, rejected: Any) -> None:
    first = again("hydra.run.dir=outputs/synthetic/mine")
    assert first.status == 75, first.err
    words = [word for word in (*SMALL, *STOPPING, "resume=auto") if not word.startswith("model.dropout")]
    refused = rejected("train", *words, "hydra.run.dir=outputs/synthetic/mine")
    assert "holds a run of other settings (model.dropout)" in refused.err
    other = accepted("train", *words, "threads=1")
    assert other.directory != first.directory


def test_a_run_that_is_stopped_before_it_has_a_checkpoint_says_so(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise Preempted("SIGTERM")

    monkeypatch.setattr("runner.verbs.train.train", stop)
    stopped = run("train", "threads=1", "logger=none")
    assert stopped.status == 75
    assert "stopped by SIGTERM; nothing was saved yet: repeat the same command" in stopped.out
    assert "ckpt_path" not in stopped.out
