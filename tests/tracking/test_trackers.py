"""Trackers get every point once, whatever fails, and cost a run one warning."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from extended import some
from extras import needs, optional
from fake_mlflow import FakeMLflow, fake_mlflow
from fake_wandb import FakeWandB, fake_wandb
from forked import ForkedProgram
from running_sweeps import until

from runner.base.errors import Problem, UserError
from runner.tracking.jsonl import read_records
from runner.tracking.trackers import loggers
from runner.tracking.trackers.loggers import MLflow, Tracker, WandB, sentence_of

mlflow = optional("mlflow")
pytestmark = needs("mlflow")
FAST = ("threads=1", "log.progress=false", "log.curves=false")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMLflow]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with fake_mlflow(tmp_path / "artifacts") as found:
        yield found


@pytest.fixture
def paused(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[str]]:
    """The words for a run that takes its time."""
    monkeypatch.syspath_prepend(workdir)

    def words(seconds: float) -> list[str]:
        code = f"import time\nclass Pause:\n    def on_step(self, loop):\n        time.sleep({seconds})\n"
        (workdir / "pausing.py").write_text(code)
        return ["+callbacks.pause._target_=pausing.Pause", "trust=[pausing]"]

    return words


def _write(directory: Path, steps: range, config: str = "name: mine\nepochs: 3\n", status: str = "running") -> None:
    """The files of a run that has logged at some steps."""
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(config)
    (directory / "summary.json").write_text(json.dumps({"status": status, "error": None}))
    lines = [{"global_step": step, "epoch": 1, "split": "train", "loss": 1 / step, "x": None} for step in steps]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _begun(directory: Path, uri: str, resume_step: int = 0, again: bool = False) -> MLflow:
    """A tracker as the thread of a run has it that starts or resumes."""
    tracker = MLflow(tracking_uri=uri, max_share=1.0)
    tracker.load(directory)
    tracker.begin(resume_step, again)
    return tracker


def _send(tracker: Tracker) -> None:
    while tracker.advance():
        pass


@pytest.mark.parametrize("failure", some(["refuse", "hang", "500", "die", "slow", "full"], 2, 3, 5))
def test_after_a_failure_of_the_server_every_point_is_there_once(tmp_path, server, failure):
    run = tmp_path / "run"
    _write(run, range(1, 4))
    first = _begun(run, server.uri)
    _send(first)
    _write(run, range(1, 9))
    server.failure = failure
    if failure == "refuse":
        server.stop()
    for _ in range(2):
        with pytest.raises(mlflow.exceptions.MlflowException):
            _send(first)
    # Its process is killed, and another one goes on.
    if failure == "refuse":
        server.start()
    server.failure = ""
    _write(run, range(1, 12), status="finished")
    _begun(run, server.uri, 8).deliver()
    time.sleep(server.slow_s if failure == "slow" else 0)  # what is late comes again
    [(number, found)] = server.runs.items()
    assert server.steps(number, "train/loss") == server.steps(number, "train/x") == list(range(1, 12))
    assert found["status"] == "FINISHED"
    assert (Path(found["artifacts"]) / "config.yaml").is_file()


def test_a_run_that_the_server_created_without_an_answer_is_found_again(tmp_path, server):
    _write(tmp_path / "run", range(1, 4))
    tracker = _begun(tmp_path / "run", server.uri)
    server.experiments.append("mine")
    server.script = ["", "", "die"]  # to the requests for the experiment, for the run, and to create it
    with pytest.raises(mlflow.exceptions.MlflowException):
        _send(tracker)
    assert len(server.runs) == 1
    _send(tracker)
    assert len(server.runs) == 1


def test_five_kills_and_resumes_leave_steps_complete_and_unique(tmp_path, server):
    run, saved = tmp_path / "run", 0
    for attempt in range(5):
        _write(run, range(1, 6 + 4 * attempt))  # killed four steps after the newest checkpoint
        _send(_begun(run, server.uri, saved))
        saved = 1 + 4 * attempt
        _write(run, range(1, saved + 1))  # what a resumed run does first
    _write(run, range(1, 31), status="finished")
    _begun(run, server.uri, saved).deliver()
    assert [server.steps(number, "train/loss") for number in server.runs] == [list(range(1, 31))]


@pytest.mark.extended
@needs("wandb")
@pytest.mark.parametrize("goals", some([(20,), (20, 45, 70)], 0), ids=len)
def test_sigkills_and_resumes_of_a_real_run_leave_both_trackers_complete_and_unique(
    workdir, server, run, paused, goals
):
    from wandb_files import exit_codes, history

    server.failure, server.slow_s = "slow", 0.2  # so that a request is under way when the run is killed
    epochs = 1 + len(goals)
    words = ["train", *FAST, "logger=[mlflow,wandb]", *_live(server), "logger.wandb.mode=offline", f"epochs={epochs}"]
    said = _killed_at(goals, [*words, "logger.wandb.wait_s=60", *OFTEN, *paused(0.02)], workdir)
    assert "warning: mlflow" not in said
    assert "warning: wandb" not in said
    [directory] = workdir.glob("outputs/digits/*")
    for split, count in (("train", 20 * epochs), ("val", epochs), ("test", 1)):
        steps = _steps(_logged(workdir), split)
        assert len(steps) == count
        assert server.steps(server.only, f"{split}/loss") == steps
        assert [row["global_step"] for row in history(directory) if f"{split}/loss" in row] == steps
    assert server.runs[server.only]["status"] == "FINISHED"
    assert exit_codes(directory) == [0]
    assert run("sync", str(directory)).out.count("has everything") == 2


OFTEN = ("log.every_steps=1", "checkpoint.every_steps=7", "checkpoint.min_seconds=0", "resume=auto")


def _killed_at(goals: tuple[int, ...], words: list[str], workdir: Path) -> str:
    """What the program says that goes on after it was killed each time that it had logged so many lines."""
    for goal in goals:
        program = ForkedProgram(words)
        until(lambda goal=goal: len(_logged(workdir)) >= goal)
        program.kill()
        program.wait()
    program = ForkedProgram(words)
    said = "".join(program.communicate(120))
    assert program.wait() == 0, said
    return said


def _live(server: FakeMLflow) -> list[str]:
    """The words for a tracker that sends from the start."""
    settings = {"tracking_uri": server.uri, "max_share": 1, "wait_s": 30}
    return [f"logger.mlflow.{key}={value}" for key, value in settings.items()]


def _logged(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics of the only run."""
    return [line for path in workdir.glob("outputs/digits/*/metrics.jsonl") for line in read_records(path)]


