import csv
import json
import math
import re
import resource
from pathlib import Path

import pytest
import yaml
from extras import needs

from runner.base.errors import UserError
from runner.tracking import loggers
from runner.tracking.loggers import Csv, JsonLines, Logger, MetricsBuffer, TensorBoard, Watched
from runner.tracking.run_files import copy_until
from runner.tracking.trackers.loggers import MLflow, WandB

OPTIONS = Path(__file__).parents[2] / "conf" / "logger"


def _rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_json_lines_are_on_the_disk_at_once_and_continue_at_the_step_they_resume_from_or_at_the_end(tmp_path):
    path, logger = tmp_path / "metrics.jsonl", JsonLines()
    logger.open(tmp_path, None)
    logger.log("train", {"loss": 0.5, "accuracy": math.nan}, 10, 1)
    assert path.read_text() == '{"global_step": 10, "epoch": 1, "split": "train", "loss": 0.5, "accuracy": null}\n'
    logger.close()
    path.unlink()
    _log([JsonLines()], tmp_path, None, [("train", {"loss": 1.0 / step}, step) for step in (10, 20, 30)])
    path.write_text(path.read_text() + '{"global_step": 40, "epo')
    _log([JsonLines()], tmp_path, 20, [("train", {"loss": 0.0}, 30)])
    path.write_text(path.read_text() + '{"glo')
    _log([JsonLines()], tmp_path, None, [("test", {}, 40)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(record["split"], record["global_step"], record.get("loss")) for record in records]
    assert found == [("train", 10, 0.1), ("train", 20, 0.05), ("train", 30, 0.0), ("test", 40, None)]


def _log(loggers, directory, resume_step, lines):
    for logger in loggers:
        logger.open(directory, resume_step)
    for split, metrics, step in lines:
        for logger in loggers:
            logger.log(split, metrics, step, 1)
    for logger in reversed(loggers):
        logger.flush()
        logger.close()
        logger.close()


def test_csv_files_are_written_whole_with_a_column_for_each_metric_beside_files_of_others(tmp_path):
    (tmp_path / "metrics_train.csv").write_text("global_step,epoch,loss\n15,1,0.")
    foreign = tmp_path / "metrics_of_mine.csv"
    foreign.write_text("a,b\nx,y")
    train = [({"loss": 0.5}, 10), ({"loss": 0.25, "lr": math.nan}, 20), ({"lr": 0.1}, 30)]
    _log([JsonLines(), Csv()], tmp_path, None, [*(("train", *line) for line in train), ("val", {"loss": 0.125}, 30)])
    assert _rows(tmp_path / "metrics_train.csv") == [
        ["global_step", "epoch", "loss", "lr"],
        ["10", "1", "0.5", ""],
        ["20", "1", "0.25", "nan"],
        ["30", "1", "", "0.1"],
    ]
    assert _rows(tmp_path / "metrics_val.csv") == [["global_step", "epoch", "loss"], ["30", "1", "0.125"]]
    assert foreign.read_text() == "a,b\nx,y"


def test_csv_files_of_a_long_run_are_written_less_often_than_checkpoints(tmp_path, monkeypatch):
    clock = [0.0]
    lines, logger = JsonLines(), Csv()
    monkeypatch.setattr("runner.tracking.loggers.time.monotonic", lambda: clock[0])
    written = Csv._write
    monkeypatch.setattr(Csv, "_write", lambda self: (written(self), clock.__setitem__(0, clock[0] + 2))[0])
    for each in (lines, logger):
        each.open(tmp_path, None)
    for now, expected in ((0.0, 1), (100.0, 1), (202.0, 3)):
        lines.log("train", {"loss": 1.0}, int(now), 1)
        clock[0] = max(clock[0], now)
        logger.flush()
        assert len(_rows(tmp_path / "metrics_train.csv")) - 1 == expected
    lines.log("train", {"loss": 1.0}, 300, 1)
    for each in (lines, logger):
        each.close()
    assert len(_rows(tmp_path / "metrics_train.csv")) - 1 == 4


def _events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def _scalars(folder, tag):
    return [(event.step, event.value) for event in _events(folder).Scalars(tag)]


@pytest.mark.parametrize("due", [False, True], ids=["evaluated", "evaluation due"])
def test_what_a_resumed_run_logs_again_at_its_first_step_is_there_once_in_every_logger(tmp_path, due):
    first = [JsonLines(), Csv(), TensorBoard()]
    for logger in first:
        logger.open(tmp_path, None)
        logger.log("train", {"loss": 4.0}, 10, 1)
        logger.log("train", {"loss": 2.0}, 20, 1)
        logger.log("val", {"loss": math.nan}, 20, 1)
        logger.log("test", {"loss": 1.0}, 20, 1)
        logger.log("train", {"loss": 0.5}, 30, 1)
        logger.flush()  # and the process is killed
    path = tmp_path / "metrics.jsonl"
    copy_until(path, path, 20, ("test", "val") if due else ("test",))
    again = [("val", {"loss": math.nan}, 20)] if due else []
    _log([JsonLines(), Csv(), TensorBoard()], tmp_path, 20, [*again, ("test", {"loss": 1.0}, 20)])
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(record["split"], record["global_step"]) for record in records]
    assert found == [("train", 10), ("train", 20), ("val", 20), ("test", 20)]
    for split, steps in (("train", ["10", "20"]), ("val", ["20"]), ("test", ["20"])):
        assert [row[0] for row in _rows(tmp_path / f"metrics_{split}.csv")] == ["global_step", *steps]
    assert _scalars(tmp_path, "loss/train") == [(10, 4.0), (20, 2.0)]
    [(step, value)] = _scalars(tmp_path, "loss/val")
    assert (step, math.isnan(value)) == (20, True)
    assert _scalars(tmp_path, "loss/test") == [(20, 1.0)]
    for logger in first:
        logger.close()


