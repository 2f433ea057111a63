"""Ranks that cannot train together, or stop answering: one sentence names the rank, and no process is left waiting."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import rank_faults
import torch.distributed as dist
from agent import Agent

from rank_pool import RankPool
from runner.base.errors import UserError
from runner.checkpoint.file import read
from runner.distributed import store
from runner.launch.ranks import run_ranks
from runner.runtime.signals import StopSignals

WORDS = (*rank_faults.WORDS, "checkpoint.every_steps=1", "checkpoint.min_seconds=0", "max_steps=4")


@pytest.fixture
def agent(here: Path) -> Agent:
    return Agent()


def test_a_rank_with_other_data_is_named(here: Path, run: Any, pool: RankPool) -> None:
    with pool.installed():
        result = run("train", *WORDS, "devices=2", "data.dataset._target_=rank_faults.data", "hydra.run.dir=run")
    assert result.status == 2
    assert "rank 1 of 2 has different data from rank 0" in result.err
    assert result.err.count("error: ") == 1


@pytest.mark.extended
def test_ranks_replace_the_same_samples_as_one_process_and_count_them_once(
    here: Path, train: Any, run: Any, pool: RankPool
) -> None:
    words = (*WORDS, "epochs=1", "data.dataset._target_=rank_faults.unreadable", "data.on_error=skip", "dtype=float64")
    words = (*words, "max_steps=20", "data.normalize={mean: [0.5], std: [0.25]}")
    one = train(*words)
    with pool.installed():
        two = train(*words, "devices=2", "data.num_workers=1")
        refused = run("train", *words, "devices=2", "data.max_skipped=0", "data.num_workers=0")
    assert one.summary["skipped"] == two.summary["skipped"] >= 6, "of 90 samples"
    assert two.summary["test"]["loss"] == pytest.approx(one.summary["test"]["loss"], rel=1e-9)
    assert refused.status == 2
    assert re.search(r"data.max_skipped: 1 of the \d+ samples of 'train' cannot be read", refused.err)
    assert "ValueError: not this one" in refused.err


@pytest.mark.slow
def test_under_fp16_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(
    workdir: Path, train: Any, pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_TRUST", "kept_losses")
    mixing = "transform.mix={_target_: runner.data.transforms.mixing.Mixup}"  # batches are made of rows of all ranks
    with pool.installed():
        result = train(*WORDS[:-1], "max_steps=8", "loss={_target_: kept_losses.Spoiled}", "devices=2", "amp=fp16",
                       "on_nonfinite=skip", "ema=0.9", mixing, "dist.timeout_s=30")  # fmt: skip
    assert read(result.directory / "checkpoints/last.safetensors")["averaged"]["updates"] == 7


@pytest.mark.extended
def test_a_signal_after_which_rank_0_saves_too_slowly_names_the_newest_checkpoint(
    here: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.launch.ranks._PATIENCE_S", 2)
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    result = run("train", *WORDS, "devices=2", "+callbacks.mine._target_=rank_faults.Late", "hydra.run.dir=run")
    assert result.status == 75, result.err
    newest = max(path.name for path in (here / "run/checkpoints").glob("step_*"))
    said = json.loads((here / "run/summary.json").read_text())["error"]
    reason = "stopped by SIGTERM, and rank 0 did not save within 2 s and was killed"
    assert said == f"{reason}; the newest checkpoint is {newest}"


@pytest.mark.parametrize("early", [True, False])
def test_a_signal_before_ranks_train_ends_them_and_an_ignored_one_does_not(tmp_path: Path, early: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    process, begun = os.getpid(), time.monotonic()
    later = [
        threading.Timer(wait, os.kill, (process, number))
        for wait, number in [(0.4, signal.SIGHUP), (0.9, signal.SIGINT)]
    ]
    try:
        with StopSignals() as signals:
            if early:
                signal.raise_signal(signal.SIGINT)
            else:
                for timer in later:
                    timer.start()
            outcome = run_ranks(time.sleep, 120, 2, tmp_path, asked=lambda: signals.received)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (outcome.status, outcome.sentence) == (75, "SIGINT, before the ranks had started")
    assert time.monotonic() - begun < 60


def test_ranks_that_were_started_with_other_words_are_named(agent: Agent, here: Path) -> None:
    words = ("train", *WORDS, "hydra.run.dir=run")
    (status, out, err), (other, *_) = agent((*words, "epochs=2"), (*words, "epochs=3"))
    assert (status, other) == (2, 0)
    assert err.count("error: ") == 1
    assert "rank 1 of 2 was started with 'epochs=3', and rank 0 with 'epochs=2'" in err
    assert not (here / "run").exists(), out


@pytest.mark.parametrize(
    ("own", "its", "said"),
    [
        (["train", "a=1"], ["train"], "started with fewer words, and rank 0 with 'a=1'"),
        (["train"], ["train", "a=1"], "started with 'a=1', and rank 0 with fewer words"),
        (["eval", "a=1"], ["train", "a=1"], "started with 'train', and rank 0 with 'eval'"),
        (["eval", "a=1"], ["eval", "a=1"], ""),
    ],
)
def test_the_first_difference_of_command_lines(
    monkeypatch: pytest.MonkeyPatch, own: list[str], its: list[str], said: str
) -> None:
    shared = dist.HashStore()
    monkeypatch.setattr(store, "_store", lambda: shared)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    shared.set("words/1", json.dumps(its))
    with pytest.raises(UserError, match=f"rank 1 of 2 was {said}") if said else contextlib.nullcontext():
        store.compare(own)


def test_a_sweep_of_torchrun_is_refused_with_what_to_do(agent: Agent, here: Path) -> None:
    words = ("train", *WORDS, "--multirun", "seed=0,1")
    (status, _, err), _ = agent(words, words)
    assert status == 2
    assert "error: --multirun: starts a process for each job, and torchrun or srun started several" in err
    assert "devices=N without torchrun" in err