def _steps(lines: list[dict[str, Any]], split: str) -> list[int]:
    return [line["global_step"] for line in lines if line["split"] == split]


@pytest.mark.parametrize(
    ("config", "again", "runs"),
    [
        ("name: mine\nepochs: 3\nthreads: 2\n", False, 1),
        ("name: mine\nepochs: 9\n", False, 2),
        ("name: mine\nepochs: 3\n", True, 2),
    ],
    ids=["same values", "another config", "rolled back"],
)
def test_points_that_get_other_values_after_a_resume_go_to_a_new_run(tmp_path, server, config, again, runs):
    run = tmp_path / "run"
    _write(run, range(1, 9))
    tracker = _begun(run, server.uri)
    _send(tracker)
    _write(run, range(1, 12), config)
    if again:
        tracker.begin(4, True)
    else:
        tracker = _begun(run, server.uri, 4)
    _send(tracker)
    numbers = list(server.runs)
    assert len(numbers) == runs
    assert server.steps(numbers[-1], "train/loss") == list(range(1, 12))
    if runs == 2:
        assert server.runs[numbers[1]]["tags"]["runner.replaces"] == server.runs[numbers[0]]["tags"]["runner.uid"]
    else:
        assert server.runs[numbers[0]]["params"]["threads"] == "2"
    assert server.runs[numbers[0]]["status"] == ("KILLED" if again else "RUNNING")


def test_a_run_that_is_resumed_with_another_server_is_there_completely(tmp_path, server):
    run = tmp_path / "run"
    _write(run, range(1, 9))
    _send(_begun(run, server.uri))
    with fake_mlflow(tmp_path / "others") as other:
        _send(_begun(run, other.uri, 8))
        assert other.steps(other.only, "train/loss") == list(range(1, 9))


