"""Jobs of SLURM: warned, requeued and continued; with a stand-in for its commands, and with a real cluster where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from extras import needs
from forked import ForkedProgram

REPOSITORY = Path(__file__).resolve().parents[2]
SEARCH = ("sweep=optuna", "search.optimizer.lr={log: [1e-4, 1e-1]}")
POOL = ("--multirun", "seed=0,1", "hydra/launcher=pool", "hydra.launcher.per_device=1")
LONG = ("epochs=200", "data.dataset.samples=512", "checkpoint.min_seconds=0")


@pytest.fixture
def slurm(workdir, monkeypatch):
    """A job of SLURM whose `scontrol` notes what it is asked; gives what was asked, and sets the state of the job."""
    tools = workdir / "tools"
    tools.mkdir()
    tool, asked, state = tools / "scontrol", tools / "asked", tools / "state"
    answer = f'[ "$1" = show ] && echo "JobId=77 JobState=$(cat {state}) Restarts=0"'
    tool.write_text(f'#!/bin/sh\necho "$*" >> {asked}\n{answer}\nexit 0\n')
    tool.chmod(0o755)
    state.write_text("RUNNING")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")

    def call(now: str = "") -> list[str]:
        if now:
            state.write_text(now)
        return asked.read_text().splitlines() if asked.exists() else []

    return call


def warned(words, number=signal.SIGUSR1):
    """The status of a run that gets a signal once it has been evaluated, and its directory."""
    program, deadline = ForkedProgram(["train", *words]), time.monotonic() + 60
    while not any('"val"' in path.read_text() for path in Path.cwd().glob("outputs/**/metrics.jsonl")):
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    program.send_signal(number)
    program.communicate(timeout=60)
    return program.returncode


@pytest.mark.parametrize(
    ("words", "number", "state", "array", "expected"),
    [
        ((), signal.SIGUSR1, "RUNNING", None, ["show job --oneliner 77", "requeue 77"]),
        ((), signal.SIGTERM, "RUNNING", "3", ["show job --oneliner 70_3", "requeue 70_3"]),
        ((), signal.SIGTERM, "COMPLETING", None, ["show job --oneliner 77"]),
        ((), signal.SIGHUP, "RUNNING", None, []),
        (("slurm.signal=USR2",), signal.SIGUSR1, "RUNNING", None, []),
        (('slurm.requeue="false"',), signal.SIGUSR1, "RUNNING", None, []),
    ],
    ids=["warned", "array", "cancelled", "other signal", "signal not named", "not wanted"],
)  # fmt: skip
def test_a_warned_run_saves_and_asks_for_one_requeue(slurm, tiny, monkeypatch, words, number, state, array, expected):
    if array:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", array)
    slurm(state)
    assert warned([*tiny, *LONG, *words], number) == 75
    assert slurm() == expected
    [summary] = Path.cwd().glob("outputs/*/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "preempted"


@pytest.mark.parametrize("words", [SEARCH, POOL], ids=["search", "pool"])
def test_a_warned_sweep_is_requeued(slurm, tiny, words):
    assert warned([*tiny, *LONG, *words]) == 75
    assert slurm()[-1] == "requeue 77"


def test_a_requeued_job_continues_its_own_run_and_no_other(slurm, tiny, monkeypatch):
    assert warned([*tiny, *LONG]) == 75
    [directory] = Path.cwd().glob("outputs/*/*")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    program, deadline = ForkedProgram(["train", *tiny, *LONG]), time.monotonic() + 60
    while len(list(Path.cwd().glob("outputs/*/*"))) < 2:
        assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    program.kill()
    program.wait(60)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    program = ForkedProgram(["train", *tiny, *LONG])
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    assert Path(out.splitlines()[-1]).resolve() == directory.resolve()


def test_a_run_that_cannot_save_is_requeued_too(slurm, tiny):
    program, deadline = ForkedProgram(["train", *tiny, *LONG]), time.monotonic() + 60
    while not (found := list(Path.cwd().glob("outputs/*/*/checkpoints/last*"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found[0].parent.rename(found[0].parents[1] / "moved")
    (found[0].parents[1] / "checkpoints").touch()
    program.send_signal(signal.SIGUSR1)
    program.communicate(timeout=60)
    assert program.returncode not in (0, 75)
    assert "requeue 77" in slurm()


def test_a_warning_before_the_run_listens_is_not_lost(slurm, tiny):
    code = "import os, signal, sys, runner.verbs._launch as launch; run = launch._launch\n"
    code += "launch._launch = lambda *given: (os.kill(os.getpid(), signal.SIGUSR2), run(*given))[1]\n"
    code += "from runner.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "train", *tiny, *LONG]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    assert slurm()[-1] == "requeue 77"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["#SBATCH --requeue", "#SBATCH --signal=USR1@120", "#SBATCH --job-name=synthetic"]),
        (("slurm.signal=TERM",), ["#SBATCH --signal=TERM@120"]),
        (("--multirun", "seed=0,1"), ["#SBATCH --requeue", "--multirun seed=0,1"]),
        (SEARCH, ["#SBATCH --requeue", "sweep=optuna 'search.optimizer.lr={log: [1e-4, 1e-1]}'"]),
    ],
    ids=["run", "signal", "sweep", "search"],
)  # fmt: skip
def test_the_job_script_is_printed_and_nothing_runs(run, tiny, workdir, words, expected):
    result = run("train", *tiny, *words, "slurm.script=true")
    assert result.status == 0, result.err
    assert result.out.startswith("#!/bin/bash\n")
    assert "slurm.script" not in result.out
    assert result.out.splitlines()[-1].startswith("srun ")
    for text in expected:
        assert text in result.out
    assert list(workdir.iterdir()) == []


def test_the_script_without_warnings_asks_for_none(run, tiny):
    result = run("train", *tiny, "slurm.script=true", "slurm.signal=null", 'slurm.requeue="false"')
    assert "--signal" not in result.out
    assert "--requeue" not in result.out


@needs("submitit")
def test_the_script_of_an_array_is_that_of_submitit(run, tiny, workdir):
    words = ("--multirun", "seed=0,1,2", "hydra/launcher=submitit_slurm", "hydra.launcher.mem_gb=4")
    result = run("train", *tiny, *words, "slurm.script=true")
    assert result.status == 0, result.err
    for line in ("#SBATCH --array=0-2%3", "#SBATCH --mem=4GB", "#SBATCH --signal=USR2@120"):
        assert line in result.out.splitlines()
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize("word", ["slurm.signal=HUP", "slurm.requeue=maybe"])
def test_wrong_values_are_refused(problems, word):
    assert word.partition("=")[0] in problems(word)


def _script(name):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / "slurm_local" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_on_a_real_cluster_an_array_runs_and_a_preempted_run_continues(tmp_path):
    cluster = _script("cluster")
    if why := cluster.missing():
        pytest.skip(why)
    command = [
        sys.executable,
        "scripts/slurm_local/check.py",
        "array",
        "sweep_of_ranks",
        "preempted",
        "--preemptions=2",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  ") >= 10
    assert "BROKEN" not in done.stdout
