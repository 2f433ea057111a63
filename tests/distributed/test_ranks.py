"""Several processes: how they start, stop, fail and start again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import rank_faults
from agent import Agent
from extended import some
from running_sweeps import until

from runner.checkpoint.file import read
from scale_kills import ranks_of

WORDS = (*rank_faults.WORDS, "epochs=2", "model.dropout=0.2", "log.every_steps=1", "checkpoint.every_steps=3")
FAULT = "+callbacks.mine._target_=rank_faults.Fault"


def losses(folder: Path) -> dict[tuple[str, int], float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(record["split"], record["global_step"]): record["loss"] for record in records}


def test_ranks_train_what_one_process_trains_also_as_a_job_of_a_sweep(here: Path, train: Any, run: Any) -> None:
    words = (*WORDS, "model.dropout=0")
    one, three = train(*words), train(*words, "devices=3")
    assert len(losses(one.directory)) == 25, "22 steps, 2 evaluations and the test"
    assert losses(three.directory) == pytest.approx(losses(one.directory), rel=1e-4)
    assert (three.directory / "logs/rank_1.log").is_file()
    assert three.summary["status"] == "finished"
    swept = run("train", *words, "devices=3", "--multirun", "seed=0", "hydra.sweep.dir=sweep")
    assert "1 of 1 jobs finished" in swept.out
    job = json.loads((here / "sweep/0/summary.json").read_text())
    assert job["weights_sha256"] == three.summary["weights_sha256"]


def test_an_error_of_a_rank_is_told_once_with_its_place(here: Path, run: Any) -> None:
    result = run("train", *WORDS, "devices=2", FAULT, "hydra.run.dir=run")
    assert result.status == 1
    assert "error: rank 1: ValueError: a mistake of mine" in result.err
    assert result.err.count("error: ") == 1
    assert "rank_faults.py" in result.err
    assert json.loads((here / "run/summary.json").read_text())["error"] == "rank 1: ValueError: a mistake of mine"


def test_a_killed_rank_starts_again_from_the_newest_checkpoint(here: Path, train: Any) -> None:
    fault = (FAULT, "+callbacks.mine.kill=true", "+callbacks.mine.step=20")
    whole = train(*WORDS, "devices=2", "hydra.run.dir=whole")
    again = train(*WORDS, "devices=2", *fault, "max_restarts=1", "hydra.run.dir=again")
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert losses(again.directory) == losses(whole.directory)


@pytest.mark.extended
@pytest.mark.parametrize(("number", "size"), some([(signal.SIGTERM, 2), (signal.SIGKILL, 3)], 0, several=True))
def test_the_launcher_leaves_no_rank_behind_and_the_run_resumes_to_the_same_bits(
    here: Path, train: Any, number: signal.Signals, size: int
) -> None:
    slow = "+callbacks.slow._target_=rank_faults.Slow"
    soon = "checkpoint.min_seconds=0"
    words = ["train", *WORDS, f"devices={size}", slow, soon, "hydra.run.dir=run"]
    environment = os.environ | {"SECONDS_A_STEP": "0.1"}
    program = subprocess.Popen(
        [sys.executable, "-m", "runner", *words], stdout=PIPE, stderr=PIPE, text=True, env=environment
    )
    until(lambda: list((here / "run").glob("checkpoints/step_*")) or program.poll() is not None, seconds=120)
    ranks = ranks_of(program.pid)
    assert len(ranks) >= 2
    program.send_signal(number)
    out, err = program.communicate(timeout=60)
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    if number == signal.SIGTERM:
        assert program.returncode == 75, err
        assert "stopped by SIGTERM" in out
        step = json.loads((here / "run/summary.json").read_text())["global_step"]
        assert read(here / "run/checkpoints/last.safetensors")["position"]["global_step"] == step
    resumed = train("ckpt_path=run", "hydra.run.dir=run")
    whole = train(*WORDS, f"devices={size}", slow, "hydra.run.dir=whole")
    methods = {path.name: path.read_text() for path in here.glob("workers_of_rank_*")}
    assert methods == {f"workers_of_rank_{rank}": multiprocessing.get_start_method() for rank in range(size)}
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.extended
def test_ranks_of_torchrun_follow_rank_0(here: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "runner")
    words = ("train", *WORDS, "max_steps=4", "hydra.run.dir=run")
    subprocess.run([*torchrun, *words], capture_output=True, timeout=240, check=True)
    assert json.loads((here / "run/summary.json").read_text())["status"] == "finished"
    assert "step 4/4" in (here / "run/logs/rank_1.log").read_text()


def test_an_error_of_a_rank_of_torchrun_is_told_by_rank_0(here: Path) -> None:
    ended = Agent()(*[("train", *WORDS, FAULT, "hydra.run.dir=run")] * 2)
    said = "rank 1: ValueError: a mistake of mine"
    assert [(status, err.count("error: "), f"error: {said}" in err) for status, _, err in ended] == [(1, 1, True)] * 2
    assert json.loads((here / "run/summary.json").read_text())["error"] == said


def test_a_mistake_in_the_words_of_ranks_of_torchrun_is_said_once(here: Path) -> None:
    wrong = ("train", *WORDS, "epoch=3", "hydra.run.dir=wrong")
    ended = Agent()(wrong, wrong)
    assert any(status for status, _, _ in ended)
    assert sum(err.count("did you mean 'epochs'") for _, _, err in ended) == 1
    assert not (here / "wrong").exists()


@pytest.mark.parametrize("word", ["sync_batchnorm=true", "strategy=fsdp"])
def test_one_process_is_told_that_it_has_no_effect(train: Any, train_once: Any, word: str) -> None:
    words = ("max_steps=3", "evaluate.test=false")
    found = train(*words, word)
    assert f"{word} has no effect: one process trains" in found.out
    assert found.summary["weights_sha256"] == train_once(*words).summary["weights_sha256"]


FSDP = "devices=2 strategy=fsdp device=cpu"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("devices=[0,0]", "devices"),
        ("devices=2 strategy=single", "strategy"),
        ("devices=2 data.batch_size=auto", "data.batch_size"),
        ("devices=2 post_mortem=true", "post_mortem"),
        ("devices=0", "devices"),
        (FSDP, ""),
        (f"{FSDP} compile=true", "compile"),
        (f"{FSDP} amp=fp16", "amp"),
        (f"{FSDP} dist.find_unused_parameters=true", "dist.find_unused_parameters"),
        (f"{FSDP} optimizer._target_=torch.optim.Adafactor", "optimizer"),
        ("fsdp.replicas=2", "fsdp.replicas"),
        ("fsdp.reshard_after_forward=false", "fsdp.reshard_after_forward"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(problems: Any, words: str, key: str) -> None:
    found = problems(*words.split())
    assert key in found if key else not found