def test_a_metrics_file_that_somebody_else_wrote_does_not_break_a_resumed_run(tmp_path):
    lines = ['{"global_step": 20}', '{"global_step": 20, "split": [1], "loss": {}, "x": 1e999, "y": 1' + 60 * "0" + "}"]
    lines += ['{"global_step": 20, "split": "val", "large": 1e30}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    _log([Csv(), TensorBoard()], tmp_path, 20, [("train", {"loss": 1.0}, 30)])
    assert _scalars(tmp_path, "loss/train") == [(30, 1.0)]
    assert _scalars(tmp_path, "large/val") == [(20, pytest.approx(1e30))]


@pytest.mark.parametrize(
    ("make", "package"), [(TensorBoard, "tensorboard"), (MLflow, "runner[mlflow]"), (WandB, "runner[wandb]")]
)
def test_a_client_that_is_not_installed_is_a_sentence_with_the_command(monkeypatch, make, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    told = rf"logger\.{make.name.lower()}: needs .*\n.*pip install '{re.escape(package)}', or logger=none"
    with pytest.raises(UserError, match=told):
        make()


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (TensorBoard, {"flush_s": 0}, "flush_s must be at least 1, got 0"),
        (MLflow, {"wait_s": -1}, "wait_s"),
        (MLflow, {"tracking_uri": "localhost:50"}, "tracking_uri"),
        (MLflow, {"tracking_uri": "sqlit:///x.db"}, "tracking_uri"),
    ],
)
def test_values_without_a_meaning_are_refused(make, settings, reason):
    with pytest.raises(ValueError, match=reason):
        make(**settings)


def test_a_full_disk_costs_rows_of_tensorboard_and_not_the_run(tmp_path):
    said = list[str]()
    logger = TensorBoard(warn=said.append)
    logger.open(tmp_path, None)
    logger.log("train", {"loss": 1.0}, 0, 1)
    logger.flush()
    [path] = (tmp_path / "tensorboard").iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
    try:
        for step in range(1, 40):
            logger.log("val", {"loss": 1.0}, step, 1)
        logger.flush()
        logger.log("train", {"loss": 1.0}, 40, 1)
        logger.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said[0] == "TensorBoard: tensorboard/: file too large; the run goes on, and metrics.jsonl has every row"
    assert said[1:] == [
        "TensorBoard: 40 of 41 rows did not arrive (tensorboard/: file too large); metrics.jsonl has every row"
    ]


@pytest.mark.parametrize("make", [JsonLines, Csv])
def test_a_logger_that_was_never_opened_can_be_flushed_and_closed(make):
    logger: Logger = make()
    logger.flush()
    logger.close()


def _marks(option: Path) -> list[pytest.MarkDecorator]:
    named = {*yaml.safe_load(option.read_text())} & {"mlflow", "wandb"}
    return [needs(name) for name in sorted(named)]


