"""Sweeps whose jobs run elsewhere: joblib, submitit and Ray."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from extras import needs
from forked import ForkedProgram

from runner.config.hydra_messages import as_problem
from runner.sweeps.ledger import Ledger

FOUR = ("--multirun", "model.width=4,0", "seed=0,1")
LONG = ("--multirun", "seed=0,1", "epochs=40", "data.dataset.samples=512", "checkpoint.min_seconds=0")
MORE = {"joblib": ("hydra.launcher.n_jobs=2",)}


def asked(launcher: str) -> tuple[str, ...]:
    """The words that choose a launcher."""
    return (f"hydra/launcher={launcher}", *MORE.get(launcher, ()))


def hashes(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.glob("*/summary.json"):
        if digest := json.loads(path.read_text()).get("weights_sha256"):
            found[path.parent.name] = digest
    return found


def events(folder: Path) -> Counter[tuple[str, str]]:
    lines = map(json.loads, (folder / "sweep.jsonl").read_text().splitlines())
    return Counter((line["event"], line["folder"]) for line in lines if "folder" in line)


def wait_for_steps(workdir: Path, program: ForkedProgram, jobs: int) -> Path:
    """The folder of a sweep once so many jobs have been evaluated."""
    deadline = time.monotonic() + 120
    while True:
        found = [path for path in workdir.glob("outputs/*/sweeps/*/*/metrics.jsonl") if '"val"' in path.read_text()]
        if len(found) >= jobs:
            return found[0].parents[1]
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [pytest.param("joblib", marks=needs("joblib")), pytest.param("submitit_local", marks=needs("submitit"))],
)
def test_jobs_elsewhere_have_the_same_bits_and_a_failed_one_stops_no_other(launcher, made_once, spawn, tiny, workdir):
    _, alone = made_once("--multirun", "seed=0,1")
    words = (*tiny, *FOUR, *asked(launcher))
    first = spawn("train", *words)
    assert first.returncode == 1, first.stdout + first.stderr
    [folder] = workdir.glob("outputs/*/sweeps/*")
    assert hashes(folder) == hashes(alone)
    assert "2 of 4 jobs finished" in first.stdout
    assert "error: job 2 failed: model.width: " in first.stdout + first.stderr
    again = spawn("train", *words, "retry=never")
    assert again.returncode == 1
    assert "2 of 4 jobs have finished already" in again.stdout
    assert Counter(kind for kind, _ in events(folder).elements()) == {"started": 4, "finished": 2, "failed": 2}


@needs("joblib")
@pytest.mark.slow
def test_a_job_of_joblib_that_is_killed_resumes_and_costs_no_other(tiny, workdir, made_once):
    _, alone = made_once(*LONG)
    program = ForkedProgram(["train", *tiny, *LONG, *asked("joblib")])
    folder = wait_for_steps(workdir, program, 1)
    [job] = [path for path in folder.glob("*/metrics.jsonl") if path.stat().st_size][:1]
    os.kill(int((job.parent / ".lock").read_text().split()[1]), signal.SIGKILL)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, out + err
    assert hashes(folder) == hashes(alone)
    assert {count for (kind, _), count in events(folder).items() if kind == "finished"} == {1}


@needs("submitit")
@pytest.mark.slow
def test_a_signal_lets_jobs_elsewhere_save_and_the_same_command_goes_on(tiny, workdir, made_once):
    _, alone = made_once(*LONG)
    words = ["train", *tiny, *LONG, *asked("submitit_local")]
    program = ForkedProgram(words)
    folder = wait_for_steps(workdir, program, 2)
    program.send_signal(signal.SIGTERM)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 75, out + err
    assert {kind for kind, _ in events(folder)} == {"started", "preempted"}
    assert Ledger(folder).read().stopped
    program = ForkedProgram(words)
    out, err = program.communicate(timeout=120)
    assert program.returncode == 0, out + err
    assert hashes(folder) == hashes(alone)
    assert {count for (kind, _), count in events(folder).items() if kind == "finished"} == {1}


def test_a_stopped_launch_starts_no_more_jobs_until_the_next_one(tmp_path):
    ledger = Ledger(tmp_path)
    launch = {"swept": [], "retry": "failed", "fail_fast": False, "base": {}, "jobs": None, "flags": []}
    ledger.append("launch", **launch)
    ledger.append("stop")
    assert ledger.start("a", [], tmp_path / "0").pending
    ledger.append("launch", **launch)
    assert not ledger.start("a", [], tmp_path / "0").pending


@pytest.mark.parametrize("name", ["joblib", "submitit_slurm", "submitit_local"])
def test_a_plugin_that_is_not_installed_is_named_with_its_command(name):
    error = SimpleNamespace(missing_cfg_file=f"hydra/launcher/{name}", options=["basic"])
    problem = as_problem(error)  # type: ignore[arg-type]
    assert (problem.key, name in problem.message) == ("hydra/launcher", True)
    assert f"pip install 'runner[{name.partition('_')[0]}]'" in problem.allowed


def test_ray_that_is_not_installed_is_told_before_a_folder_is_made(run, tiny, workdir, monkeypatch):
    monkeypatch.setattr("runner.sweeps.launchers.importlib.util.find_spec", lambda name: None)
    result = run("train", *tiny, "--multirun", "hydra/launcher=ray", "seed=0,1")
    assert result.status == 2
    assert "hydra/launcher: is ray" in result.err
    assert "pip install 'runner[ray]'" in result.err
    assert list(workdir.iterdir()) == []


@needs("submitit")
def test_a_killed_job_of_submitit_gives_no_result_and_no_error(capsys):
    from runner.sweeps.launchers import _of_submitit
    from submitit.core.core import Job

    class Killed(Job):
        def __init__(self):
            self._job_id, self._tasks = "7", [0]
            self._paths = SimpleNamespace(stderr="7.err")

        job_id = property(lambda self: "7")
        paths = property(lambda self: self._paths)

        def wait(self):
            raise RuntimeError("it was killed")

        def __del__(self):
            pass

    with _of_submitit():
        [result] = Killed().results()
    assert result.return_value is None
    assert "job 7 ended without a result" in capsys.readouterr().err
