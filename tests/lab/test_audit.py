"""`audit` trains twice and finds the first step and the first tensor that differ, and nothing where there is nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some

from runner.lab.audit import amount_of, same
from runner.verbs._table import VERBS

QUICK = ("audit", "threads=1", "data.batch_size=32", "steps=2")
OWN = (*QUICK, "model={_target_: audit_faults.Net}")


@pytest.fixture
def audit(
    run: Callable[..., Any], short_runs_forked: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)

    def call(*words: str) -> dict[str, Any]:
        result = run(*words, "json=true")
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
        *(1, 2),
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
            "model.middle=forward",
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("vary=data.workers:0,2",), ("vary.data.workers: varies what is not a key", "data.num_workers")),
        (("vary=threads:1,2,3",), ("vary.threads: has 3 values, but there are two sides", "vary=threads:A,B")),
        (("vary=data.batch_size:0",), ("vary: data.batch_size=0 cannot be run", "a whole number of at least 1")),
        (("a=one.pt",), ("b: is missing, and a is given", "b=PATH")),
        (("a=one.pt", "b=two.pt", "vary=seed:1"), ("vary: has no effect on checkpoints",)),
        (("a=one.pt", "b=two.pt"), ("a: there is no one.pt",)),
        (("steps=0",), ("steps: cannot be 0",)),
        (("threads=1", "steps=1", "data.batch_size=32", "data.root=nowhere", "data=image_folder"), ("data.root",)),
    ],
)
def test_a_mistake_is_a_sentence(run: Callable[..., Any], words: tuple[str, ...], told: tuple[str, ...]) -> None:
    result = run("audit", *words)
    assert result.status == 2
    assert "Traceback" not in result.err
    assert all(text in result.err for text in told), result.err


def test_the_short_form_of_vary_is_spelled_out_before_hydra_sees_a_sweep() -> None:
    words = ["vary=data.num_workers:0,2", "+vary=amp:bf16", "vary={seed: 1}", "seed=1"]
    assert VERBS["audit"].expand_shorthand(words) == [
        "vary.data.num_workers=[0,2]",
        "vary.amp=bf16",
        "vary={seed: 1}",
        "seed=1",
    ]


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
