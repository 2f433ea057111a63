"""Launchers that start the command of a job: Ray, those of others, and the names of those that are gone."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from extras import needs
from forked import ForkedProgram
from running_sweeps import digests, events, jobs_of, processes_in, until

LONG = ("--multirun", "seed=0,1", "epochs=60", "data.dataset.samples=512", "checkpoint.min_seconds=0")
RAY = ("hydra/launcher=ray", "+hydra.launcher.init.num_cpus=2")


def counts(folder: Path) -> Counter[str]:
    return Counter(line["event"] for line in events(folder))


@pytest.mark.extended
@pytest.mark.slow
def test_the_command_of_a_job_has_the_same_bits_and_a_job_that_fails_early_keeps_its_folder(
    trained, spawn, tiny, workdir, commands_launcher
):
    words = (*tiny, *commands_launcher, "--multirun", "model.width=4,0", "sweep.retry=never")
    first = spawn("train", *words)
    assert first.returncode == 1, first.stdout + first.stderr
    [folder] = workdir.glob("outputs/*/sweeps/*")
    assert digests(folder) == {"0": json.loads((trained / "summary.json").read_text())["weights_sha256"]}
    assert "1 of 2 jobs finished" in first.stdout
    assert "job 2 of 2: model.width=0: failed: model.width: " in first.stdout + first.stderr
    assert "width must be at least 1" in (folder / "logs" / "1.log").read_text()
    again = spawn("train", *words)
    assert again.returncode == 1
    assert "1 of 2 jobs have finished already" in again.stdout
    assert counts(folder) == {"launch": 2, "started": 2, "finished": 1, "failed": 1}


@pytest.mark.slow
@pytest.mark.extended
def test_a_killed_command_of_a_sweep_that_begins_with_a_checkpoint_continues_with_its_own(
    trained, spawn, tiny, workdir, commands_launcher
):
    sweep = ("--multirun", f"ckpt_path={trained}", "epochs=40,400", "checkpoint.min_seconds=0")
    whole = spawn("train", *sweep, "output_root=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    words = ["train", *commands_launcher, *sweep]
    program = ForkedProgram(words)
    until(lambda: [*workdir.glob("outputs/*/sweeps/*/1/checkpoints/last*")], program)
    os.kill(jobs_of(workdir / "outputs")["1"], signal.SIGKILL)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 1, out + err
    [folder] = workdir.glob("outputs/*/sweeps/*")
    assert "failed: status -9" in out + err
    done = spawn(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    [expected] = workdir.glob("whole/*/sweeps/*")
    assert digests(folder) == digests(expected)
    assert len(digests(folder)) == 2
    assert str(trained) in (folder / "0" / "run.log").read_text()
    assert f"{folder.name}/1/checkpoints" in json.loads((folder / "1" / "summary.json").read_text())["resumed_from"]


@needs("ray")
@pytest.mark.slow
@pytest.mark.extended
def test_jobs_of_ray_save_on_a_signal_and_the_same_command_gives_the_bits_of_the_sweep_without(
    made_once, tiny, workdir
):
    _, alone = made_once(*LONG)
    words = ["train", *tiny, *LONG, *RAY]
    program = ForkedProgram(words)
    until(lambda: len(jobs_of(workdir)) == 2, program)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 75, out + err
    [folder] = workdir.glob("outputs/*/sweeps/*")
    assert counts(folder) == {"launch": 1, "started": 2, "preempted": 2}
    program = ForkedProgram(words)
    until(lambda: counts(folder)["started"] == 4, program)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, out + err
    assert digests(folder) == digests(alone)
    assert counts(folder)["finished"] == 2
    until(lambda: not processes_in(workdir))


@needs("ray")
@pytest.mark.slow
@pytest.mark.extended
def test_jobs_of_ray_save_when_their_worker_or_the_sweep_is_killed_and_a_second_signal_kills_them(tiny, workdir):
    words = ["train", *tiny, *LONG, *RAY, "epochs=100000"]

    def status(job: str) -> str:
        [path] = workdir.glob(f"outputs/*/sweeps/*/{job}/summary.json")
        return str(json.loads(path.read_text())["status"])

    program = ForkedProgram(words)
    jobs = until(lambda: len(found := jobs_of(workdir)) == 2 and found, program)
    worker = psutil.Process(jobs["0"]).parent().parent()
    assert worker.cmdline()[0].startswith("ray::")
    worker.kill()
    until(lambda: status("0") == "preempted", program)
    assert status("1") == "running"
    program.kill()
    program.wait(60)
    until(lambda: status("1") == "preempted")

    program = ForkedProgram(words)
    began = until(lambda: len(found := jobs_of(workdir)) == 2 and not {*found.values()} & {*jobs.values()} and found)
    until(lambda: status("0") == status("1") == "running")  # before, the summaries are those of the earlier processes
    for job in began.values():
        os.kill(job, signal.SIGSTOP)  # it does not save
    program.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert program.poll() is None
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 75, out + err
    assert "preempted: SIGTERM, before it had saved" in out
    until(lambda: not processes_in(workdir))


@needs("ray")
@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("hydra.launcher.address=auto", "ray.init fails: Could not find any running Ray instance"),
        ("+hydra.launcher.remote.frobs=1", "Invalid option keyword frobs"),
        ("+hydra.launcher.frobs=1", "unexpected keyword argument 'frobs'"),
    ],
)
def test_wrong_keys_of_ray_are_named(run, tiny, word, reason):
    result = run("train", *tiny, "--multirun", "hydra/launcher=ray", "seed=0,1", word)
    assert result.status == 2
    assert f"hydra.launcher: {reason}" in result.err.replace("Ray.__init__() got an ", "")


def test_ray_that_is_not_installed_is_told_before_a_folder_is_made(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    err = refused("--multirun", "hydra/launcher=ray", "seed=0,1")
    assert "hydra/launcher: needs packages that are not installed: ray" in err
    assert "pip install 'runner[ray]'" in err


@pytest.mark.parametrize(
    ("name", "instead"), [("joblib", "pool"), ("submitit_local", "pool"), ("submitit_slurm", "slurm")]
)
def test_launchers_that_are_gone_are_named_with_what_replaces_them(refused, name, instead):
    assert f"did you mean '{instead}'?" in refused("--multirun", f"hydra/launcher={name}", "seed=0,1")
