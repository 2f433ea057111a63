"""Trackers get every point once, whatever fails, and cost a run one warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from extras import needs, optional
from fake_mlflow import FakeMLflow, fake_mlflow

from runner import load
from runner.config.errors import Problem, UserError
from runner.tracking.trackers import loggers
from runner.tracking.trackers.delivery import Delivery
from runner.tracking.trackers.feeder import sentence_of

mlflow = optional("mlflow")
pytestmark = needs("mlflow")
NAMES = {"mlflow": "MLflow", "wandb": "WandB"}
FAST = ("threads=1", "log.progress=false", "log.curves=false")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMLflow]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with fake_mlflow(tmp_path / "artifacts") as found:
        yield found


@pytest.fixture(autouse=True)
def feeders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Feeders that get their share of a machine on which other tests run, but for the test of their priority."""
    if "yields" not in request.fixturenames:
        monkeypatch.setattr(loggers, "_yield_to_others", lambda pid: None)
    yield
    loggers.close_feeders(20)


def _write(directory: Path, steps: range, config: str = "name: mine\nepochs: 3\n", status: str = "running") -> None:
    """The files of a run that has logged at some steps."""
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(config)
    (directory / "summary.json").write_text(json.dumps({"status": status, "error": None}))
    lines = [{"global_step": step, "epoch": 1, "split": "train", "loss": 1 / step, "x": None} for step in steps]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _delivery(directory: Path, uri: str, resume_step: int = 0, again: bool = False) -> Delivery:
    found = Delivery(directory, "mlflow", {"tracking_uri": uri, "experiment": None, "artifacts": True})
    found.begin(resume_step, again)
    return found


@pytest.mark.parametrize("failure", ["refuse", "hang", "500", "die", "full"])
def test_after_a_failure_of_the_server_every_point_is_there_once(tmp_path, server, failure):
    run = tmp_path / "run"
    _write(run, range(1, 4))
    first = _delivery(run, server.uri)
    first.advance()
    _write(run, range(1, 9))
    server.failure = failure
    if failure == "refuse":
        server.stop()
    for _ in range(2):
        with pytest.raises(mlflow.exceptions.MlflowException):
            first.advance()
    first.close()  # its process is killed, and another one goes on
    if failure == "refuse":
        server.start()
    server.failure = ""
    _write(run, range(1, 12), status="finished")
    second = _delivery(run, server.uri, 8)
    second.over = True
    second.advance()
    second.close()
    [(number, found)] = server.runs.items()
    assert server.steps(number, "train/loss") == server.steps(number, "train/x") == list(range(1, 12))
    assert found["status"] == "FINISHED"
    assert (Path(found["artifacts"]) / "config.yaml").is_file()


def test_a_run_that_the_server_created_without_an_answer_is_found_again(tmp_path, server):
    run = tmp_path / "run"
    _write(run, range(1, 4))
    delivery = _delivery(run, server.uri)
    server.experiments.append("mine")
    server.script = ["", "", "die"]  # to the requests for the experiment, for the run, and to create it
    with pytest.raises(mlflow.exceptions.MlflowException):
        delivery.advance()
    assert len(server.runs) == 1
    delivery.advance()
    delivery.close()
    assert len(server.runs) == 1


def test_five_kills_and_resumes_leave_steps_complete_and_unique(tmp_path, server):
    run, saved = tmp_path / "run", 0
    for attempt in range(5):
        _write(run, range(1, 6 + 4 * attempt))  # killed four steps after the newest checkpoint
        delivery = _delivery(run, server.uri, saved)
        delivery.advance()
        delivery.close()
        saved = 1 + 4 * attempt
        _write(run, range(1, saved + 1))  # what a resumed run does first
    _write(run, range(1, 31), status="finished")
    last = _delivery(run, server.uri, saved)
    last.over = True
    last.advance()
    last.close()
    assert [server.steps(number, "train/loss") for number in server.runs] == [list(range(1, 31))]


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
    first = _delivery(run, server.uri)
    first.advance()
    first.close()
    _write(run, range(1, 12), config)
    second = _delivery(run, server.uri, 4, again)
    second.advance()
    second.close()
    numbers = list(server.runs)
    assert len(numbers) == runs
    assert server.steps(numbers[-1], "train/loss") == list(range(1, 12))
    if runs == 2:
        assert server.runs[numbers[0]]["tags"]["runner.replaced_by"] == numbers[1]
        assert server.runs[numbers[1]]["tags"]["runner.replaces"] == numbers[0]
    else:
        assert server.runs[numbers[0]]["params"]["threads"] == "2"


