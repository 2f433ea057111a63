"""The rank that failed first is named, and no rank outlives what started it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_faults
import rank_functions
import torch.distributed as dist
from extended import some
from running_sweeps import processes_in, until

from runner.checkpoint.file import read
from runner.distributed.store import RanksMissing, gather_ranks, open_store
from runner.distributed.world import started_by_launcher
from runner.launch.ranks import RankFailed, run_ranks

WORDS = (
    *rank_faults.WORDS, "checkpoint.every_steps=1", "checkpoint.min_seconds=0", "max_steps=1000000", "epochs=null",
    "scheduler=constant", "hydra.run.dir=run",
)  # fmt: skip


KILLED, AWAY = " was killed by SIGKILL: perhaps out of memory", " took no part for dist.timeout_s: it hangs"


@pytest.mark.parametrize(
    ("how", "rank", "said"),
    [
        ("raises", 1, ": ValueError: a mistake of mine"),
        ("exits", 1, " ended with status 3"),
        ("SIGKILL", 0, KILLED),
        ("SIGKILL", 1, KILLED),
        ("SIGKILL", 2, KILLED),
        ("SIGKILL while the launcher is busy", 1, KILLED),
        ("SIGSTOP", 1, AWAY),
        ("never comes", 1, AWAY),
    ],
)
def test_the_rank_that_failed_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, rank: int, said: str
) -> None:
    for wait in ("_NOTICED_S", "_TERMINATED_S"):  # a stopped process does not notice SIGTERM
        monkeypatch.setattr(f"runner.launch.ranks.{wait}", 1.0)
    with pytest.raises(RankFailed, match=f"^rank {rank}{re.escape(said)}"):
        run_ranks(rank_functions.fail, (how, rank), 3, tmp_path)


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    monkeypatch.setattr(os, "environ", {**place, "RANK": "0"})
    with pytest.raises(RanksMissing, match=r"ranks 1, 2 of 3 did not come within 0\.4 s") as found:
        gather_ranks(dist.HashStore(), "joined", 0.4)
    assert found.value.exit_code == 1
    assert "waiting for ranks 1, 2 of 3, up to dist.timeout_s=0.4" in capsys.readouterr().err
    monkeypatch.setattr(os, "environ", {**place, "RANK": "1"})
    with pytest.raises(RanksMissing, match=f"rank 0 of 3 does not answer at localhost:{port}"):
        open_store(0.2)


def test_variables_of_srun_become_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "7"})
    assert not started_by_launcher(), "a script that calls the program without srun"
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
    }
    monkeypatch.setattr(os, "environ", {**step, "SLURM_JOB_ID": "7", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"})
    assert started_by_launcher()
    found = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert found == ["3", "4", "1", "2"]
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "10007")


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
import functools, os, signal, time
from runner.launch.processes import start, start_fork_server

if __name__ == "__main__":
    start_fork_server([])
    for _ in range(10):
        process = start(functools.partial(time.sleep, 60), dict(os.environ))
        os.kill(process.pid, signal.SIGINT)
        process.join()
        assert process.exitcode == -signal.SIGINT
"""


def test_a_signal_right_after_a_process_has_started_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(SIGNALLED_AT_ONCE)
    subprocess.run([sys.executable, "starts.py"], cwd=tmp_path, check=True, timeout=50)