def test_a_parameter_that_changed_is_a_tag_as_mlflow_keeps_the_first_value(tmp_path, server):
    run = tmp_path / "run"
    for config in ("name: mine\nepochs: 3\n", "name: mine\nepochs: 9\n"):
        _write(run, range(1, 9), config)
        _begun(run, server.uri, 8).deliver()
    [found] = server.runs.values()
    assert (found["params"]["epochs"], found["tags"]["changed.epochs"]) == ("3", "9")


@pytest.mark.extended
def test_a_sweep_shows_each_job_and_failed_ones_as_failed(run, server):
    words = (*FAST, "logger=mlflow", f"logger.mlflow.tracking_uri={server.uri}", "logger.mlflow.wait_s=30")
    result = run("train", *words, "--multirun", "optimizer.lr=1e-3,1e30", "max_steps=10", "log.every_steps=5")
    assert result.status == 1
    first, second = server.runs.values()
    assert (first["status"], second["status"]) == ("FINISHED", "FAILED")
    assert "not finite" in second["tags"]["runner.error"]
    assert first["tags"]["runner.sweep"] == second["tags"]["runner.sweep"] == str(result.directory.absolute())
    lines = read_records(result.directory / "0" / "metrics.jsonl")
    assert server.steps(next(iter(server.runs)), "train/loss") == _steps(lines, "train")
    assert first["name"] == f"{result.directory.name}/0"
    assert first["params"]["optimizer.lr"] == "0.001"
    assert (Path(first["artifacts"]) / "summary.json").is_file()
    assert "mlflow:" not in result.err + result.out


@pytest.mark.parametrize("failure", some(["refuse", "hang", "500", "die", "slow"], 0))
def test_a_server_that_fails_costs_one_warning_and_its_command_sends_everything_later(run, server, paused, failure):
    quiet = run("train", *FAST, "logger=none", "epochs=2", "log.every_steps=5", "hydra.run.dir=quiet")
    server.failure, server.script = failure, [""] * 4 if failure == "die" else []  # it dies in the middle
    if failure == "refuse":
        server.stop()
    words = ("logger=mlflow", *_live(server), "epochs=2", "log.every_steps=5", "hydra.run.dir='a run'")
    result = run("train", *FAST, *words, *paused(0.05), "logger.mlflow.wait_s=1")
    assert result.status == 0
    assert result.summary["weights_sha256"] == quiet.summary["weights_sha256"]
    assert (result.out + result.err).count("mlflow:") == 1
    [command] = re.findall(r"the rest is sent by: python -m runner (sync .*)", result.out + result.err)
    failed = run(*shlex.split(command))
    assert (failed.status, failed.err.count("error:")) == (1, 1)
    assert f"sending to {server.uri}" in failed.out
    if failure == "refuse":
        server.start()
    server.failure = ""
    assert run(*shlex.split(command)).status == 0
    again = run(*shlex.split(command))
    assert (again.status, "has everything" in again.out) == (0, True)
    time.sleep(server.slow_s if failure == "slow" else 0)
    assert server.runs[server.only]["status"] == "FINISHED"
    for split in ("train", "val", "test"):
        assert server.steps(server.only, f"{split}/loss") == _steps(result.metrics, split)


@pytest.mark.extended
def test_a_server_that_answers_again_gets_everything_without_a_word(run, server, paused):
    server.script = ["500"] * 2
    result = run("train", *FAST, "logger=mlflow", *_live(server), "epochs=2", *paused(0.1))
    assert result.status == 0
    assert server.runs[server.only]["status"] == "FINISHED"
    assert server.steps(server.only, "train/loss") == _steps(result.metrics, "train")


def test_sync_of_a_run_that_goes_on_is_refused_with_its_process(workdir, server, run, paused):
    words = ("train", *FAST, "logger=mlflow", *_live(server), "epochs=100", *paused(0.1))
    program = ForkedProgram(words)
    until(lambda: [*workdir.glob("outputs/digits/*/trackers/mlflow.json")])
    try:
        found = run("sync", "outputs")
    finally:
        program.kill()
        program.wait()
    assert found.status == 1
    assert f"is being written by process {program.pid}" in found.err
    assert run("sync", "outputs").status == 0
    assert server.runs[server.only]["status"] == "KILLED"


