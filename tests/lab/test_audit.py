"""`audit` finds the first step and the first tensor that differ, of two runs that it trains or of what others have saved."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some

from runner.checkpoint import file
from runner.lab.audit import amount_of, same

QUICK = ("audit", "threads=1", "data.batch_size=32", "steps=2")
OWN = (*QUICK, "model={_target_: audit_faults.Net}")
SHORT = ("epochs=1", "limit.train_batches=4", "log.every_steps=1", "evaluate.test=false", "checkpoint.every_steps=3")


@pytest.fixture
def audit(
    run: Callable[..., Any], short_runs_forked: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)

    def call(*words: str, **sides: Path) -> dict[str, Any]:
        result = run(*words or ["audit"], *(f"{side}={path}" for side, path in sides.items()), "json=true")
        assert result.status in (0, 1), result.err
        found: dict[str, Any] = json.loads(result.out)
        assert result.status == (0 if found["same"] else 1)
        assert not [*Path("outputs").glob(".audit-*")], "checkpoints of the two runs are deleted"
        return found

    return call


@pytest.mark.parametrize(
    "words",
    some(
        [
            (),
            ("data.placement=disk", "vary=data.num_workers:0,2"),
            ("accumulate=2", "amp=bf16", "vary=data.placement:ram,disk"),
            ("amp=fp16", "vary.activation_checkpointing=true"),
        ],
        2,
    ),
    ids=lambda words: " ".join(words) or "twice the same",
)
def test_settings_that_keep_the_bits_give_no_difference(audit: Callable[..., Any], words: tuple[str, ...]) -> None:
    found = audit(*QUICK, *words)
    assert found["same"]
    assert (found["step"], found["log_lines"], found["difference"]) == (2, 2, None)
    assert sum(part["of"] for part in found["parts"].values()) > 80


@pytest.mark.parametrize(
    "word",
    some(
        [
            "model.restless=true",
            "optimizer={_target_: audit_faults.Perturbed, lr: 0.1}",
            "transform.sample_train=[{_target_: audit_faults.OwnGenerator}]",
        ],
        0,
    ),
)
def test_parts_of_a_run_that_do_not_repeat_are_found(audit: Callable[..., Any], word: str) -> None:
    found = audit(*OWN, word)
    first = found["difference"]
    assert (found["step"], first["phase"], first["name"]) == (1, "model", "stem.1.weight")
    assert first["a"] == first["b"] == "(16, 64) float32"
    assert 0 < first["amount"]["differing"] <= first["amount"]["elements"] == 16 * 64
    assert first["amount"]["largest"] > 0
    assert found["config"] == []


@pytest.mark.extended
def test_a_setting_that_changes_a_later_step_is_found_there_with_its_values(audit: Callable[..., Any]) -> None:
    found = audit(*QUICK, "optimizer=sgd", "steps=4", "vary=freeze:stages@2,stages@3")
    assert found["vary"] == {"freeze": ["stages@2", "stages@3"]}
    assert found["config"] == [["freeze", "stages@2", "stages@3"]]
    assert found["step"] == 3


def test_steps_continue_from_a_checkpoint(
    audit: Callable[..., Any], train: Callable[..., Any], rejected: Callable[..., Any]
) -> None:
    directory = train("epochs=1", "checkpoint.every_steps=5", "max_steps=7", "data.batch_size=32").directory
    checkpoint = directory / "checkpoints" / "step_0000000005.safetensors"
    found = audit("audit", f"ckpt_path={checkpoint}", "steps=9", "vary=log.progress:false,true")
    assert (found["same"], found["step"]) == (True, 7), "the run ends after step 7"
    told = rejected("audit", f"ckpt_path={directory}", "steps=9", "vary=log.progress:false,true").err
    assert "ckpt_path: " in told
    assert "is the end of its run: no step is left to compare" in told


@pytest.mark.extended
def test_the_report_for_people_of_two_processes(run: Callable[..., Any]) -> None:
    told = run(*QUICK, "vary=seed:0,1")
    assert told.status == 1
    for text in (
        "a: seed=0  b: seed=1",
        "first difference: model stages.0.0.weight at step 1",
        "elements that differ",
        "logs differ first at",
    ):
        assert text in told.out, told.out


@pytest.mark.extended
def test_a_sweep_of_audits_continues_after_a_difference(run: Callable[..., Any]) -> None:
    result = run("audit", "--multirun", "threads=1", "steps=1", "data.batch_size=32", "vary.seed=0,1")
    assert result.status == 0, result.err
    assert "no difference: both checkpoints of step 1" in result.out
    assert "first difference: " in result.out


NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, -NAN]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1, 2]), torch.tensor([[1, 2]]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), False),
        (torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64), True),
        (torch.tensor([True]), torch.tensor([False]), False),
        (1, 1.0, False),
        (NAN, NAN, True),
        ([1, "a"], [1, "a"], True),
    ],
    ids=str,
)
def test_values_are_the_same_if_their_bits_are_and_any_nan_is(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal


def test_the_amount_of_a_difference_names_the_first_element_and_the_largest() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    b[1, 0], b[1, 2] = 0.5, -2.0
    found = amount_of(a, b)
    assert found == {
        "elements": 6, "differing": 2, "largest": 2.0, "relative": 1.0, "place": [1, 0], "values": [0.0, 0.5],
    }  # fmt: skip
    assert amount_of(a, torch.full((2, 3), float("inf")))["largest"] is None  # type: ignore[index]
    assert amount_of(a, torch.zeros(3, 2)) is None


def test_runs_that_only_differ_in_what_changes_no_bit_are_the_same(
    train: Callable[..., Any], train_once: Callable[..., Any], audit: Callable[..., Any], run: Callable[..., Any]
) -> None:
    a = train_once(*SHORT).directory
    b = train(*SHORT, "data.placement=disk", "data.num_workers=1").directory
    found = audit(a=a, b=b)
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
    train: Callable[..., Any], audit: Callable[..., Any]
) -> None:
    a = train(*SHORT, "scheduler=constant").directory
    b = train(*SHORT, "scheduler=constant", "optimizer.lr=0.004").directory
    found = audit(a=a, b=b)
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


def test_one_bit_of_one_tensor_is_found_and_told_by_how_much(
    train_once: Callable[..., Any], audit: Callable[..., Any]
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
    found = audit(a=last, b=other)
    assert found["parts"]["model"]["differ"] == 1
    assert all(count["differ"] == 0 for part, count in found["parts"].items() if part != "model")
    first = found["difference"]
    assert (first["name"], first["amount"]["differing"]) == (name, 1)
    assert first["amount"]["values"][0] == float(before)
    assert first["amount"]["largest"] == pytest.approx(abs(float(before - weights.view(-1)[1])))
    assert found["log"] is None
    assert found["log_lines"] == 0, "a file stands for itself"


def test_checkpoints_of_different_steps_are_told_as_such(
    train_once: Callable[..., Any], audit: Callable[..., Any]
) -> None:
    folder = train_once(*SHORT).directory / "checkpoints"
    found = audit(a=folder / "step_0000000003.safetensors", b=folder / "last.safetensors")
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
