"""`audit a= b=` compares what two runs have saved and logged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint import file

SHORT = ("epochs=1", "limit.train_batches=4", "log.every_steps=1", "evaluate.test=false", "checkpoint.every_steps=3")


@pytest.fixture
def compared(run: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def call(a: Path | str, b: Path | str) -> dict[str, Any]:
        result = run("audit", f"a={a}", f"b={b}", "json=true")
        assert result.status in (0, 1), result.err
        found = json.loads(result.out)
        assert result.status == (0 if found["same"] else 1)
        return found  # type: ignore[no-any-return]

    return call


def test_runs_that_only_differ_in_what_changes_no_bit_are_the_same(
    train: Callable[..., Any], train_once: Callable[..., Any], compared: Callable[..., Any], run: Callable[..., Any]
) -> None:
    a = train_once(*SHORT).directory
    b = train(*SHORT, "data.placement=disk", "data.num_workers=1").directory
    found = compared(a, b)
    assert found["same"]
    assert [row[0] for row in found["config"]] == ["data.placement", "data.num_workers"]
    assert found["log_lines"] == 5, "four steps and an evaluation"
    assert found["a"] == str(a / "checkpoints" / "last.safetensors")
    assert found["parts"]["model"] == {"differ": 0, "of": 20}
    shown = run("audit", f"a={a}", f"b={b}")
    assert shown.status == 0
    assert "no difference: both checkpoints of step 4 are the same bits, and so are 5 lines of the logs" in shown.out


@pytest.mark.extended
def test_the_first_step_whose_loss_differs_and_the_first_tensor_are_named(
    train: Callable[..., Any], compared: Callable[..., Any], run: Callable[..., Any]
) -> None:
    a = train(*SHORT, "scheduler=constant").directory
    b = train(*SHORT, "scheduler=constant", "optimizer.lr=0.004").directory
    found = compared(a, b)
    assert found["config"] == [["optimizer.lr", "0.005", "0.004"]]
    first = found["difference"]
    assert (first["phase"], first["name"]) == (
        "model",
        next(iter(file.read(a / "checkpoints" / "last.safetensors")["model"])),
    )
    assert first["amount"]["differing"] > 0
    assert found["step"] == 3, "the first step that both have saved"
    assert found["parts"]["rng"]["differ"] == 0
    log = found["log"]
    assert (log["global_step"], log["split"], log["name"]) == (2, "train", "loss"), (
        "the first step starts from the same weights"
    )
    assert log["a"] != log["b"]
    shown = run("audit", f"a={a}", f"b={b}")
    assert shown.status == 1
    assert "logs differ first at step 2: train loss" in shown.out


def test_one_bit_of_one_tensor_is_found_and_told_by_how_much(
    train_once: Callable[..., Any], compared: Callable[..., Any]
) -> None:
    last = train_once(*SHORT).directory / "checkpoints" / "last.safetensors"
    contents = file.read(last)
    name = list(contents["model"])[3]
    weights = contents["model"][name]
    before = weights.view(-1)[1].clone()
    bits = weights.view(-1).view(torch.int32) if weights.is_floating_point() else weights.view(-1)
    bits[1] ^= 1
    other = last.with_name("other.pt")
    file.write(other, contents)
    found = compared(last, other)
    assert found["parts"]["model"]["differ"] == 1
    assert all(count["differ"] == 0 for part, count in found["parts"].items() if part != "model")
    first = found["difference"]
    assert (first["name"], first["amount"]["differing"]) == (name, 1)
    assert first["amount"]["values"][0] == float(before)
    assert first["amount"]["largest"] == pytest.approx(abs(float(before - weights.view(-1)[1])))
    assert found["log"] is None
    assert found["log_lines"] == 0, "a file stands for itself"


def test_checkpoints_of_different_steps_are_told_as_such(
    train_once: Callable[..., Any], compared: Callable[..., Any]
) -> None:
    folder = train_once(*SHORT).directory / "checkpoints"
    found = compared(folder / "step_0000000003.safetensors", folder / "last.safetensors")
    assert found["difference"]["phase"] == "position"


def test_a_damaged_checkpoint_is_passed_over_and_told(train_once: Callable[..., Any], run: Callable[..., Any]) -> None:
    directory = train_once(*SHORT).directory
    last = directory / "checkpoints" / "last.safetensors"
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.unlink()
    last.write_bytes(bytes(data))
    result = run("audit", f"a={directory}", f"b={directory}")
    assert result.status == 0, result.err
    assert "warning: " in result.out
    assert "the file is damaged" in result.out
