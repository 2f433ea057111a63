"""Checkpoints that a thread writes, and the room that they need."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from nested import equal

from runner.base.errors import UserError
from runner.checkpoint import file
from runner.checkpoint.async_writer import AsyncWriter, Snapshot
from runner.checkpoint.file import read
from runner.checkpoint.manager import require_space, scarce, size_of

SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=3",
    "model=small_cnn", "model.width=4", "model.dropout=0.3", "transform=strong", "evaluate.test=false",
    "checkpoint.min_seconds=0", "checkpoint.every_steps=1", "checkpoint.keep=50",
)  # fmt: skip
TRAIN = ("train", "threads=1", "logger=none", "log.progress=false", "log.curves=false", *SMALL)


def test_a_snapshot_is_left_alone_by_what_happens_later_and_uses_its_memory_again() -> None:
    weight, snapshot = torch.ones(3, 2).t(), Snapshot()
    first = snapshot.take({"model": {"weight": weight}, "list": [1, {"epoch": 2}]})
    weight.fill_(5)
    assert torch.equal(first["model"]["weight"], torch.ones(2, 3))
    assert first["model"]["weight"].stride() == weight.stride()
    assert first["list"] == [1, {"epoch": 2}]
    second = snapshot.take({"model": {"weight": weight}})
    assert second["model"]["weight"].data_ptr() == first["model"]["weight"].data_ptr()
    assert torch.equal(second["model"]["weight"], weight)
    third = snapshot.take({"model": {"weight": torch.zeros(4)}})
    assert torch.equal(third["model"]["weight"], torch.zeros(4))


def test_tied_tensors_are_copied_once_and_stay_tied() -> None:
    weight, snapshot = torch.ones(3), Snapshot()
    for _ in range(2):
        copy = snapshot.take({"embedding": weight, "decoder": weight, "other": torch.ones(3)})
        assert copy["embedding"] is copy["decoder"] is not copy["other"]


def test_what_may_be_copied_later_is_copied_when_the_snapshot_is_finished() -> None:
    weight, buffer, snapshot = torch.ones(3), torch.ones(3), Snapshot()
    copy = snapshot.take({"model": {"weight": weight, "mean": buffer}}, lambda place: place == "/model/weight")
    assert not snapshot.complete.is_set()
    buffer.fill_(2)
    snapshot.finish()
    assert snapshot.complete.is_set()
    assert torch.equal(copy["model"]["weight"], weight)
    assert torch.equal(copy["model"]["mean"], torch.ones(3))


@pytest.mark.parametrize(
    "words", some([(), ("amp=fp16", "ema=0.9"), ("optimizer=rmsprop",), ("compile=step",)], 0, 1), ids=str
)
def test_a_run_that_saves_in_the_background_writes_the_same_checkpoints(
    train: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    plain = train(*SMALL, *words, "max_steps=9")
    finish = Snapshot.finish

    def slow(self: Snapshot) -> None:  # an update waits until the weights before it are copied
        time.sleep(0.1)
        finish(self)

    monkeypatch.setattr(Snapshot, "finish", slow)
    other = train(*SMALL, *words, "max_steps=9", "checkpoint.async=true")
    folders = [result.directory / "checkpoints" for result in (plain, other)]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert len(names[0]) > 10
    for name in names[0]:
        left, right = (read(folder / name) for folder in folders)
        for key in ("model", "optimizer", "position", "rng", "scheduler", "averaged", "scaler"):
            assert equal(left[key], right[key]), (name, key)


def test_work_is_done_in_order_and_its_errors_are_raised_where_the_program_looks() -> None:
    background, done, go = AsyncWriter(), [], threading.Event()

    def fails() -> None:
        go.wait()
        raise UserError("no space")

    background.start(lambda: done.append(1))
    background.start(fails)
    background.check()
    assert done == [1]
    go.set()
    with pytest.raises(UserError, match="no space"):
        background.start(lambda: done.append(2))
    background.wait()
    assert done == [1]


def test_a_failure_in_the_background_ends_the_run_with_a_sentence(
    rejected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = file.write

    def full(path: Path, contents: dict[str, Any]) -> None:
        if contents["position"]["global_step"] >= 5:
            raise UserError(f"checkpoint: cannot write {path}: no space left on device")
        write(path, contents)

    monkeypatch.setattr("runner.checkpoint.manager.file.write", full)
    result = rejected(*TRAIN, "checkpoint.async=true")
    assert "no space left" in result.err
    assert result.summary["status"] == "failed"
    assert read(result.directory / "checkpoints" / "last.safetensors")["position"]["global_step"] == 4


def test_the_newest_goes_before_older_ones_only_once_it_was_read_back_whole(
    rejected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = file.write

    def damaging(path: Path, contents: dict[str, Any]) -> None:
        write(path, contents)
        if contents["position"]["global_step"] == 5:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    monkeypatch.setattr("runner.checkpoint.manager.file.write", damaging)
    result = rejected(*TRAIN, "checkpoint.keep=1")
    assert "do not match its checksum" in result.err
    assert read(result.directory / "checkpoints" / "last.safetensors")["position"]["global_step"] == 4


def test_too_little_room_is_a_sentence_before_anything_is_written(
    rejected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.checkpoint.manager._free", lambda folder: 1000.0)
    result = rejected(*TRAIN)
    assert "MiB free" in result.err
    assert "output_root" in result.err
    assert list((result.directory / "checkpoints").iterdir()) == []
    assert not result.metrics


def test_room_is_judged_by_what_is_free(tmp_path: Path) -> None:
    weight = torch.zeros(10, 10)
    assert (
        size_of({"a": weight, "b": [weight, torch.zeros(5, dtype=torch.float64)], "c": 3}) == 400 + 40
    )  # tied ones once
    require_space(tmp_path, 1000)
    with pytest.raises(UserError, match="allowed: free some space"):
        require_space(tmp_path, 2**60)
    assert scarce(tmp_path, 1000, keep=2) == ""
    assert "up to 4 of" in scarce(tmp_path, 2**60, keep=2)


def test_containers_are_copied_as_what_they_are() -> None:
    value = {"a": OrderedDict(x=1), "b": Counter("aab"), "c": {1, 2}, "d": bytearray(b"xy"), "e": (1, [2])}
    copy = Snapshot().take(value)
    assert copy == value
    assert [type(copy[key]) for key in value] == [type(value[key]) for key in value]
    value["c"].add(3)
    value["d"][0] = 0
    value["a"]["x"] = 5
    assert (copy["c"], copy["d"], copy["a"]["x"]) == ({1, 2}, b"xy", 1)


INFINITE = """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self, in_channels: int, image_size: tuple[int, int], num_classes: int):
        super().__init__()
        self.layer = nn.Linear(in_channels * image_size[0] * image_size[1], num_classes)
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))

    def forward(self, images):
        return self.layer(images.flatten(1))

