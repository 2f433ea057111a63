"""Jobs of SLURM: warned, requeued and continued; with a stand-in for its commands, and with a real cluster where there is one."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from extended import some
from forked import ForkedProgram
from running_sweeps import until

from runner.launch.jobs import Ended, Job
from runner.launch.slurm import Slurm

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm_local" / "check.py"
SEARCH = ("sweep=optuna", "search.optimizer.lr={log: [1e-4, 1e-1]}")
POOL = ("--multirun", "seed=0,1", "hydra/launcher=pool", "hydra.launcher.per_device=1")
LONG = ("epochs=200", "data.dataset.samples=512", "checkpoint.min_seconds=0")


STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> calls
case "$(basename "$0")" in
sbatch) cat > script; echo 7 ;;
squeue) if [ -e silent ]; then rm silent; echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; fi
        [ -e queue ] && cat queue ;;
scontrol) [ "$1" = show ] && echo "JobId=77 JobState=$(cat state) Restarts=0" ;;
esac
exit 0
"""


@pytest.fixture
def commands(workdir, monkeypatch):
    """Stand-ins for the commands of SLURM, found before others, which note how they are called; nothing runs the jobs."""
    (workdir / "tools").mkdir()
    for name in ("sbatch", "squeue", "scontrol"):
        path = workdir / "tools" / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{workdir / 'tools'}:{os.environ['PATH']}")
    monkeypatch.setattr("runner.launch.slurm._PERIOD_S", 0.0)
    return workdir


def calls(folder):
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(commands, monkeypatch):
    """A job of SLURM; gives what its `scontrol` was asked."""
    (commands / "state").write_text("RUNNING")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return lambda: [line.removeprefix("scontrol ") for line in calls(commands)]


def begun(words, files, text=b"", count=1):
    """A run, once there are files of a name with a text."""
    program = ForkedProgram(["train", *words])
    until(lambda: sum(text in path.read_bytes() for path in Path.cwd().glob(files)) >= count, program)
    return program


def warned(words, number=signal.SIGUSR1):
    """The status of a run that gets a signal once it has been evaluated."""
    program = begun(words, "outputs/**/metrics.jsonl", b'"val"')
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
    Path("state").write_text(state)
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
    program = begun([*tiny, *LONG], "outputs/*/*/config.yaml", count=2)
    program.kill()
    program.wait(60)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    program = ForkedProgram(["train", *tiny, *LONG])
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    assert Path(out.splitlines()[-1]).resolve() == directory.resolve()


def test_a_run_that_cannot_save_is_requeued_too(slurm, tiny):
    program = begun([*tiny, *LONG], "outputs/*/*/checkpoints/last*")
    [folder] = Path.cwd().glob("outputs/*/*/checkpoints")
    folder.rename(folder.with_name("moved"))
    folder.touch()
    program.send_signal(signal.SIGUSR1)
    program.communicate(timeout=60)
    assert program.returncode not in (0, 75)
    assert "requeue 77" in slurm()


def test_a_warning_before_the_run_listens_is_not_lost(slurm, tiny):
    script = Path("warned_early.py")
    code = "import os, signal, sys; from runner.config import load; opened = load.opened\n"
    code += "load.opened = lambda *given: (os.kill(os.getpid(), signal.SIGUSR2), opened(*given))[1]\n"
    code += "from runner.cli import main; sys.exit(main(sys.argv[1:]))"
    script.write_text(code)
    done = forked.run(["train", *tiny, *LONG], script=str(script))
    assert done.returncode == 75, done.stderr
    assert slurm()[-1] == "requeue 77"


def test_the_keys_of_the_launcher_are_options_of_sbatch_by_the_names_of_submitit(run, tiny, commands):
    words = (
        "timeout_min=90", "mem_gb=4", "nodes=2", "tasks_per_node=3", "cpus_per_task=5", "gpus_per_node=a100:1", "partition=gpu",
        "array_parallelism=2", "signal_delay_s=60", 'setup=["module load cuda"]', 'srun_args=["--cpu-bind=none"]',
        "additional_parameters={mail-type: FAIL, exclusive: true}",
    )  # fmt: skip
    given = [f"hydra.launcher.{word}" for word in words]
    result = run("train", *tiny, "--multirun", "hydra/launcher=slurm", "seed=0,1,2", *given)
    [submitted] = [line for line in calls(commands) if line.startswith("sbatch")]
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


