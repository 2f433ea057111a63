"""Ranks that never come end the others with a sentence, and no rank outlives what started it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import rank_faults
import rank_functions
import torch.distributed as dist
from extended import some
from forked import ForkedProgram
from running_sweeps import processes_in, until

from runner.checkpoint.file import read
from runner.launch.ranks import RankFailed, run_ranks

WORDS = (
    *rank_faults.WORDS, "checkpoint.every_steps=1", "checkpoint.min_seconds=0", "max_steps=1000000", "epochs=null",
    "scheduler=constant", "hydra.run.dir=run",
)  # fmt: skip


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Set the variables of a rank, whose rank 0 is at a port of this machine that is free; gives the port."""

    def call(**environment: str) -> str:
        with socket.socket() as found:
            found.bind(("localhost", 0))
            free = str(found.getsockname()[1])
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": free, **environment}.items():
            monkeypatch.setenv(name, value)
        return free

    return call


MISSING = ["waiting for ranks 1, 2 of 3, up to dist.timeout_s=2", "ranks 1, 2 of 3 did not come within 2 s"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("environment", "said"),
    some(
        [
            ({"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}, MISSING),
            ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}, MISSING),
            ({"WORLD_SIZE": "2", "RANK": "1"}, ["error: rank 0 of 2 does not answer at localhost:PORT"]),
        ],
        0,
        several=True,
    ),
    ids=["torchrun", "srun", "without rank 0"],
)
def test_ranks_that_were_not_started_are_named(
    workdir: Path, as_rank: Callable[..., str], environment: dict[str, str], said: list[str]
) -> None:
    port = as_rank(**environment)
    program = ForkedProgram(["train", *WORDS, "dist.timeout_s=2"])
    _, err = program.communicate(60)
    assert program.returncode == 1, err
    assert "Traceback" not in err
    assert all(each.replace("PORT", port) in err for each in said), err
    assert not (workdir / "run").exists()


def test_a_rank_that_hangs_before_it_joins_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.launch.ranks._NOTICED_S", 1.5)
    with pytest.raises(RankFailed, match=r"rank 1 took no part for dist\.timeout_s"):
        run_ranks(rank_functions.meet_without_one, tmp_path, 3, tmp_path)
    assert not (tmp_path / "met").exists()


@pytest.mark.extended
def test_a_rank_of_torchrun_that_hangs_before_it_joins_is_named(workdir: Path, as_rank: Callable[..., str]) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    found = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    programs = {}
    for rank in ("1", "0"):
        as_rank(WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank, **found)
        programs[rank] = ForkedProgram(["train", *WORDS, "dist.timeout_s=4"])
        if rank == "1":
            until(lambda: store.check(["start_0/words/1"]))
            programs[rank].send_signal(signal.SIGSTOP)
    try:
        _, err = programs["0"].communicate(60)
    finally:
        programs["1"].kill()
    assert programs["0"].returncode == 1, err
    assert err.count("error: ") == 1
    assert "error: dist.timeout_s: rank 1 of 2 did not come within 4 s" in err
    assert json.loads((workdir / "run/summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("delay", some([0, 0.1, 0.3, 0.7, 1.2, 1.8, 2.5, 3.5, 5]))
@pytest.mark.parametrize("starter", some(["torchrun", "devices=2"], 0))
def test_no_process_outlives_a_launcher_that_is_killed_while_ranks_start(
    workdir: Path, delay: float, starter: str
) -> None:
    words = ["-m", "runner", "train", *WORDS]
    if starter == "torchrun":
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    else:
        words.append(starter)
    log = workdir / "log"
    with log.open("w") as output, subprocess.Popen([sys.executable, *words], stdout=output, stderr=output) as launcher:
        until(lambda: processes_in(workdir))
        time.sleep(delay)
        launcher.kill()
        launcher.wait()
        until(lambda: not processes_in(workdir), seconds=20)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize(
    ("number", "delay"), [(signal.SIGHUP, None), (signal.SIGINT, 0.2), (signal.SIGINT, 0.8), (signal.SIGINT, 1.6)]
)
def test_a_signal_for_all_processes_of_a_terminal_stops_a_run_once(
    workdir: Path, number: signal.Signals, delay: float | None
) -> None:
    command = [sys.executable, "-m", "runner", "train", *WORDS, "devices=2"]
    log, summary = workdir / "log", workdir / "run/summary.json"
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as run,
    ):
        if delay is None:
            until(lambda: (workdir / "run/checkpoints/last.safetensors").exists())
        else:  # while the ranks start
            until(lambda: summary.exists() and '"running"' in summary.read_text())
            time.sleep(delay)
        os.killpg(run.pid, number)
        assert run.wait(60) == 75, log.read_text()
        until(
            lambda: not processes_in(workdir), seconds=60 if delay else 10
        )  # the server of the ranks may still import torch
    said, found = log.read_text(), json.loads(summary.read_text())
    assert "Traceback" not in said
    assert (found["status"], found["error"].partition(",")[0]) == ("preempted", f"stopped by {number.name}")
    if delay is None:
        assert read(workdir / "run/checkpoints/last.safetensors")["position"]["global_step"] == found["global_step"]


SIGNALLED_AT_ONCE = """
import multiprocessing, os, signal, sys, time
from runner.launch.processes import accept_signals, start_fork_server

def listen():
    accept_signals()
    time.sleep(60)

if __name__ == "__main__":
    start_fork_server([])
    for _ in range(10):
        process = multiprocessing.get_context("forkserver").Process(target=listen)
        process.start()
        os.kill(process.pid, signal.SIGINT)
        process.join()
        assert process.exitcode == -signal.SIGINT
"""


def test_a_signal_right_after_a_process_has_started_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(SIGNALLED_AT_ONCE)
    subprocess.run([sys.executable, "starts.py"], cwd=tmp_path, check=True, timeout=50)