@pytest.mark.extended
def test_sync_sends_everything_if_the_state_is_damaged_or_missing(train, run, server):
    server.failure = "500"
    result = train("logger=mlflow", f"logger.mlflow.tracking_uri={server.uri}", "max_steps=5", "log.every_steps=1")
    server.failure = ""
    metrics = result.directory / "metrics.jsonl"
    odd = b'\n{"global_step": \xff\n[1]\n{"global_step": -3}\n{"global_step": 1e400, "split": "train"}\n{"global'
    metrics.write_bytes(metrics.read_bytes() + odd)
    for damage in ("", "{", "[]", '{"uid": 1}', '{"settings": {}, "sent": ["x"]}', "missing"):
        path = result.directory / "trackers/mlflow.json"
        if damage == "missing":
            shutil.rmtree(path.parent)
        else:
            path.write_text(damage)
        server.runs.clear()
        found = run("sync", str(result.directory))
        assert found.status == 0, (damage, found.err)
        assert f"sending to {server.uri}" in found.out
        assert server.steps(server.only, "train/loss") == [1, 2, 3, 4, 5]


def test_values_that_are_no_numbers_are_sent_as_nan_and_a_link_in_a_run_directory_is_not_uploaded(tmp_path, server):
    (tmp_path / "secret").write_text("secret")
    run, before = tmp_path / "run", random.getstate()
    _write(run, range(1, 2), status="finished")
    point = {"global_step": 2, "split": "train", "loss": "x", "x": 10**400, "y": True, "z": [1]}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(point) + "\n")
    (run / "run.log").symlink_to(tmp_path / "secret")
    _begun(run, server.uri).deliver()
    for name in ("loss", "x"):
        assert server.steps(server.only, f"train/{name}") == [1, 2]
    artifacts = Path(server.runs[server.only]["artifacts"])
    assert {path.name for path in artifacts.iterdir()} == {"config.yaml", "summary.json"}
    assert random.getstate() == before, "a tracker draws nothing from the random numbers of the run"


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own use of SQLAlchemy
def test_a_database_in_a_file_is_read_back_by_mlflow_itself(tmp_path):
    run = tmp_path / "run"
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    _write(run, range(1, 6), status="failed")
    for resume_step in (0, 3):
        tracker = _begun(run, uri, resume_step)
        tracker.deliver()
        # What a request without an answer leaves: the points are there, and are sent again.
        for _ in range(2):
            tracker.send([{"global_step": 9, "epoch": 1, "split": "val", "loss": 0.5}], 5, [5000])
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FAILED"
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "train/loss")]
    assert steps == [1, 2, 3, 4, 5]
    assert [metric.step for metric in client.get_metric_history(found.info.run_id, "val/loss")] == [9]


def test_points_have_the_time_at_which_they_were_logged(tmp_path, server):
    run = tmp_path / "run"
    _write(run, range(1, 3), status="finished")
    tracker = MLflow(tracking_uri=server.uri)
    tracker.load(run)
    limits = []
    for step in (1, 2):
        before = int(1000 * time.time())
        tracker.log("train", {}, step, 1)
        limits.append((before, 1000 * time.time() + 1))
        time.sleep(0.1)
    tracker.deliver()
    times = [time_ms for _, _, time_ms in server.runs[server.only]["metrics"]["train/loss"]]
    assert all(first <= found <= last for found, (first, last) in zip(times, limits, strict=True))


@pytest.mark.extended
@needs("wandb")
def test_offline_files_of_wandb_have_every_point_once(tmp_path, monkeypatch):
    from wandb_files import exit_codes, history

    monkeypatch.setattr("sys.exit", sys.exit)  # wandb replaces both for as long as the process lives
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    run = tmp_path / "run"
    for status, saved in (("preempted", 0), ("failed", 4), ("finished", 8)):
        _write(run, range(1, saved + 7), status=status)
        tracker = WandB(mode="offline")
        tracker.load(run)
        tracker.begin(saved, False)
        if status == "failed":
            # An attempt that is killed while it writes its file.
            (run / "wandb" / f"offline-run-20990101_000000-{tracker.state.uid[:16]}").mkdir(parents=True)
        tracker.deliver()
    assert [row["global_step"] for row in history(run)] == list(range(1, 15))
    assert [row["_step"] for row in history(run)] == list(range(14))
    assert exit_codes(run) == [0]