def launcher(values_name="x", slurm_signal="USR2", requeue=True, **keys):
    return Slurm(values={"name": values_name, "slurm": {"signal": slurm_signal, "requeue": requeue}}, **keys)


def jobs_of(folder, *numbers):
    return [Job(number, print, ["train"], folder / "logs" / f"{number}.log") for number in numbers]


def test_a_controller_that_does_not_answer_ends_no_job_and_a_state_says_why_one_ended(commands):
    started = launcher()
    assert started.start(jobs_of(commands, 0)) == ["SLURM 7_0"]
    (commands / "queue").write_text("7_0 OUT_OF_MEMORY synthetic\n")
    (commands / "silent").touch()
    assert [started.wait(0) for _ in range(3)] == [[], [], [Ended(0, "SLURM job 7_0 is OUT_OF_MEMORY")]]
    assert [line.split()[0] for line in calls(commands)] == ["squeue", "sbatch", "squeue", "squeue", "squeue"]


@pytest.mark.parametrize(
    ("keys", "expected", "absent"),
    [
        ({"slurm_signal": "TERM"}, "--signal=TERM@120", "--signal=USR"),
        ({"slurm_signal": None}, "--requeue", "--signal"),
        ({"requeue": "false"}, "--no-requeue", " --requeue"),
        ({"values_name": "a b"}, "--job-name=a_b-", "--job-name=a b"),
        ({"name": "mine"}, "--job-name=mine-", "--job-name=x"),
    ],
)
def test_an_array_is_warned_and_requeued_as_the_config_of_its_runs_says(commands, keys, expected, absent):
    launcher(**keys).start(jobs_of(commands, 0, 1))
    assert expected in calls(commands)[-1]
    assert absent not in calls(commands)[-1]


def test_jobs_beyond_the_limit_of_an_array_are_another_array(commands):
    assert launcher().start(jobs_of(commands, 999, 1000, 1007)) == ["SLURM 7_999", "SLURM 7_0", "SLURM 7_7"]
    first, second = [line for line in calls(commands) if line.startswith("sbatch")]
    assert "--array=999 " in first
    assert "/logs/%a.log" in first
    assert "--array=0,7 " in second
    assert "/logs/1%3a.log" in second


def test_a_machine_without_slurm_and_a_cluster_that_refuses_are_named(run, tiny, commands, monkeypatch):
    sbatch = commands / "tools" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    refused = "sbatch failed: sbatch: error: invalid partition specified: gpu"
    for said in (refused, "hydra/launcher: is slurm, and there is no sbatch on this machine"):
        result = run("train", *tiny, "--multirun", "hydra/launcher=slurm", "seed=0,1")
        assert result.status == 2
        assert said in result.err
        monkeypatch.setenv("PATH", str(commands))


def test_a_sweep_inside_a_job_of_slurm_passes_none_of_its_variables_on(commands, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_CPU_BIND", "verbose")
    monkeypatch.setenv("SLURM_CONF", "/mine")
    for name in ("sbatch", "squeue"):
        tool = commands / "tools" / name
        tool.write_text(tool.read_text().replace("#!/bin/sh", "#!/bin/sh\nenv | grep SLURM_ >> variables"))
    launcher().start(jobs_of(commands, 0))
    assert {*(commands / "variables").read_text().splitlines()} == {"SLURM_CONF=/mine"}


@pytest.mark.parametrize("word", ["slurm.signal=HUP", "slurm.requeue=maybe"])
def test_wrong_values_are_refused(problems, word):
    assert word.partition("=")[0] in problems(word)


@pytest.mark.slow
@pytest.mark.extended
def test_on_a_real_cluster_sweeps_and_a_preempted_run_continue_with_the_same_bits(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parents[1])
    if why := importlib.import_module("slurm_local.cluster").missing():
        pytest.skip(why)
    parts = ("array", "sweep_killed", "sweep_of_ranks", "preempted", "--preemptions=2")
    done = subprocess.run([sys.executable, SCRIPT, *parts], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  ") >= 15
    assert "BROKEN" not in done.stdout
