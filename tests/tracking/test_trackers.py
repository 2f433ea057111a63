"""Trackers get the rows of a run, whatever fails, at the cost of two sentences; `metrics.jsonl` has every row."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from extended import some
from extras import needs, optional
from fake_wandb import FakeWandB, fake_wandb
from forked import ForkedProgram
from running_sweeps import until

from runner.base.errors import Problem
from runner.tracking import loggers
from runner.tracking.loggers import Background, Row, sentence_of
from runner.tracking.run_files import read_records
from runner.tracking.trackers.loggers import MLflow

mlflow = optional("mlflow")
pytestmark = needs("mlflow")
FAST = ("threads=1", "log.progress=false", "log.curves=false", "log.every_steps=1")


class Receiver(Background):
    """Keeps rows; `failures` has functions that its methods call, and that may raise."""

    name = "receiver"
    period_s = 0.01

    def __init__(self, wait_s: float = 30.0, **failures: Callable[[], object]) -> None:
        self.said, self.rows, self.batches, self.ended = list[str](), list[Row](), 0, False
        super().__init__(wait_s=wait_s, warn=self.said.append)
        self.address, self.modules, self._failures = "here", (), failures

    def connect(self) -> None:
        self._failures.get("connect", bool)()

    def send(self, rows: list[Row]) -> None:
        self.batches += 1
        self._failures.get("send", bool)()
        self.rows += rows

    def end(self) -> None:
        self._failures.get("end", bool)()
        self.ended = True


def _run(receiver: Receiver, rows: int, pause_s: float = 0.0) -> Receiver:
    receiver.open(Path(), None)
    for step in range(rows):
        receiver.log("train", {"loss": 1 / (step + 1)}, step, 1)
        time.sleep(pause_s)
    receiver.finish()
    return receiver


def fail(first: int = 0, last: int = 10**9) -> Callable[[], object]:
    """A function that raises at those of its calls."""
    calls = iter(range(10**9))

    def call() -> None:
        if first <= next(calls) <= last:
            raise ConnectionRefusedError(111, "Connection refused")

    return call


def test_rows_arrive_in_order_together_and_with_the_time_at_which_they_were_logged():
    began = time.time()
    receiver = Receiver(connect=lambda: until(lambda: receiver._logged == 1200))
    _run(receiver, 1200)
    assert [row.global_step for row in receiver.rows] == [*range(1200)]
    assert (receiver.batches, receiver.ended, receiver.said) == (3, True, [])
    times = [row.time for row in receiver.rows]
    assert began <= times[0] < times[-1], "not that of sending"
    assert times == sorted(times)


REFUSED = "here: connection refused"


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ({"connect": fail()}, [f"receiver: {REFUSED}; the run goes on", f"40 of 40 rows did not arrive ({REFUSED})"]),
        ({"connect": fail(0, 1)}, [f"receiver: {REFUSED}; the run goes on"]),
        ({"send": fail()}, [f"receiver: {REFUSED}; the run goes on", f"40 of 40 rows did not arrive ({REFUSED})"]),
        ({"send": fail(2, 3)}, [f"receiver: {REFUSED}; the run goes on", "of 40 rows did not arrive"]),
        ({"end": fail()}, [f"the end of the run did not arrive ({REFUSED})"]),
        ({"connect": sys.exit}, ["receiver: here: SystemExit; the run goes on", "40 of 40 rows did not arrive"]),
    ],
    ids=["dead", "dead at first", "refuses rows", "refuses for a moment", "dies at the end", "calls exit"],
)
def test_a_receiver_that_fails_costs_a_warning_and_the_number_of_lost_rows_at_the_end(failures, said):
    receiver = _run(Receiver(**failures), 40, 0.005)
    assert len(receiver.said) == len(said)
    assert all(part in found for part, found in zip(said, receiver.said, strict=True)), receiver.said
    assert all(found.endswith("metrics.jsonl has every row") for found in receiver.said)
    missing = next((found for found in receiver.said if "of 40 rows" in found), "receiver: 0 of")
    assert len(receiver.rows) == 40 - int(missing.split()[1])


def test_a_full_queue_and_a_receiver_that_hangs_block_neither_logging_nor_the_end(monkeypatch):
    monkeypatch.setattr(loggers, "_MOST_WAITING", 10)
    free, began = threading.Event(), time.monotonic()
    receiver = _run(Receiver(wait_s=0.1, connect=free.wait), 1000)
    assert time.monotonic() - began < 5
    free.set()
    assert receiver.said == [
        "receiver: here: 10 rows wait, and more are dropped; the run goes on, and metrics.jsonl has every row",
        "receiver: 1,000 of 1,000 rows did not arrive (here: not everything was sent within 0.1 s); "
        "metrics.jsonl has every row",
    ]


def test_a_long_trouble_ends_at_a_word_and_a_short_one_without_a_full_stop():
    long = sentence_of(ValueError("many words " * 50), "here")
    assert len(long) <= 304
    assert long.endswith((" many ...", " words ..."))
    assert sentence_of(ValueError("Log in."), "here") == "here: Log in"


FORKING = """
import multiprocessing, time
from pathlib import Path
from test_trackers import Receiver