@pytest.fixture
def wandb_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandB]:
    with fake_wandb() as found:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{found.port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield found


ONLINE = ("logger=wandb", "logger.wandb.max_share=1", *OFTEN)


@pytest.mark.extended
@needs("wandb")
@pytest.mark.parametrize("goals", some([(20,), (20, 40)], 0), ids=len)
def test_an_online_run_of_wandb_that_is_killed_and_resumed_is_complete_and_unique(workdir, wandb_server, paused, goals):
    words = ["train", *FAST, *ONLINE, "logger.wandb.wait_s=30", f"epochs={1 + len(goals)}", *paused(0.02)]
    assert "wandb:" not in _killed_at(goals, words, workdir)
    [(number, rows)] = wandb_server.rows.items()
    assert [row["_step"] for _, row in sorted(rows.items())] == list(range(len(_logged(workdir))))
    for split in ("train", "val", "test"):
        found = [row["global_step"] for _, row in sorted(rows.items()) if f"{split}/loss" in row]
        assert found == _steps(_logged(workdir), split)
    assert wandb_server.exit_codes[number][-1] == 0


@needs("wandb")
@pytest.mark.parametrize("dies", some(["at the start", "in the middle"]))
def test_a_dead_server_of_wandb_costs_one_warning_and_does_not_keep_the_process(workdir, wandb_server, paused, dies):
    if dies == "at the start":
        wandb_server.stop()
    words = ["train", *FAST, *ONLINE, "logger.wandb.wait_s=2", "epochs=3", *paused(0.1)]
    program = ForkedProgram(words)
    if dies == "in the middle":
        until(lambda: wandb_server.rows or program.poll() is not None)
    until(lambda: len(_logged(workdir)) >= 20)
    wandb_server.stop()
    until(lambda: len(_logged(workdir)) >= 60)
    began = time.monotonic()
    out, err = program.communicate(60)
    assert program.wait() == 0, err
    assert time.monotonic() - began < 20
    assert (out + err).count("wandb: Weights & Biases, online, project of the name of the run: ") == 1
    assert "the rest is sent by: python -m runner sync outputs" in out + err
    wandb_server.start()
    [directory] = workdir.glob("outputs/digits/*")
    sent = ForkedProgram(["sync", str(directory)])
    out, err = sent.communicate(60)
    assert sent.wait() == 0, out + err
    [rows] = wandb_server.rows.values()
    assert [row["_step"] for _, row in sorted(rows.items())] == list(range(len(_logged(workdir))))


def test_a_client_is_not_imported_before_it_costs_less_than_its_share(tmp_path, monkeypatch):
    tracker = _slow(tmp_path, monkeypatch, 0.2)
    _write(tmp_path / "run", range(1, 4))
    tracker.open(tmp_path / "run", None)
    time.sleep(1)
    assert "slow_client" not in sys.modules
    tracker.finish()
    assert "slow_client" in sys.modules
    assert len(tracker.points) == 3


@pytest.mark.extended
def test_the_thread_computes_for_no_more_than_its_share(tmp_path, monkeypatch):
    tracker = _slow(tmp_path, monkeypatch, 0.0, max_share=0.2)
    _write(tmp_path / "run", range(1, 10_000))
    began = time.monotonic()
    tracker.open(tmp_path / "run", None)
    time.sleep(6)
    assert 0.1 < tracker.computed_s < 0.2 * (time.monotonic() - began) + 0.1
    tracker.finish()
    assert tracker.points == [*range(1, 10_000)]


def _slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, import_s: float, **settings: float) -> Any:
    """A tracker whose client takes a time to import."""
    (tmp_path / "slow_client.py").write_text(f"import time\ntime.sleep({import_s})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_client", raising=False)

    class Slow(Tracker):
        name = "slow"

        def connect(self) -> None:
            self.points, self.computed_s = list[int](), 0.0

        def send(self, points: list[dict[str, Any]], first: int, times: list[int]) -> None:
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                self.computed_s = time.thread_time()
            self.points += [point["global_step"] for point in points]

        def end(self, status: str, error: str) -> None:
            assert status == "killed"

    tracker = Slow(wait_s=30.0, **settings)
    tracker.prepare("nowhere", ["slow_client"], [])
    return tracker