def test_a_parameter_that_changed_is_a_tag_as_mlflow_keeps_the_first_value(tmp_path, server):
    run = tmp_path / "run"
    for config in ("name: mine\nepochs: 3\n", "name: mine\nepochs: 9\n"):
        _write(run, range(1, 9), config)
        delivery = _delivery(run, server.uri, 8)
        delivery.advance()
        delivery.close()
    [found] = server.runs.values()
    assert (found["params"]["epochs"], found["tags"]["changed.epochs"]) == ("3", "9")


def test_a_sweep_has_one_process_for_all_jobs_and_shows_failed_ones_as_failed(run, server):
    words = (*FAST, "logger=mlflow", f"logger.mlflow.tracking_uri={server.uri}", "logger.mlflow.wait_s=30")
    result = run("train", *words, "--multirun", "optimizer.lr=1e-3,1e30", "epochs=1", "log.every_steps=5")
    assert result.status == 1
    first, second = server.runs.values()
    assert (first["status"], second["status"]) == ("FINISHED", "FAILED")
    assert "not finite" in second["tags"]["runner.error"]
    assert first["tags"]["runner.sweep"] == second["tags"]["runner.sweep"] == str(result.directory.absolute())
    job = result.directory / "0"
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert server.steps(next(iter(server.runs)), "train/loss") == [
        line["global_step"] for line in lines if line["split"] == "train"
    ]
    assert first["name"] == f"{result.directory.name}/0"
    assert first["params"]["optimizer.lr"] == "0.001"
    assert (Path(first["artifacts"]) / "summary.json").is_file()
    assert len(loggers._PROCESSES) == 1
    assert "mlflow:" not in result.err + result.out


@pytest.fixture
def yields() -> None:
    """Feeders have the priority that they have outside of tests."""


def test_a_feeder_gets_the_time_that_nothing_else_wants_and_no_ctrl_c(yields):
    pid = loggers.FeederProcess.of("mlflow")._process.pid
    assert os.getpgid(pid) != os.getpgid(0)
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE


def test_a_server_that_refuses_costs_one_warning_and_sync_sends_everything_later(run, server):
    server.stop()
    words = ("logger=mlflow", f"logger.mlflow.tracking_uri={server.uri}", "epochs=2", "log.every_steps=5")
    result = run("train", *FAST, *words, "logger.mlflow.wait_s=20")
    assert result.status == 0
    assert (result.out + result.err).count("mlflow:") == 1
    assert f"python -m runner sync {result.directory}" in result.out + result.err
    loggers.close_feeders(20)
    down = run("sync", str(result.directory))
    assert (down.status, "refused" in down.err) == (1, True)
    server.start()
    assert run("sync", str(result.directory.parent)).status == 0
    again = run("sync", str(result.directory))
    assert (again.status, "has everything" in again.out) == (0, True)
    [found] = server.runs.values()
    assert found["status"] == "FINISHED"
    for split in ("train", "val", "test"):
        steps = [line["global_step"] for line in result.metrics if line["split"] == split]
        assert server.steps(server.only, f"{split}/loss") == steps


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own use of SQLAlchemy
def test_a_database_in_a_file_is_read_back_by_mlflow_itself(tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    _write(run, range(1, 6), status="failed")
    for resume_step in (0, 3):
        delivery = _delivery(run, uri, resume_step)
        delivery.over = True
        delivery.advance()
        # What a request without an answer leaves: the points are there, and are sent again.
        spool = delivery._spool
        assert spool is not None
        for _ in range(2):
            point = {"global_step": 9, "epoch": 1, "split": "val", "loss": 0.5}
            spool.save(outbox={"time": 5.0, "points": [point]}, ended=None)
            delivery.advance()
        delivery.close()
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FAILED"
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "train/loss")]
    assert steps == [1, 2, 3, 4, 5]
    assert [metric.step for metric in client.get_metric_history(found.info.run_id, "val/loss")] == [9]


