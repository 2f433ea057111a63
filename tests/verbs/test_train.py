"""What a run leaves behind: everything that the design lists, whatever way it ended."""

from __future__ import annotations

import gc
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from runner.checkpoint.file import KEYS, read
from runner.checkpoint.weights import weights_sha256
from runner.run.directory import hold

SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=2", "model=mlp",
    "model.hidden=[16]", "transform=standard",
)  # fmt: skip


def test_curves_are_drawn_unless_they_are_not_wanted(run: Any) -> None:
    quick = ("train", *SMALL, "threads=1", "logger=none", "epochs=1")
    drawn = [
        (run(*quick, f"log.curves={word}").directory / "plots" / "curves.png").is_file() for word in ("true", "false")
    ]
    assert drawn == [True, False]
    first = run(*quick).directory
    assert run("train", f"ckpt_path={first}", f"hydra.run.dir={first}", "epochs=2", "log.curves=false").status == 0
    assert not (first / "plots" / "curves.png").exists(), "of the first part only"


def test_a_run_leaves_everything_that_the_design_lists(accepted: Any, workdir: Path) -> None:
    result = accepted("train", *SMALL, "threads=1", "log.every_steps=4", "name=mine", "seed=3")
    directory = result.directory
    assert directory.parent == Path("outputs/mine")
    names = {path.name for path in directory.iterdir()}
    assert names >= {"config.yaml", "overrides.yaml", "environment.json", "run.log", "metrics.jsonl", "summary.json",
                     "checkpoints", "plots", "tensorboard"}  # fmt: skip
    checkpoints = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert {"last.safetensors", "best.safetensors"} < set(checkpoints)
    assert (directory / "plots" / "curves.png").stat().st_size > 1000
    assert list((directory / "tensorboard").iterdir())

    summary = result.summary
    assert set(summary) >= {"status", "error", "best", "last", "test", "global_step", "weights_sha256", "resumed_from",
                            "wall_s"}  # fmt: skip
    assert (summary["status"], summary["error"], summary["resumed_from"]) == ("finished", None, None)
    assert summary["global_step"] == 12
    assert set(summary["test"]) == {"loss", "accuracy"}
    last = read(directory / "checkpoints" / "last.safetensors")
    assert set(last) == set(KEYS)
    assert summary["weights_sha256"] == weights_sha256(last["model"])

    assert all({"global_step", "epoch", "split"} <= set(record) for record in result.metrics)
    train = [(m["global_step"], m["epoch"]) for m in result.metrics if m["split"] == "train"]
    assert train == [(4, 1), (8, 2), (12, 2)]
    assert [m["global_step"] for m in result.metrics if m["split"] == "val"] == [6, 12]
    evaluated = [m["loss"] for m in result.metrics if m["split"] == "val"]
    assert evaluated[-1] == summary["last"]["loss"], "numbers are in full"

    config = yaml.safe_load((directory / "config.yaml").read_text())
    assert config == yaml.safe_load(last["config"])
    assert (config["seed"], config["model"]["hidden"], config["model"]["in_channels"]) == (3, [16], 3)
    assert len(config["data"]["normalize"]["mean"]) == 3
    overrides = yaml.safe_load((directory / "overrides.yaml").read_text())
    assert "seed=3" in overrides
    assert torch.__version__.split("+")[0] in (directory / "environment.json").read_text()
    assert "finished" in summary["status"]