FORKING = """
import multiprocessing, sys, time
from pathlib import Path
from runner.tracking.trackers.loggers import Tracker

class Slow(Tracker):
    name = "slow"

tracker = Slow(max_share=1.0)
tracker.prepare("nowhere", ["slow_client"], [])
tracker.open(Path("run"), None)
while not Path("importing").exists():
    time.sleep(0.01)
child = multiprocessing.get_context("fork").Process(target=__import__, args=("slow_client",))
child.start()
child.join(20)
print("hangs" if child.is_alive() else child.exitcode)
child.kill()
"""


@pytest.mark.extended
def test_a_process_forked_while_a_client_is_imported_can_import_it_too(workdir):
    (workdir / "slow_client.py").write_text("import time\nopen('importing', 'w')\ntime.sleep(2)\n")
    _write(workdir / "run", range(1, 4))
    words = [sys.executable, "-W", "ignore", "-c", FORKING]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["0"], done.stderr


def test_two_trainings_of_one_process_have_a_run_each(workdir, server):
    from runner import train

    words = (*FAST, "logger=mlflow", *_live(server), "max_steps=3")
    for seed in (1, 2):
        train(*words, f"seed={seed}")
    assert [found["status"] for found in server.runs.values()] == ["FINISHED"] * 2
    assert [found["params"]["seed"] for found in server.runs.values()] == ["1", "2"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("logger=mlflow", "logger.mlflow.wait_s=soon"), "logger.mlflow.wait_s"),
        (("logger=mlflow", "logger.mlflow.artifacts=some"), "logger.mlflow.artifacts"),
        (("logger=mlflow", "logger.mlflow.register=digits"), "logger.mlflow.register"),
        (("logger=wandb", "logger.wandb.mode=later"), "logger.wandb.mode"),
        (("logger=[wandb,mlflow]", "logger.wandb.tracking_uri=x"), "logger.wandb.tracking_uri"),
    ],
)
def test_wrong_values_are_refused(problems: Callable[..., dict[str, Problem]], words, key):
    assert key in problems(*words)


def test_what_a_logger_gets_from_the_program_is_not_offered_as_a_setting(problems: Callable[..., dict[str, Problem]]):
    for name in ("mlflow", "tensorboard"):
        allowed = problems(f"logger={name}", f"logger.{name}.no=1")[f"logger.{name}.no"].allowed.split(", ")
        assert not {"warn", "watched"} & {*allowed}
    assert problems("logger=none", "logger.csv.a=1")["logger.csv"].allowed == "logger=csv, or no key of logger.csv"


def test_a_long_trouble_ends_at_a_word_and_a_short_one_without_a_full_stop():
    long = sentence_of(ValueError("many words " * 50), "here")
    assert len(long) <= 304
    assert long.endswith((" many ...", " words ..."))
    assert sentence_of(ValueError("Log in."), "here") == "here: Log in"


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_a_sentence_with_the_command(monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(UserError, match=rf"pip install 'runner\[{name}\]'"):
        loggers.TRACKERS[name]()


@pytest.mark.parametrize(
    "settings",
    [{"wait_s": -1.0}, {"max_share": 0.0}, {"tracking_uri": "localhost:5000"}, {"tracking_uri": "sqlit:///x.db"}],
    ids=str,
)
def test_values_without_a_meaning_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        MLflow(**settings)


def test_a_password_in_the_address_is_not_stored_and_sync_takes_it_from_the_variable(train, server, run, monkeypatch):
    server.failure = "500"
    secret = server.uri.replace("http://", "http://me:hunter2@")
    result = train("logger=mlflow", f"logger.mlflow.tracking_uri='{secret}'", "max_steps=3", "log.every_steps=1")
    assert "with the address in MLFLOW_TRACKING_URI" in result.out
    kept = [path for path in result.directory.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert kept == []
    server.failure = ""
    for missing in (False, True):
        if missing:
            shutil.rmtree(result.directory / "trackers")
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        asked = run("sync", str(result.directory))
        assert (asked.status, "MLFLOW_TRACKING_URI" in asked.err) == (1, True)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", secret)
        sent = run("sync", str(result.directory))
        assert (sent.status, "hunter2" in sent.out + sent.err) == (0, False)
    assert [server.steps(number, "train/loss") for number in server.runs] == [[1, 2, 3]] * 2


@pytest.mark.parametrize("words", [(), ("nowhere",), ("--all",)], ids=str)
def test_sync_without_a_run_directory_is_refused(run, words):
    assert run("sync", *words).status == 2