@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_a_finished_run_is_a_registered_model_with_a_signature(tmp_path, train, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = train("logger=mlflow", "logger.mlflow.register=digits", "max_steps=3")
    assert "mlflow: " not in found.err
    trained = load(found.directory)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    model = mlflow.pyfunc.load_model("models:/digits/1")
    [images] = model.metadata.signature.inputs.inputs
    assert (images.type, images.shape) == (np.uint8, (-1, -1, -1, 1))
    pictures = np.random.default_rng(0).integers(0, 256, (4, 11, 9, 1), np.uint8)
    table = model.predict(pictures)
    assert [column.name for column in model.metadata.signature.outputs.inputs] == list(table)
    assert table.to_dict("records") == trained.predict(list(pictures), probabilities=True)
    assert (found.directory / "checkpoints/best.safetensors").read_bytes() in [
        path.read_bytes() for path in tmp_path.rglob("artifacts/**/*.safetensors")
    ]
    words = ("logger=mlflow", "logger.mlflow.register=digits", "max_steps=6", f"ckpt_path={found.directory}")
    train(*words, f"hydra.run.dir={found.directory}")
    assert mlflow.pyfunc.load_model("models:/digits/2").metadata.run_id == model.metadata.run_id


@needs("wandb")
def test_offline_files_of_wandb_have_every_point_once(tmp_path, monkeypatch):
    from wandb_files import exit_codes, history

    monkeypatch.setattr("sys.exit", sys.exit)  # wandb replaces both for as long as the process lives
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    run = tmp_path / "run"
    settings = {"project": None, "entity": None, "mode": "offline"}
    for status, saved in (("preempted", 0), ("failed", 4), ("finished", 8)):
        _write(run, range(1, saved + 7), status=status)
        delivery = Delivery(run, "wandb", settings)
        delivery.begin(saved, False)
        delivery.advance()
        delivery.over = True
        if status == "failed":
            # An attempt that is killed while it writes its file.
            (run / "wandb" / f"offline-run-20990101_000000-{delivery._spool.state['id']}").mkdir()  # type: ignore[union-attr]
        delivery.advance()
        delivery.close()
    assert [row["global_step"] for row in history(run)] == list(range(1, 15))
    assert [row["_step"] for row in history(run)] == list(range(14))
    assert exit_codes(run) == [1, 1, 0]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("logger=mlflow", "logger.mlflow.wait_s=soon"), "logger.mlflow.wait_s"),
        (("logger=mlflow", "logger.mlflow.artifacts=some"), "logger.mlflow.artifacts"),
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
        getattr(loggers, NAMES[name])()


@pytest.mark.parametrize(
    "settings", [{"wait_s": -1.0}, {"tracking_uri": "localhost:5000"}, {"tracking_uri": "sqlit:///x.db"}], ids=str
)
def test_values_without_a_meaning_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        loggers.MLflow(**settings)


def test_a_password_in_the_address_is_not_stored_and_sync_asks_for_it(tmp_path, server, run, monkeypatch):
    secret = server.uri.replace("http://", "http://me:secret@")
    _write(tmp_path / "run", range(1, 4), status="finished")
    delivery = _delivery(tmp_path / "run", secret)
    delivery.advance()
    delivery.close()
    assert "secret" not in (tmp_path / "run/trackers/mlflow/state.json").read_text()
    asked = run("sync", str(tmp_path / "run"))
    assert (asked.status, "MLFLOW_TRACKING_URI" in asked.err) == (1, True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", secret)
    assert run("sync", str(tmp_path / "run")).status == 0


@pytest.mark.parametrize("words", [(), ("nowhere",), ("--all",)], ids=str)
def test_sync_without_a_run_directory_is_refused(run, words):
    assert run("sync", *words).status == 2


def test_neither_the_loggers_nor_sync_import_torch_or_a_client():
    code = "import sys, runner.verbs.sync, runner.tracking.trackers.loggers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "mlflow", "wandb", "numpy"} & set(done.stdout.split())
