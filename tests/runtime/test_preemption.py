"""Signals and kills of a real process: saved, said, and resumed to the same bits."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slow_parts
from extended import some
from forked import ForkedProgram
from running_sweeps import until

from runner.checkpoint.file import read

# 23 steps an epoch: long enough to be met in the middle, short enough to be run again whole.
WORDS = (
    "train", "data=synthetic", "data.dataset.samples=200", "data.image_size=8", "data.batch_size=8", "epochs=2",
    "model=mlp", "model.hidden=[16]", "model.dropout=0.2", "transform=standard", "threads=1", "logger=none",
    "log.every_steps=1", "evaluate.test=false", "checkpoint.every_steps=7",
)  # fmt: skip


@pytest.fixture
def here(own_module: Callable[..., Path]) -> Path:
    return own_module("slow", slow_parts.SOURCE).parent


@pytest.fixture
def start(here: Path) -> Iterator[Callable[..., ForkedProgram]]:
    """Start the program in a process group of its own."""
    started: list[ForkedProgram] = []

    def call(*words: str) -> ForkedProgram:
        process = ForkedProgram([*WORDS, "log.progress=false", "log.curves=false", *words])
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


KNOWN: dict[tuple[str, ...], str] = {}
SLOWLY = ("+callbacks.slow._target_=slow.Slow", "+callbacks.slow.step_s=0.02")


@pytest.fixture
def reference(here: Path, train: Callable[..., Any]) -> Callable[..., str]:
    """Fingerprint of the uninterrupted run; made once, as others make sure that it repeats."""

    def call(*words: str) -> str:
        if words not in KNOWN:
            KNOWN[words] = str(train(*WORDS[1:], *words).summary["weights_sha256"])
        return KNOWN[words]

    return call


@pytest.mark.parametrize(("name", "step"), some([("SIGTERM", 3), ("SIGINT", 20), ("SIGUSR1", 30)], 0, several=True))
def test_a_signal_saves_the_step_says_so_and_costs_nothing(
    name: str, step: int, start: Any, here: Path, train: Any, reference: Any
) -> None:
    workers = ("data.placement=disk", "data.num_workers=2") if name == "SIGTERM" else ()
    process = start(*SLOWLY, *workers)
    until(lambda: slow_parts.at_step(step), process)
    # The whole group, as a terminal and a scheduler do it: loader workers are signalled as well.
    os.killpg(process.pid, getattr(signal, name))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, out + err
    directory = Path(out.strip().splitlines()[-1])
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "preempted"
    assert name in summary["error"]
    assert "Traceback" not in err + out
    assert f"resume with ckpt_path={directory}" in out
    steps = int((here / "steps").read_text())
    saved = read(directory / "checkpoints" / "last.safetensors")["position"]["global_step"]
    assert step <= saved == steps == summary["global_step"], "it was saved at the step where it stopped"
    rest = train(f"ckpt_path={directory}", "callbacks.slow.step_s=0", "data.placement=auto", "data.num_workers=auto")
    assert rest.summary["weights_sha256"] == reference()


def test_a_signal_during_an_evaluation_breaks_it_off_and_it_is_made_after_resuming(
    start: Any, here: Path, train: Any, reference: Any
) -> None:
    metric = ("+metrics.slow._target_=slow.SlowMetric", "checkpoint.monitor=loss", "data.split.val=0.3")
    process = start(*metric, "evaluate.batch_size=4")  # 15 batches of 0.3 s
    until((here / "evaluating").exists, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, out + err
    assert int((here / "evaluating").read_text()) < 15, "it waited for the evaluation to end"
    directory = Path(out.strip().splitlines()[-1])
    position = read(directory / "checkpoints" / "last.safetensors")["position"]
    assert (position["epoch"], position["batch"], position["evaluation_due"]) == (1, 0, True)
    rest = train(f"ckpt_path={directory}", "metrics=null")
    assert rest.summary["weights_sha256"] == reference("data.split.val=0.3", "checkpoint.monitor=loss")
    epochs = [record["epoch"] for record in rest.logged("val")]
    assert epochs == [1, 2], "each epoch was evaluated once"
