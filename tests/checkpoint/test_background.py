"""Checkpoints that a thread writes, and the room that they need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint.background import Background, Snapshot
from runner.checkpoint.file import read
from runner.checkpoint.space import require_space, scarce, size_of
from runner.config.errors import UserError

SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=3",
    "model=small_cnn", "model.width=4", "model.dropout=0.3", "transform=strong", "evaluate.test=false",
    "checkpoint.min_seconds=0", "checkpoint.every_steps=1", "checkpoint.keep=50",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.train.learning_curves", lambda *_: None)


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


def test_what_may_be_copied_later_is_copied_when_the_snapshot_is_finished() -> None:
    weight, buffer, snapshot = torch.ones(3), torch.ones(3), Snapshot()
    copy = snapshot.take({"model": {"weight": weight, "mean": buffer}}, lambda place: place == "/model/weight")
    assert not snapshot.complete.is_set()
    buffer.fill_(2)
    snapshot.finish()
    assert snapshot.complete.is_set()
    assert torch.equal(copy["model"]["weight"], weight)
    assert torch.equal(copy["model"]["mean"], torch.ones(3))


@pytest.mark.parametrize("words", [(), ("amp=fp16",), ("optimizer=rmsprop",), ("compile=step",)], ids=str)
def test_an_update_waits_until_the_weights_before_it_are_copied(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    plain = train(*SMALL, *words, "max_steps=5")
    finish = Snapshot.finish

    def slow(self: Snapshot) -> None:
        time.sleep(0.3)
        finish(self)

    monkeypatch.setattr(Snapshot, "finish", slow)
    other = train(*SMALL, *words, "max_steps=5", "checkpoint.async=true")
    for path in (plain.directory / "checkpoints").iterdir():
        assert same(read(path)["model"], read(other.directory / "checkpoints" / path.name)["model"]), path.name
        assert same(read(path)["optimizer"], read(other.directory / "checkpoints" / path.name)["optimizer"]), path.name


def test_work_is_done_in_order_and_its_errors_are_raised_where_the_program_looks() -> None:
    background, done, go = Background(), [], threading.Event()

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


def test_a_run_that_saves_in_the_background_writes_the_same_checkpoints(train: Callable[..., Any]) -> None:
    plain = train(*SMALL)
    other = train(*SMALL, "checkpoint.async=true")
    assert plain.summary["weights_sha256"] == other.summary["weights_sha256"]
    names = sorted(path.name for path in (plain.directory / "checkpoints").iterdir())
    assert names == sorted(path.name for path in (other.directory / "checkpoints").iterdir())
    assert len(names) > 15
    for name in names:
        left, right = (read(result.directory / "checkpoints" / name) for result in (plain, other))
        for key in ("model", "optimizer", "position", "rng", "scheduler"):
            assert same(left[key], right[key]), (name, key)


@pytest.mark.parametrize("name", ["step_0000000007.pt", "best.pt"])
def test_what_was_saved_in_the_background_resumes_to_the_same_bits(train: Callable[..., Any], name: str) -> None:
    whole = train(*SMALL, "checkpoint.async=true")
    rest = train(f"ckpt_path={whole.directory / 'checkpoints' / name}")
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_failure_in_the_background_ends_the_run_with_a_sentence(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.checkpoint import file

    write = file.write

    def full(path: Path, contents: dict[str, Any]) -> None:
        if contents["position"]["global_step"] >= 5:
            raise UserError(f"checkpoint: cannot write {path}: no space left on device")
        write(path, contents)

    monkeypatch.setattr("runner.checkpoint.keeper.file.write", full)
    result = run("train", "threads=1", "logger=none", "log.progress=false", *SMALL, "checkpoint.async=true")
    assert result.status == 2
    assert "no space left" in result.err
    assert "Traceback" not in result.err
    assert result.summary["status"] == "failed"
    assert read(result.directory / "checkpoints" / "last.pt")["position"]["global_step"] == 4


def test_the_newest_goes_before_older_ones_only_once_it_was_read_back_whole(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.checkpoint import file

    write = file.write

    def damaging(path: Path, contents: dict[str, Any]) -> None:
        write(path, contents)
        if contents["position"]["global_step"] == 5:
            content = bytearray(path.read_bytes())
            content[100] ^= 1
            path.write_bytes(content)

    monkeypatch.setattr("runner.checkpoint.keeper.file.write", damaging)
    result = run("train", "threads=1", "logger=none", "log.progress=false", *SMALL, "checkpoint.keep=1")
    assert result.status == 2
    assert "do not fit its checksum" in result.err
    assert read(result.directory / "checkpoints" / "last.pt")["position"]["global_step"] == 4


def test_the_size_counts_every_storage_once() -> None:
    weight = torch.zeros(10, 10)
    assert size_of({"a": weight, "b": [weight[0], torch.zeros(5, dtype=torch.float64)], "c": 3}) == 400 + 40


def test_too_little_room_is_a_sentence_before_anything_is_written(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.checkpoint.space._free", lambda folder: 1000)
    result = run("train", "threads=1", "logger=none", "log.progress=false", *SMALL)
    assert result.status == 2
    assert "MiB free" in result.err
    assert "output_root" in result.err
    assert list((result.directory / "checkpoints").iterdir()) == []
    assert not result.metrics


def test_room_is_judged_by_what_is_free(tmp_path: Path) -> None:
    require_space(tmp_path, 1000)
    with pytest.raises(UserError, match="allowed: free some space"):
        require_space(tmp_path, 2**60)
    assert scarce(tmp_path, 1000, keep=2) == ""
    assert "up to 4 of" in scarce(tmp_path, 2**60, keep=2)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(one, other) for one, other in zip(left, right, strict=True))
    return bool(left == right)
