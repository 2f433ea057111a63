"""Jobs as processes of this machine: slots, signals, deaths, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import forked
import pytest
from extended import some
from forked import ForkedProgram
from running_sweeps import events, jobs_of, processes_in, until

from runner.base.errors import UserError
from runner.checkpoint.file import read
from runner.launch import local, processes
from runner.launch.jobs import Job
from runner.launch.local import Local

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sweep_pool.py"
POOL = ("--multirun", "hydra/launcher=pool", "hydra.launcher.per_device=2")
ENDLESS = ("seed=0,1,2", "epochs=100000", "checkpoint.every_epochs=1000")


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.extended
def test_jobs_side_by_side_give_the_bits_of_one_after_the_other_and_hurt_no_other(workdir):
    done = forked.run(["--jobs", "4"], script=str(SCRIPT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 with the same SHA-256" in done.stdout
    assert "1 skipped, 4 with the same SHA-256" in done.stdout


@pytest.mark.parametrize("words", some([("--multirun",), POOL], 1), ids=["serial", "pool"])
def test_a_signal_goes_on_to_the_jobs_and_a_killed_sweep_leaves_none(workdir, tiny, words):
    slots = 2 if words is POOL else 1
    program = ForkedProgram(["train", *tiny, *words, *ENDLESS])
    jobs = until(lambda: len(found := jobs_of(workdir)) == slots and found, program)
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 75, err + out
    assert all(map(gone, jobs.values()))
    [folder] = workdir.glob("outputs/*/sweeps/*")
    ended = [(event, job) for event in ("preempted", "started") for job in "012"[:slots]]
    assert sorted((line["event"], line["folder"]) for line in events(folder)[1:]) == ended
    assert "job 1 of 3: seed=0: preempted: stopped by SIGTERM" in out
    assert "0 of 3 jobs finished" in out
    assert not (folder / "2").exists()

    program = ForkedProgram(["train", *tiny, *words, *ENDLESS])
    number = until(
        lambda: (found := jobs_of(workdir)) and set(found.values()).isdisjoint(jobs.values()) and found, program
    )
    program.kill()
    again = ForkedProgram(["train", *tiny, *words, *ENDLESS, "epochs=2"])
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err + out
    until(lambda: all(map(gone, number.values())))


@pytest.mark.extended
def test_a_job_that_a_killed_sweep_left_is_waited_for_and_continued(workdir, tiny):
    words = ("train", *tiny, "--multirun", "seed=0,1", "epochs=300", "checkpoint.min_seconds=0")
    program = ForkedProgram(words)
    [job] = until(lambda: jobs_of(workdir), program).values()
    os.kill(job, signal.SIGSTOP)  # it does not end with the sweep
    program.kill()
    program.wait(60)
    again = ForkedProgram(words)
    until(lambda: "is still being written by an earlier process" in again.out(), again)
    os.kill(job, signal.SIGCONT)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err + out
    [folder] = workdir.glob("outputs/*/sweeps/*")
    assert sorted(path.name for path in folder.glob("[0-9]*")) == ["0", "1"]


@pytest.mark.extended
@pytest.mark.parametrize("trains", some([False, True], 1))
def test_a_job_of_several_ranks_saves_and_leaves_none_when_its_sweep_is_killed(workdir, tiny, trains):
    words = (*ENDLESS, "devices=2", "checkpoint.every_steps=1", "checkpoint.min_seconds=0", "hydra.sweep.dir=sweep")
    last = Path("sweep/0/checkpoints/last.safetensors")
    program = ForkedProgram(["train", *tiny, "--multirun", *words])
    until(lambda: len(processes_in(workdir)) >= 4, program)  # the sweep, the job, and its ranks
    until(lambda: last.exists() or not trains, program)
    program.kill()
    until(lambda: not processes_in(workdir))
    summary = json.loads(Path("sweep/0/summary.json").read_text())
    assert summary["status"] == "preempted"
    if trains:
        assert read(last)["position"]["global_step"] == summary["global_step"]


def leases(monkeypatch, devices, values=None, **keys) -> list[tuple[str, str]]:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    launcher = Local(devices, values=values or {"device": "auto"}, **keys)
    return [(name, variables["CUDA_VISIBLE_DEVICES"]) for name, variables in launcher._free]


def test_slots_have_the_gpus_that_the_process_sees(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both = [("GPU 0", "0"), ("GPU 2", "2"), ("GPU 0", "0"), ("GPU 2", "2")]
    assert leases(monkeypatch, [0, 2], per_device=2) == both
    assert leases(monkeypatch, "cpu", per_device=2) == [("CPU 0", ""), ("CPU 1", "")]
    assert leases(monkeypatch, "auto", per_device=3, most=9)[7:] == [("GPU 7", "7"), ("GPU 0", "0")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert leases(monkeypatch, [1], per_device=1) == [("GPU 1", "7")]


@pytest.mark.parametrize(
    ("own", "values", "slots", "environment"),
    [
        ({}, {"threads": 1}, 4, {}),
        ({}, {"threads": 2}, 2, {}),
        ({}, {}, 2, {"OMP_WAIT_POLICY": "passive"}),
        ({"threads": 2}, {}, 2, {"OMP_NUM_THREADS": "2"}),
        ({"per_device": 3}, {"threads": 1}, 3, {}),
        ({"most": 1}, {"threads": 1}, 1, {}),
    ],
)
def test_slots_on_the_cpu_fit_the_threads_of_the_jobs(monkeypatch, own, values, slots, environment):
    monkeypatch.setattr(local, "cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launcher = Local("cpu", values={"device": "cpu", **values}, **own)
    assert (launcher.slots, launcher._environment) == (slots, environment)


@pytest.mark.parametrize(
    ("values", "key"), [({"device": "cuda:1"}, "device"), ({"device": "cuda", "devices": 2}, "devices")]
)
def test_a_job_on_gpus_gets_one(monkeypatch, values, key):
    with pytest.raises(UserError, match=f"^{key}: is"):
        leases(monkeypatch, "auto", {"devices": 1, **values})


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: os._exit(0), ""),
        (lambda: os._exit(75), ""),
        (lambda: os._exit(3), "its process ended with status 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "its process was killed by SIGKILL: perhaps out of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "its process was killed by SIGSEGV: a fault in compiled code"),
    ],
)
def test_the_end_of_a_process_is_a_sentence(tmp_path, monkeypatch, call, sentence):
    import multiprocessing

    monkeypatch.setattr(processes, "FORKED", multiprocessing.get_context("fork"))  # which needs no pickling
    launcher = Local(values={}, most=1)
    launcher.start([Job(7, call, (), tmp_path / "logs" / "7.log")])
    [ended] = until(lambda: launcher.wait(1.0))
    assert (ended.number, ended.sentence, launcher._running, len(launcher._free)) == (7, sentence, {}, 1)


@pytest.mark.slow
@pytest.mark.extended
def test_a_sweep_keeps_no_memory_files_and_threads_of_its_jobs(workdir):
    script = SCRIPT.with_name("sweep_leaks.py")
    done = forked.run(["--jobs", "12", "--first", "4", "--most", "30"], script=str(script))
    assert done.returncode == 0, done.stdout + done.stderr
