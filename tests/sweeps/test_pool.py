"""`hydra/launcher=pool`: jobs side by side, each in a separate process that hurts no other."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import forked
import pytest
from forked import ForkedProgram
from runner.sweeps.pool import Common, Pool, Slot, slots_of

from runner.sweeps import pool_launcher
from runner.sweeps.events import Event, listening, tell

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sweep_pool.py"
POOL = ("--multirun", "hydra/launcher=pool", "hydra.launcher.per_device=2")
ENDLESS = (*POOL, "seed=0,1,2", "epochs=100000", "checkpoint.every_epochs=1000")


def events(folder: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]
    return [(line["event"], line.get("folder", "")) for line in lines]


def until(condition, program: ForkedProgram | None = None):
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert program is None or program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def jobs_of(workdir: Path) -> dict[str, int]:
    """Processes of the jobs that have logged an evaluation, by folder."""
    found = [path.parent for path in workdir.rglob("metrics.jsonl") if '"val"' in path.read_text()]
    return {folder.name: int((folder / ".lock").read_text().split()[1]) for folder in found}


@pytest.mark.slow
def test_jobs_side_by_side_give_the_bits_of_one_after_the_other_and_hurt_no_other(workdir):
    done = forked.run(["--jobs", "4"], script=str(SCRIPT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 with the same SHA-256" in done.stdout
    assert "1 skipped, 4 with the same SHA-256" in done.stdout


def test_a_signal_goes_on_to_the_jobs_and_a_killed_sweep_leaves_none(workdir, tiny):
    program = ForkedProgram(["train", *tiny, *ENDLESS])
    jobs = until(lambda: len(found := jobs_of(workdir)) == 2 and found, program)
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 75, err + out
    assert all(map(gone, jobs.values()))
    [folder] = workdir.glob("outputs/*/sweeps/*")
    assert sorted(events(folder)[1:]) == [(event, job) for event in ("preempted", "started") for job in "01"]
    assert "job 1 of 3: seed=0: preempted: stopped by SIGTERM" in out
    assert not (folder / "2").exists()

    program = ForkedProgram(["train", *tiny, *ENDLESS])
    number = until(
        lambda: (found := jobs_of(workdir)) and set(found.values()).isdisjoint(jobs.values()) and found, program
    )
    program.kill()
    again = ForkedProgram(["train", *tiny, *ENDLESS, "epochs=2"])
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err + out
    until(lambda: all(map(gone, number.values())))


def test_a_sweep_in_the_background_gives_the_terminal_back(workdir, tiny):
    words = ["train", *tiny, *ENDLESS, "hydra.launcher.detach=true"]
    program = ForkedProgram(words)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err + out
    folder = Path(out.splitlines()[-1])
    process = int(out.split("as process ")[1].split(";")[0])
    assert f"show it: python -m runner sweep {folder}" in out
    assert f"stop it: kill {process}" in out
    try:
        until(lambda: len(jobs_of(workdir)) == 2)
        again = forked.run(words)
        shown = forked.run(["sweep", str(folder)])
    finally:
        os.kill(process, signal.SIGTERM)
    assert again.returncode == 2
    assert f"is being run by process {process}" in again.stderr
    assert f"python -m runner sweep {folder} shows it" in again.stderr
    assert [line.split()[2] for line in shown.stdout.splitlines()[4:7]] == ["running", "running", "pending"]
    until(lambda: gone(process))
    assert "2 of 3: seed=1: preempted" in (workdir / folder / "sweep.log").read_text()


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (("hydra.launcher.per_device=0",), "hydra.launcher.per_device", "cannot be 0"),
        (("hydra.launcher.threads=some",), "hydra.launcher.threads", "could not be converted to Integer"),
        (("hydra.launcher.devices=gpu",), "hydra.launcher.devices", "cannot be gpu"),
        (("hydra.launcher.devices=[0,0]",), "hydra.launcher.devices", "cannot be [0, 0]"),
        (("hydra.launcher.devices=[1000]",), "hydra.launcher.devices", "GPUs that can be seen"),
        (("hydra.launcher.detached=true",), "hydra.launcher.detached", "did you mean 'hydra.launcher.detach'"),
        (("sweep.retries=-1",), "retries", "cannot be -1"),
    ],
)
def test_mistakes_in_the_keys_are_told_before_the_first_job(run, tiny, workdir, words, key, reason):
    result = run("train", *tiny, *POOL, "seed=0,1", *words)
    assert result.status == 2
    assert f"  {key}: " in result.err
    assert reason in result.err
    assert list(workdir.iterdir()) == []


def test_another_verb_has_no_pool(run, workdir):
    result = run("eval", "ckpt_path=last,best", *POOL)
    assert (result.status, "hydra/launcher: is pool, which is for train" in result.err) == (2, True)


def test_slots_have_the_gpus_that_the_process_sees(monkeypatch):
    def leases(*devices, **more):
        return [(slot.name, slot.environment["CUDA_VISIBLE_DEVICES"]) for slot in slots_of(devices, **more)]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert leases("0", "2", per_device=2) == [("GPU 0", "0"), ("GPU 2", "2"), ("GPU 0", "0"), ("GPU 2", "2")]
    assert leases("cpu", per_device=2) == [("CPU 0", ""), ("CPU 1", "")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert leases("1", per_device=1) == [("GPU 1", "7")]


@pytest.mark.parametrize(
    ("own", "values", "slots", "environment"),
    [
        ({}, {"threads": 1}, 4, {}),
        ({}, {"threads": 2}, 2, {}),
        ({}, {}, 2, {"OMP_WAIT_POLICY": "passive"}),
        ({"threads": 2}, {}, 2, {"OMP_NUM_THREADS": "2"}),
        ({"per_device": 3}, {"threads": 1}, 3, {}),
    ],
)
def test_slots_on_the_cpu_fit_the_threads_of_the_jobs(monkeypatch, own, values, slots, environment):
    monkeypatch.setattr(pool_launcher, "cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    keys = pool_launcher.PoolConfig(devices="cpu", **own)
    found, variables = pool_launcher.slots_for(keys, {"device": "cpu", **values})
    assert (len(found), variables) == (slots, environment)


@pytest.mark.parametrize(
    ("values", "key"), [({"device": "cuda:1"}, "device"), ({"device": "cuda", "devices": 2}, "devices")]
)
def test_a_job_on_gpus_gets_one(monkeypatch, values, key):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    [problem] = pool_launcher.problems_of(pool_launcher.PoolConfig(), {"devices": 1, **values}, "train")
    assert problem.key == key


def test_a_failed_job_is_repeated_at_once_as_often_as_retries_says(run, tiny):
    result = run("train", *tiny, "--multirun", "model.width=0,4", "sweep.retries=2")
    assert result.status == 1
    folder = Path(result.out.splitlines()[-1])
    assert [event for event, job in events(folder) if job == "0"] == ["started", "retried", "retried", "failed"]
    assert "1 of 2 jobs finished" in result.out


def test_a_job_that_is_repeated_while_its_first_process_leaves_its_slot_keeps_its_own(tmp_path, monkeypatch):
    pool, asked = Pool([Slot("a"), Slot("b"), Slot("c")], Common(tmp_path)), list[dict]()
    monkeypatch.setattr(pool, "_tell", asked.append)
    assert [pool.start(number, []).name for number in (0, 1)] == ["a", "b"]
    assert pool._take({"process": asked[0]["process"], "status": -9}).sentence.startswith("killed by SIGKILL")
    assert pool.start(0, []).name == "c"
    pool._take({"process": asked[0]["process"], "gone": True})
    assert (pool.running, pool.free, pool.start(2, []).name) == ([1, 0], 1, "a")


def test_events_are_lines_with_what_people_need_next():
    heard: list[Event] = []
    with listening(heard.append):
        tell(Event("failed", 3, 12, "seed=3", "killed", log=Path("logs/2.log"), repeat="python"))
    assert heard[0].line == "job 3 of 12: seed=3: failed: killed; log: logs/2.log; repeat it alone: python"
