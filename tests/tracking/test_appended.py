"""Log files that are deleted, replaced or cut short while a run writes them."""

from __future__ import annotations

import csv
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.config.errors import UserError
from runner.tracking.appended import AppendedFile
from runner.tracking.console import Console
from runner.tracking.loggers import Csv, JsonLines, TensorBoard

WAYS: dict[str, Callable[[Path], object]] = {
    "deleted": lambda path: path.unlink(),
    "renamed": lambda path: path.rename(path.with_name("moved")),
    "replaced": lambda path: path.with_name("new").write_text("other\n") and path.with_name("new").replace(path),
    "a link": lambda path: (path.unlink(), path.symlink_to("elsewhere")),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_file_that_is_gone_is_written_again_with_all_that_it_held_and_reported_once(tmp_path, way):
    said: list[str] = []
    path = tmp_path / "log"
    path.write_text("before\n")
    file = AppendedFile(path, said.append)
    file.write(b"one\n")
    WAYS[way](path)
    file.write(b"two\n")
    assert not path.is_symlink()
    assert path.read_text() == "before\none\ntwo\n"
    WAYS[way](path)
    file.write(b"three\n")
    file.close()
    assert path.read_text() == "before\none\ntwo\nthree\n"
    assert not (tmp_path / "elsewhere").exists(), "nothing is written through a link"
    assert len(said) == 1
    assert "was deleted or replaced" in said[0]
    assert str(path) in said[0]


def test_a_file_that_is_cut_short_is_reported_once_and_written_on(tmp_path):
    said: list[str] = []
    file = AppendedFile(tmp_path / "log", said.append)
    for line in (b"one\n", b"two\n", b"three\n"):
        file.write(line)
        os.truncate(tmp_path / "log", 0)
    file.write(b"four\n")
    file.close()
    assert (tmp_path / "log").read_text() == "four\n"
    assert len(said) == 1
    assert "truncated" in said[0]


@pytest.mark.parametrize("left", [0, 1, 24, 25, 34, 60])
@pytest.mark.parametrize("name", ["jsonl", "csv"])
@pytest.mark.parametrize("at", [30, 20], ids=["same columns", "new column"])
def test_a_logger_whose_file_is_cut_in_mid_line_goes_on_with_whole_lines(tmp_path, name, at, left):
    said: list[str] = []
    logger = LOGGERS[name](warn=said.append)
    logger.open(tmp_path, None)
    _log(logger, *((30,) if at == 30 else (10, 15)))
    [path] = tmp_path.glob("metrics*")
    before = path.read_bytes()
    cut = min(left, len(before) - 1)
    os.truncate(path, cut)
    _log(logger, 40, 50)
    logger.close()
    whole = before[:cut].count(b"\n") - (name == "csv")
    assert _steps(tmp_path, name) == [*([30] if at == 30 else [10, 15])[: max(0, whole)], 40, 50]
    if name == "csv":
        rows = [row.split(",") for row in path.read_text().splitlines()]
        assert rows[0] == ["global_step", "epoch", "loss", "lr"]
        assert {len(row) for row in rows} == {4}
    else:
        assert all(json.loads(line)["loss"] > 0 for line in path.read_text().splitlines())
    assert len(said) == 1
    assert "truncated" in said[0]


def test_a_file_that_another_writer_adds_to_is_left_as_it_is(tmp_path):
    said: list[str] = []
    file = AppendedFile(tmp_path / "log", said.append)
    file.write(b"one\n")
    with (tmp_path / "log").open("a") as other:
        other.write("other\n")
    file.write(b"two\n")
    file.close()
    assert ((tmp_path / "log").read_text(), said) == ("one\nother\ntwo\n", [])


def test_inode_numbers_that_change_from_look_to_look_are_not_taken_for_another_file(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("runner.tracking.appended.is_at", lambda path, descriptor: False)
    file = AppendedFile(tmp_path / "log", said.append)
    file.write(b"one\n")
    file.write(b"two\n")
    file.close()
    assert ((tmp_path / "log").read_text(), said) == ("one\ntwo\n", [])


def test_a_directory_that_is_gone_is_a_sentence(tmp_path):
    (tmp_path / "run").mkdir()
    file = AppendedFile(tmp_path / "run" / "log", lambda text: None)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match="no such file"):
        file.write(b"one\n")


def test_a_folder_in_place_of_a_file_is_a_sentence_and_the_file_can_still_be_flushed_and_closed(tmp_path):
    file = AppendedFile(tmp_path / "log", lambda text: None)
    file.write(b"one\n")
    (tmp_path / "log").unlink()
    (tmp_path / "log").mkdir()
    for _ in range(2):
        with pytest.raises(UserError, match=f"cannot write {tmp_path / 'log'}: "):
            file.write(b"two\n")
    file.sync()
    file.close()


@pytest.mark.parametrize("at", [20, 30], ids=["same columns", "new column"])
@pytest.mark.parametrize("name", ["jsonl", "csv", "tensorboard"])
def test_a_logger_whose_file_became_something_else_reports_it_and_can_be_closed(tmp_path, name, at):
    logger = LOGGERS[name]()
    logger.open(tmp_path, None)
    _log(logger, 10)
    shutil.rmtree(tmp_path / "tensorboard", ignore_errors=True)
    (tmp_path / "tensorboard").touch()
    for path in tmp_path.glob("metrics*"):
        path.unlink()
        path.mkdir()
    with pytest.raises(UserError, match="a file exists where a folder is needed, or the reverse"):
        _log(logger, at)
    logger.flush()
    logger.close()


def test_run_log_in_whose_place_a_folder_stands_is_warned_about_once_and_the_run_goes_on(tmp_path, capsys):
    console = Console(tmp_path / "run.log", progress=False)
    console.line("one")
    (tmp_path / "run.log").unlink()
    (tmp_path / "run.log").mkdir()
    console.line("two")
    console.line("three")
    out = capsys.readouterr().out
    assert out.count("run.log cannot be written any more") == 1
    assert out.splitlines()[-1] == "three"
    [closing] = [found for found in weakref.finalize._registry if found.peek() and found.peek()[0] is console]
    closing()


def test_run_log_comes_back_and_says_so_in_itself(tmp_path, capsys):
    console = Console(tmp_path / "run.log", progress=False)
    console.line("one")
    (tmp_path / "run.log").unlink()
    console.line("two")
    text = (tmp_path / "run.log").read_text()
    assert [line.split("  ")[1] for line in text.splitlines() if "warning" not in line] == ["one", "two"]
    assert text.count("was deleted or replaced") == 1
    assert capsys.readouterr().out.count("was deleted or replaced") == 1


def _log(logger: Any, *steps: int) -> None:
    for step in steps:
        logger.log("train", {"loss": step / 4} | ({"lr": 0.5} if step > 20 else {}), step, 1)


def _steps(directory: Path, name: str) -> list[int]:
    if name == "jsonl":
        return [json.loads(line)["global_step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    if name == "csv":
        with (directory / "metrics_train.csv").open(newline="") as file:
            return [int(row["global_step"]) for row in csv.DictReader(file)]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("loss/train")]


LOGGERS: dict[str, Any] = {"jsonl": JsonLines, "csv": Csv, "tensorboard": TensorBoard}


@pytest.mark.parametrize("at", [20, 30], ids=["same columns", "new column"])
@pytest.mark.parametrize("name", list(LOGGERS))
def test_every_logger_goes_on_after_its_file_was_deleted_and_has_every_line(tmp_path, name, at):
    said: list[str] = []
    logger = LOGGERS[name](warn=said.append)
    logger.open(tmp_path, None)
    _log(logger, *range(10, at, 10))
    logger.flush()
    shutil.rmtree(tmp_path / "tensorboard", ignore_errors=True)
    for path in tmp_path.glob("metrics*"):
        path.unlink()
    _log(logger, at, at + 10)
    logger.flush()
    assert _steps(tmp_path, name) == [*range(10, at + 11, 10)]
    logger.close()
    assert len(said) == 1
    assert "deleted" in said[0]


def test_tables_that_are_deleted_between_resuming_and_the_first_row_keep_their_rows(tmp_path):
    for resume_step in (None, 20):
        logger = Csv()
        logger.open(tmp_path, resume_step)
        if resume_step:
            (tmp_path / "metrics_train.csv").unlink()
        _log(logger, *((30,) if resume_step else (10, 20)))
        logger.close()
    assert _steps(tmp_path, "csv") == [10, 20, 30]


DELETING = """
import shutil
from pathlib import Path

class Deleting:
    def on_step(self, loop):
        if loop.state.position.global_step == 4:
            for path in Path("run").glob("metrics*"): path.unlink()
            Path("run/run.log").unlink()
            shutil.rmtree("run/tensorboard")
"""


def test_a_run_whose_logs_are_deleted_ends_with_all_of_them_and_warns_once_of_each(run, workdir, monkeypatch):
    (workdir / "deleting.py").write_text(DELETING)
    monkeypatch.syspath_prepend(str(workdir))
    result = run(
        "train", "data=synthetic", "data.dataset.samples=64", "data.image_size=8", "data.batch_size=8", "model=mlp",
        "max_steps=6", "log.every_steps=1", "log.progress=false", "log.curves=false", "logger=all", "threads=1",
        "+callbacks.deleting._target_=deleting.Deleting", "hydra.run.dir=run", "evaluate.every_steps=2",
    )  # fmt: skip
    assert result.status == 0, result.err
    train = [line["global_step"] for line in result.metrics if line["split"] == "train"]
    assert train == _steps(workdir / "run", "csv") == _steps(workdir / "run", "tensorboard") == [1, 2, 3, 4, 5, 6]
    log = (workdir / "run" / "run.log").read_text()
    assert log.count("was deleted or replaced") == len(
        ["metrics.jsonl", "train.csv", "val.csv", "tensorboard", "run.log"]
    )
    assert "step 1/6" in log
