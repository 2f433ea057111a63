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
from extended import some
from forked import ForkedProgram

from runner.launch.jobs import Job
from runner.launch.slurm import Slurm

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


@pytest.mark.parametrize("words", some([SEARCH, POOL], 1), ids=["search", "pool"])
def test_a_warned_sweep_is_requeued(slurm, tiny, words):
    assert warned([*tiny, *LONG, *words]) == 75
    assert slurm()[-1] == "requeue 77"


@pytest.mark.extended
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


STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> calls
case "$(basename "$0")" in
sbatch) cat > script; echo 7 ;;
squeue) if [ -e silent ]; then rm silent; echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; fi
        [ -e queue ] && cat queue ;;
esac
exit 0
"""


@pytest.fixture
def commands(workdir, monkeypatch):
    """Stand-ins for the commands of SLURM, which note how they are called, and jobs that nothing runs."""
    tools = workdir / "tools"
    tools.mkdir()
    for name in ("sbatch", "squeue"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr("runner.launch.slurm._PERIOD_S", 0.0)
    return workdir


def test_the_keys_of_the_launcher_are_options_of_sbatch_by_the_names_of_submitit(run, tiny, commands):
    words = {
        "timeout_min": 90,
        "mem_gb": 4,
        "nodes": 2,
        "tasks_per_node": 3,
        "cpus_per_task": 5,
        "gpus_per_node": "a100:1",
        "partition": "gpu",
        "array_parallelism": 2,
        "signal_delay_s": 60,
        "setup": '["module load cuda"]',
        "srun_args": '["--cpu-bind=none"]',
        "additional_parameters": "{mail-type: FAIL, exclusive: true}",
    }
    given = [f"hydra.launcher.{key}={value}" for key, value in words.items()]
    result = run("train", *tiny, "--multirun", "hydra/launcher=slurm", "seed=0,1,2", *given)
    [submitted] = [line for line in (commands / "calls").read_text().splitlines() if line.startswith("sbatch")]
    found = submitted.split()[1:]
    expected = ["--parsable", "--array=0,1,2%2", "--open-mode=append", "--nodes=2", "--ntasks-per-node=3"]
    expected += ["--cpus-per-task=5", "--gpus-per-node=a100:1", "--time=90", "--mem=4G", "--partition=gpu"]
    expected += ["--signal=USR2@60", "--requeue", "--mail-type=FAIL", "--exclusive"]
    [name] = [word for word in found if word.startswith("--job-name=synthetic-")]
    [output] = [word for word in found if word.startswith("--output=")]
    assert sorted(found) == sorted([*expected, name, output])
    [folder] = commands.glob("outputs/*/sweeps/*")
    assert output == f"--output={folder}/logs/%a.log"
    script = (commands / "script").read_text().splitlines()
    assert script[:3] == ["#!/bin/bash", "module load cuda", 'case "$SLURM_ARRAY_TASK_ID" in']
    assert script[-1] == 'srun --cpus-per-task=5 --cpu-bind=none "${job[@]}"'
    assert [line.split(")")[0] for line in script[3:6]] == ["0", "1", "2"]
    assert "seed=2 hydra.mode=RUN" in script[5]
    assert result.status == 1
    assert "job 1 of 3: seed=0: failed: SLURM job 7_0 is not in the queue any more" in result.out + result.err


def test_a_controller_that_does_not_answer_ends_no_job_and_a_state_says_why_one_ended(run, tiny, commands):
    slurm_job = "7_0 OUT_OF_MEMORY synthetic"
    (commands / "queue").write_text(slurm_job + "\n")

    def calls(text):
        return [line.split()[0] for line in (commands / "calls").read_text().splitlines() if text in line]

    sbatch = commands / "tools" / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("echo 7", "touch silent; echo 7"))
    result = run("train", *tiny, "--multirun", "hydra/launcher=slurm", "seed=0")
    assert calls("") == ["squeue", "sbatch", "squeue", "squeue", "squeue"]
    assert "seed=0" not in (commands / "calls").read_text()
    assert "failed: SLURM job 7_0 is OUT_OF_MEMORY" in result.out + result.err


@pytest.mark.parametrize(
    ("words", "expected", "absent"),
    [
        (("slurm.signal=TERM",), "--signal=TERM@120", "--signal=USR"),
        (("slurm.signal=null",), "--requeue", "--signal"),
        (('slurm.requeue="false"',), "--no-requeue", " --requeue"),
        (("name=a b",), "--job-name=a_b-", "--job-name=a b"),
        (("hydra.launcher.name=mine",), "--job-name=mine-", "--job-name=synthetic"),
    ],
)
def test_an_array_is_warned_and_requeued_as_the_config_of_its_runs_says(run, tiny, commands, words, expected, absent):
    run("train", *tiny, "--multirun", "hydra/launcher=slurm", "seed=0,1", *words)
    calls = (commands / "calls").read_text()
    assert expected in calls
    assert absent not in calls


def test_jobs_beyond_the_limit_of_an_array_are_another_array(commands):
    values = {"name": "x", "slurm": {"signal": None, "requeue": True}}
    launcher = Slurm(values=values)
    jobs = [Job(number, print, ["train"], commands / "logs" / f"{number}.log") for number in (999, 1000, 1007)]
    assert launcher.start(jobs) == ["SLURM 7_999", "SLURM 7_0", "SLURM 7_7"]
    first, second = [line for line in (commands / "calls").read_text().splitlines() if line.startswith("sbatch")]
    assert "--array=999 " in first
    assert "/logs/%a.log" in first
    assert "--array=0,7 " in second
    assert "/logs/1%3a.log" in second


def test_a_machine_without_slurm_and_a_cluster_that_refuses_are_named(run, tiny, commands, monkeypatch):
    sbatch = commands / "tools" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    words = ("--multirun", "hydra/launcher=slurm", "seed=0,1")
    result = run("train", *tiny, *words)
    assert result.status == 2
    assert "sbatch failed: sbatch: error: invalid partition specified: gpu" in result.err
    monkeypatch.setenv("PATH", str(commands))
    result = run("train", *tiny, *words)
    assert result.status == 2
    assert "hydra/launcher: is slurm, and there is no sbatch on this machine" in result.err


def test_a_sweep_inside_a_job_of_slurm_passes_none_of_its_variables_on(run, tiny, commands, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_CPU_BIND", "verbose")
    monkeypatch.setenv("SLURM_CONF", "/mine")
    for name in ("sbatch", "squeue"):
        tool = commands / "tools" / name
        tool.write_text(tool.read_text().replace("#!/bin/sh", "#!/bin/sh\nenv | grep SLURM_ >> variables"))
    run("train", *tiny, "--multirun", "hydra/launcher=slurm", "seed=0,1")
    assert {*(commands / "variables").read_text().splitlines()} == {"SLURM_CONF=/mine"}


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
def test_on_a_real_cluster_sweeps_continue_and_a_preempted_run_too():
    cluster = _script("cluster")
    if why := cluster.missing():
        pytest.skip(why)
    parts = ("array", "sweep_killed", "sweep_of_ranks", "preempted", "--preemptions=2")
    command = [sys.executable, "scripts/slurm_local/check.py", *parts]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  ") >= 15
    assert "BROKEN" not in done.stdout