def test_a_full_disk_is_a_sentence_and_the_last_line_is_the_directory(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = os.fsync, [0]

    def failing(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name.startswith(".step_"):
            count[0] += 1
            if count[0] == 2:
                raise OSError(28, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    words = ("threads=1", "logger=none", "evaluate.test=false", "checkpoint.min_seconds=0")
    result = run("train", *SMALL, *words)
    assert result.status == 1, result.err
    assert "No space left on device" in result.err
    assert "Traceback" not in result.err
    assert result.summary["status"] == "failed"
    assert read(result.directory / "checkpoints" / "last.safetensors")["position"]["global_step"] == 6
    assert not list(result.directory.rglob("*.tmp"))


def test_a_run_that_ended_before_its_first_checkpoint_is_not_offered_for_resuming(killed: Any, rejected: Any) -> None:
    directory = killed(1, *SMALL)
    assert not list((directory / "checkpoints").iterdir())
    for more in ((), ("resume=auto", "epochs=3")):
        error = rejected("train", *SMALL, f"hydra.run.dir={directory}", *more).err
        assert "allowed: " in error
        assert "another folder" in error
        assert "ckpt_path=" not in error


def test_early_stopping_watches_its_metric_in_the_direction_that_is_better(train: Any) -> None:
    # The loss falls throughout, while the best evaluation is that with the largest accuracy.
    words = ("callbacks=early_stopping", "callbacks.early_stopping.monitor=loss", "callbacks.early_stopping.patience=1")
    result = train(*SMALL, *words, "optimizer.lr=0.002", "evaluate.test=false", "epochs=5")
    losses = [record["loss"] for record in result.metrics if record["split"] == "val"]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 5


def test_the_largest_seed_works(train: Any) -> None:
    assert train(*SMALL, f"seed={2**64 - 1}", "max_steps=1", "evaluate.test=false").summary["global_step"] == 1


def test_resuming_with_nothing_left_to_do_says_so_and_can_itself_be_resumed(train: Any) -> None:
    first = train(*SMALL, "epochs=3")
    again = train(f"ckpt_path={first.directory}", "epochs=2")
    assert "nothing left to train" in again.out
    assert again.summary["weights_sha256"] == first.summary["weights_sha256"]
    assert (again.directory / "checkpoints" / "last.safetensors").is_file()


def test_a_size_that_the_data_set_does_not_take_is_a_warning(train: Any, run: Any) -> None:
    unchanged = "transform.sample_eval=[{_target_: torchvision.transforms.v2.RandomHorizontalFlip, p: 0.0}]"
    assert "data.image_size=16 has no effect" in train("data.image_size=16", "debug=smoke", unchanged).out
    trained = train("data.image_size=16", "debug=smoke")
    assert "data.image_size=16 has no effect" in trained.out
    done = run("predict", f"ckpt_path={trained.directory}", "input=test", "data.image_size=24")
    assert "data.image_size=24 has no effect" in done.out + done.err


def test_the_environment_records_the_command_as_it_was_typed(spawn: Any) -> None:
    done = spawn("train", "+amp=true", "debug=smoke", "threads=1", "logger=none")
    environment = json.loads((Path(done.stdout.splitlines()[-1]) / "environment.json").read_text())
    assert environment["command"][-5:] == ["train", "+amp=true", "debug=smoke", "threads=1", "logger=none"]


def test_another_target_on_the_line_drops_the_facts_that_it_does_not_take(train: Any) -> None:
    layers = "[{_target_: torch.nn.Flatten}, {_target_: torch.nn.Linear, in_features: 64, out_features: 10}]"
    words = ("model._target_=torch.nn.Sequential", f"model._args_={layers}", "~model.width", "~model.dropout")
    assert "Sequential, 650 parameters" in train(*words, "debug=smoke").out


def test_another_batch_size_from_an_epochs_end_on_still_trains_every_epoch(train: Any, train_once: Any) -> None:
    first = train_once(*SMALL, "evaluate.test=false")
    for size in (4, 32):
        again = train(f"ckpt_path={first.directory}", "epochs=4", f"data.batch_size={size}")
        assert "data.batch_size" in again.out
        epochs = [line["epoch"] for line in again.metrics if line["split"] == "val"]
        assert epochs == [1, 2, 3, 4]


def test_a_directory_is_written_by_its_own_run_and_by_one_process(train_once: Any, spawn: Any, rejected: Any) -> None:
    first = train_once(*SMALL, "evaluate.test=false")
    held = hold(first.directory)
    before = {path: path.stat().st_mtime_ns for path in first.directory.rglob("*")}
    assert "already holds a run" in rejected("train", *SMALL, f"hydra.run.dir={first.directory}").err
    second = spawn("train", f"ckpt_path={first.directory}", f"hydra.run.dir={first.directory}", "epochs=9")
    assert second.returncode == 2
    assert "is being written by process" in second.stderr
    assert {path: path.stat().st_mtime_ns for path in first.directory.rglob("*")} == before
    os.close(held)
    third = spawn("train", f"ckpt_path={first.directory}", f"hydra.run.dir={first.directory}", "epochs=3")
    assert third.returncode == 0, third.stderr


BAD_LOGGER = """
class Bad:
    def open(self, directory, resume_step): raise RuntimeError("no open")
    def log(self, split, metrics, global_step, epoch): raise ValueError("no log")
    def flush(self): raise OSError("no flush")
    def close(self): raise ValueError("no close")
    def finish(self): raise ValueError("no finish")
"""


def test_a_logger_whose_methods_raise_costs_a_warning_each(accepted: Any, own_module: Any) -> None:
    own_module("bad_logger", BAD_LOGGER)
    result = accepted("train", *SMALL, "threads=1", "logger=none", "+logger.bad._target_=bad_logger.Bad")
    for method in ("open", "log", "flush", "close", "finish"):
        [line] = [
            each for each in (result.out + result.err).splitlines() if f"warning: logger.bad: {method} raised " in each
        ]
        assert re.search(r"\(bad_logger.py:\d\); the run continues", line)


def test_a_second_run_in_a_process_does_not_keep_the_objects_of_the_first(train: Any) -> None:
    train("max_steps=1")
    before = gc.get_freeze_count()
    train("max_steps=1")
    assert 0 < gc.get_freeze_count() <= before