class Fail:
    def __init__(self, step: int = 17): self.step = step
    def on_step(self, loop):
        if loop.state.position.global_step == self.step: raise RuntimeError("a bug")
"""


@pytest.fixture
def own(own_module: Any) -> None:
    own_module("own", INFINITE)


@pytest.mark.usefixtures("own")
def test_a_buffer_that_is_infinite_by_design_is_saved(train: Any) -> None:
    words = [word for word in SMALL if not word.startswith("model.")]
    own = ("model._target_=own.Masked", "~model.width", "~model.dropout", "+model.image_size=null")
    result = train(*words, *own)
    assert read(result.directory / "checkpoints" / "last.safetensors")["model"]["mask"].isinf().any()


@pytest.mark.extended
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("background", [False, True])
def test_a_best_state_that_was_put_off_is_kept_when_the_run_fails(run: Any, background: bool) -> None:
    words = (
        "checkpoint.min_seconds=1000",
        "checkpoint.every_steps=null",
        f"checkpoint.async={str(background).lower()}",
    )
    result = run(*TRAIN, *words, "+callbacks.fail._target_=own.Fail")
    assert result.status == 1
    best = read(result.directory / "checkpoints" / "best.safetensors")
    assert best["position"]["global_step"] in (6, 12)
    assert best["metrics"]["best"]["global_step"] == best["position"]["global_step"]


@pytest.mark.extended
def test_going_on_from_an_older_checkpoint_makes_it_the_last(run: Any, train: Any, train_once: Any, own: None) -> None:
    whole = train_once(*SMALL)
    digest = whole.summary["weights_sha256"]
    older = whole.directory / "checkpoints" / "step_0000000007.safetensors"
    words = (f"ckpt_path={older}", f"hydra.run.dir={whole.directory}", "+callbacks.fail._target_=own.Fail")
    assert run("train", *words, "+callbacks.fail.step=8", "checkpoint.every_steps=1000", "threads=1").status == 1
    assert read(whole.directory / "checkpoints" / "last.safetensors")["position"]["global_step"] == 7
    rest = train(f"ckpt_path={whole.directory}")
    assert rest.summary["weights_sha256"] == digest