@pytest.mark.parametrize(
    "option", [pytest.param(path, marks=_marks(path), id=path.stem) for path in sorted(OPTIONS.glob("*.yaml"))]
)
def test_every_shipped_option_builds_its_loggers(option):
    import importlib

    for name, node in yaml.safe_load(option.read_text()).items():
        module, _, attribute = node.pop("_target_").rpartition(".")
        assert name in {"tensorboard", "csv", "mlflow", "wandb"}
        assert getattr(importlib.import_module(module), attribute)(**node)


def test_tensorboard_gets_the_first_sample_of_each_split_and_the_weights_keep_their_bits(train):
    words = ("max_steps=6", "log.every_steps=1", "checkpoint.every_steps=3", "model=mlp", "evaluate.test=false")
    plain, full = train(*words), train(*words, "logger=tensorboard", "logger.tensorboard.images=true")
    assert full.summary["weights_sha256"] == plain.summary["weights_sha256"]
    events = _events(full.directory)
    found = {tag: [event.step for event in events.Images(tag)] for tag in events.Tags()["images"]}
    assert found == {f"first sample/{split}": [0] for split in ("train", "val", "test")}


def test_predictions_that_cannot_be_drawn_cost_one_warning(tmp_path):
    said, lines = list[str](), [("val", {"loss": 1.0}, 1), ("val", {"loss": 2.0}, 2)]
    _log([TensorBoard(images=True, watched=Watched({}, lambda: [1 / 0]), warn=said.append)], tmp_path, None, lines)
    assert said == ["TensorBoard gets no pictures of predictions: division by zero"]
    assert _scalars(tmp_path, "loss/val") == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (("epochs=2", "limit.train_batches=5"), range(1, 11)),  # with few steps, each one
        (("epochs=60", "limit.train_batches=2", "accumulate=2"), range(1, 61)),  # one an epoch
        (("epochs=2", "limit.train_batches=60"), [*range(2, 61, 2), *range(62, 121, 2)]),
        (("epochs=1", "limit.train_batches=125"), [*range(2, 125, 2), 125]),  # the end of the epoch, too
        (("epochs=null", "max_steps=7", "limit.train_batches=3", "log.every_steps=auto"), range(1, 8)),
        (("epochs=2", "limit.train_batches=5", "log.every_steps=4"), [4, 8, 10]),
    ],
)
def test_a_run_has_about_50_lines_of_training_and_one_at_the_end_of_each_epoch(train, words, steps):
    quick = ("model=mlp", "model.hidden=[2]", "data.batch_size=8", "threads=1", "logger=none", "evaluate.test=false")
    result = train(*quick, *words, "evaluate.every_epochs=null", "log.curves=false")
    records = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["global_step"] for record in records] == list(steps)
    assert result.out.count("train ") == len(steps)


@pytest.mark.parametrize(
    "calls",  # seconds since the one before, the split, and how many have been passed on then
    [
        [(0.0, "train", 1), (0.4, "train", 1), (0.6, "train", 3)],
        [(1.0, "train", 1), (1.0, "train", 2), (1.0, "train", 3)],
        [(0.0, "train", 1), (0.1, "train", 1), (0.0, "val", 3), (0.1, "train", 3)],
    ],
    ids=["quick steps wait for a second", "slow steps come one by one", "an evaluation takes along what waits"],
)
def test_metrics_are_passed_on_in_order_after_a_second(monkeypatch, calls):
    now, first, second = [100.0], [], []
    monkeypatch.setattr(loggers.time, "monotonic", lambda: now[0])
    buffer = MetricsBuffer([lambda *metrics: first.append(metrics), lambda *metrics: second.append(metrics)])
    for step, (later, split, passed) in enumerate(calls):
        now[0] += later
        buffer(split, {"loss": 1.0 / (step + 1)}, step, 1)
        assert len(first) == passed
    buffer.empty()
    buffer.empty()
    assert first == second == [(split, {"loss": 1 / (step + 1)}, step, 1) for step, (_, split, _) in enumerate(calls)]


def test_what_could_not_be_passed_on_is_not_tried_again():
    def full(*metrics):
        raise OSError("no space")

    buffer = MetricsBuffer([full])
    with pytest.raises(OSError, match="no space"):
        buffer("train", {}, 1, 1)
    buffer.empty()