receiver = Receiver()
receiver.modules = ["slow_client"]
receiver.open(Path("run"), None)
while not Path("importing").exists():
    time.sleep(0.01)
child = multiprocessing.get_context("fork").Process(target=__import__, args=("slow_client",))
child.start()
child.join(20)
print("hangs" if child.is_alive() else child.exitcode)
child.kill()
"""


@pytest.mark.extended
def test_a_process_forked_while_a_client_is_imported_can_import_it_too(workdir, monkeypatch):
    (workdir / "slow_client.py").write_text("import time\nopen('importing', 'w')\ntime.sleep(2)\n")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(workdir), str(Path(__file__).parent), *sys.path]))
    words = [sys.executable, "-W", "ignore", "-c", FORKING]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["0"], done.stderr


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow's own store in a folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    return mlflow.tracking.MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")


def _runs(store: Any) -> list[Any]:
    """The runs of all experiments, the newest first."""
    return list(store.search_runs([each.experiment_id for each in store.search_experiments()]))


def _steps(store: Any, number: str, split: str) -> list[int]:
    return sorted(each.step for each in store.get_metric_history(number, f"{split}/loss"))


def _logged(path: Path, split: str) -> list[int]:
    return [row["global_step"] for row in read_records(path / "metrics.jsonl") if row["split"] == split]


def test_a_preempted_run_continues_the_run_of_mlflow_and_of_an_offline_wandb(bomb, run, store):
    pytest.importorskip("wandb")
    from wandb_files import exit_codes, history

    words = ("logger=[mlflow,wandb]", "logger.wandb.mode=offline", *FAST, "tags=[mine]")
    first = run("train", *words, "epochs=3", bomb(25, signal.SIGTERM)[-1])
    assert first.status == 75
    [before] = _runs(store)
    assert (before.info.status, _steps(store, before.info.run_id, "train")) == ("KILLED", [*range(1, 26)])
    again = (f"ckpt_path={first.directory}", f"hydra.run.dir={first.directory}", "callbacks=none")
    result = run("train", *again, *words, "epochs=3")
    assert (result.status, "warning: mlflow" in result.out, "warning: wandb" in result.out) == (0, False, False)
    [found] = _runs(store)
    rows = history(result.directory)
    for split in ("train", "val", "test"):
        assert _steps(store, found.info.run_id, split) == _logged(result.directory, split)
        assert [row["global_step"] for row in rows if f"{split}/loss" in row] == _logged(result.directory, split)
    assert exit_codes(result.directory) == [1, 0]
    folders = [path.name.rpartition("-")[2] for path in result.directory.glob("wandb/offline-run-*")]
    assert len(set(folders)) == 1, "wandb sync uploads both files into one run"
    assert (found.info.status, found.data.tags["mine"], found.data.params["epochs"]) == ("FINISHED", "true", "3")
    names = {artifact.path for artifact in store.list_artifacts(found.info.run_id)}
    assert names == {"config.yaml", "overrides.yaml", "environment.json", "summary.json", "run.log", "pictures"}


def _tracked(directory: Path, steps: range, config: str = "name: mine\nepochs: 3\n") -> MLflow:
    """A tracker of a run that logs at some steps."""
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(config)
    tracker = MLflow(warn=pytest.fail)
    tracker.open(directory, None)
    for step in steps:
        tracker.log("train", {"loss": float("inf")}, step, 1)
    return tracker


@pytest.mark.parametrize(
    ("config", "kept"),
    [("name: mine\nepochs: 3\nthreads: 2\n", [1, 2, 3, 4, 5, 6, 7]), ("name: mine\nepochs: 9\n", None)],
    ids=["same values", "another config"],
)
def test_steps_that_were_sent_are_sent_again_only_if_a_new_config_gives_them_other_values(
    tmp_path, store, config, kept
):
    _tracked(tmp_path / "run", range(1, 6)).finish()
    (tmp_path / "run" / "run.log").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("secret")
    _tracked(tmp_path / "run", range(4, 8), config).finish()
    [found] = _runs(store)
    assert _steps(store, found.info.run_id, "train") == (kept or [1, 2, 3, 4, 4, 5, 5, 6, 7])
    assert found.data.params.get("threads", found.data.tags.get("changed.epochs")) == ("2" if kept else "9")
    assert [each.path for each in store.list_artifacts(found.info.run_id)] == ["config.yaml"], "links are not followed"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"uid": 1}', b'{"settings": {}, "sent": ["x"]}', b"\xff"])
def test_a_state_that_is_damaged_begins_a_new_run(tmp_path, store, damage):
    _tracked(tmp_path / "run", range(1, 3)).finish()
    (tmp_path / "run/trackers/mlflow.json").write_bytes(damage)
    _tracked(tmp_path / "run", range(1, 3)).finish()
    assert [_steps(store, each.info.run_id, "train") for each in _runs(store)] == [[1, 2]] * 2


@pytest.mark.extended
def test_a_sweep_shows_each_job_and_failed_ones_as_failed(run, store):
    result = run("train", *FAST, "logger=mlflow", "--multirun", "optimizer.lr=1e-3,1e30", "max_steps=10")
    assert result.status == 1
    second, first = sorted(_runs(store), key=lambda each: each.info.status)
    assert (first.info.status, second.info.status) == ("FINISHED", "FAILED")
    assert "not finite" in second.data.tags["runner.error"]
    assert {each.data.tags["runner.sweep"] for each in (first, second)} == {str(result.directory.absolute())}
    assert first.info.run_name == f"{result.directory.name}/0"


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own use of SQLAlchemy
def test_a_database_in_a_file_has_the_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    _tracked(tmp_path / "run", range(1, 6)).finish()
    client = mlflow.tracking.MlflowClient()
    [found] = _runs(client)
    assert _steps(client, found.info.run_id, "train") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("failure", some(["refuses", "hangs"], 0))
def test_a_dead_server_does_not_change_the_weights_and_costs_two_sentences(train, failure):
    quiet = train("logger=none", "max_steps=20", *FAST)
    with socket.create_server(("127.0.0.1", 0)) as server:  # which takes connections, and never answers
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if failure == "refuses":
            server.close()
        words = (f"logger.mlflow.tracking_uri={address.replace('//', '//me:hunter2@')}", "logger.mlflow.wait_s=2")
        result = train("logger=mlflow", *words, "max_steps=20", *FAST, "hydra.run.dir=dead")
    assert result.summary["weights_sha256"] == quiet.summary["weights_sha256"]
    said = [line for line in result.out.splitlines() if "mlflow: " in line]
    assert len(said) <= 2
    assert f"{len(result.metrics)} of {len(result.metrics)} rows did not arrive" in said[-1]
    files = [path for path in result.directory.rglob("*") if path.is_file()]
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
    assert "hunter2" not in result.out + result.err


@pytest.fixture
def wandb_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandB]:
    with fake_wandb() as found:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{found.port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield found


def _paused(workdir: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[str]:
    """The words for a run that takes its time."""
    monkeypatch.syspath_prepend(workdir)
    code = f"import time\nclass Pause:\n    def on_step(self, loop):\n        time.sleep({seconds})\n"
    (workdir / "pausing.py").write_text(code)
    return ["+callbacks.pause._target_=pausing.Pause", "trust=[pausing]"]


@pytest.mark.extended
@needs("wandb")
def test_a_preempted_run_continues_an_online_run_of_wandb(wandb_server, workdir, monkeypatch):
    words = ["train", *FAST, "logger=wandb", "epochs=2", "resume=auto", *_paused(workdir, monkeypatch, 0.1)]
    first = ForkedProgram(words)
    until(lambda: len([*workdir.glob("outputs/digits/*/trackers/*")]) and wandb_server.rows)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 75
    second = ForkedProgram(words)
    assert (second.wait(120), "wandb:" in "".join(second.communicate(1))) == (0, False)
    [(number, rows)] = wandb_server.rows.items()
    [directory] = workdir.glob("outputs/digits/*/")
    for split in ("train", "val", "test"):
        found = [row["global_step"] for _, row in sorted(rows.items()) if f"{split}/loss" in row]
        assert found == _logged(directory, split)
    assert wandb_server.exit_codes[number] == [1, 0]


@needs("wandb")
@pytest.mark.parametrize("dies", some(["at the start", "in the middle"]))
def test_a_dead_server_of_wandb_does_not_keep_the_process(workdir, wandb_server, monkeypatch, dies):
    if dies == "at the start":
        wandb_server.stop()
    words = ["train", *FAST, "logger=wandb", "logger.wandb.wait_s=2", "epochs=3", *_paused(workdir, monkeypatch, 0.1)]
    program = ForkedProgram(words)
    if dies == "in the middle":
        until(lambda: wandb_server.rows or program.poll() is not None)
        wandb_server.stop()
    until(lambda: len([*workdir.glob("outputs/digits/*/summary.json")]))
    out, err = program.communicate(120)
    assert program.wait() == 0, err
    said = [line for line in (out + err).splitlines() if "wandb: " in line]
    assert 1 <= len(said) <= 2
    assert "did not arrive (Weights & Biases, online, project of the name of the run: " in said[-1]
    assert ("wandb sync outputs" in said[-1] or "wandb sync /" in said[-1]) == (dies == "in the middle")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("logger=mlflow", "logger.mlflow.wait_s=soon"), "logger.mlflow.wait_s"),
        (("logger=mlflow", "logger.mlflow.artifacts=some"), "logger.mlflow.artifacts"),
        (("logger=mlflow", "logger.mlflow.register=digits"), "logger.mlflow.register"),
        (("logger=mlflow", "logger.mlflow.max_share=1"), "logger.mlflow.max_share"),
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
