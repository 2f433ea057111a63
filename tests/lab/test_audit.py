"""`audit` finds what does not repeat, names it, and says why; and it finds nothing where there is nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some

from runner.checkpoint import file
from runner.lab.audit.side import Side
from runner.verbs._table import VERBS

QUICK = ("audit", "threads=1", "data.batch_size=32", "steps=2", "json=true")
OWN = (*QUICK, "model={_target_: audit_faults.Net}")


@pytest.fixture
def audit(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, "audit_faults", raising=False)

    def call(*words: str) -> dict[str, Any]:
        result = run(*words)
        assert result.status in (0, 1), result.err
        found = json.loads(result.out)
        assert result.status == (0 if found["same"] else 1)
        return found  # type: ignore[no-any-return]

    return call


@pytest.mark.parametrize(
    "words",
    some(
        [
            (),
            ("vary=data.placement:ram,disk",),
            ("data.placement=disk", "vary=data.num_workers:0,2"),
            ("data.placement=disk", "data.num_workers=1", "vary=data.prefetch:1,8"),
            ("accumulate=2", "amp=bf16", "vary=log.every_steps:1"),
            ("amp=fp16", "activation_checkpointing=false", "vary.activation_checkpointing=true"),
        ],
        *(0, 2, 4),
    ),
    ids=lambda words: " ".join(words) or "twice the same",
)
def test_what_promises_the_same_bits_has_them(audit: Callable[..., Any], words: tuple[str, ...]) -> None:
    found = audit(*QUICK, *words)
    assert found["same"]
    assert found["steps"] == 2
    assert found["values"] > 200
    assert found["difference"] is None


def test_a_module_that_draws_from_what_is_seeded_repeats_dropout_too(audit: Callable[..., Any]) -> None:
    assert audit(*OWN, "model.middle=seeded", "data.placement=disk", "vary=data.num_workers:0,1")["same"]


def test_a_module_with_a_generator_of_its_own_is_named_and_nothing_before_it_differs(audit: Callable[..., Any]) -> None:
    found = audit(*OWN, "model.middle=forward")
    first = found["difference"]
    assert (first["step"], first["phase"], first["name"]) == (1, "activation", "middle.1")
    assert first["a"] == first["b"] == "(32, 16) float32"
    assert 0 < first["amount"]["differing"] <= first["amount"]["elements"] == 32 * 16
    assert 0 < first["amount"]["relative"] < 0.01 < 1
    assert first["amount"]["largest"] > 0
    assert "middle.1 (Restless) returns another output" in found["cause"]["text"]
    assert "its own generator" in found["cause"]["text"]
    assert "deterministic=true" in found["cause"]["remedy"]
    assert found["differing"]["batch"]["differ"] == found["differing"]["generator before forward"]["differ"] == 0
    assert found["differing"]["loss"] == {"differ": 1, "of": 1}


@pytest.mark.parametrize(
    ("fault", "phase", "name", "who"),
    [
        ("model.middle=backward", "gradient of activation", "middle.0", "the backward of middle.1 (RestlessBackward)"),
        ("model.fault=hook", "gradient", "stem.1.weight", "a hook on stem.1.weight"),
        ("model.fault=weights", "start", "head.bias", "head (Linear) draws them from its own generator"),
        ("optimizer={_target_: audit_faults.Perturbed, lr: 0.1}", "weight", "stem.1.weight", "the optimizer's step"),
    ],
)
def test_what_does_not_repeat_after_forward_or_before_it_is_named(
    audit: Callable[..., Any], fault: str, phase: str, name: str, who: str
) -> None:
    found = audit(*OWN, fault)
    assert (found["difference"]["phase"], found["difference"]["name"]) == (phase, name)
    assert who in found["cause"]["text"]
    earlier = list(found["differing"])
    assert all(found["differing"][part]["differ"] == 0 for part in earlier[: earlier.index(phase)])


FLIP = "{_target_: runner.data.transforms.augment.RandomFlip}"


@pytest.mark.parametrize(
    ("word", "who"),
    [
        ("sample_train=[{_target_: audit_faults.OwnGenerator}]", "OwnGenerator (transform.sample_train.0)"),
        (
            f"train=[{FLIP}, {{_target_: audit_faults.OwnGeneratorOfBatches}}]",
            "OwnGeneratorOfBatches (transform.train.1)",
        ),
    ],
    ids=["of samples", "of batches"],
)
def test_a_transform_with_a_generator_of_its_own_is_named(audit: Callable[..., Any], word: str, who: str) -> None:
    found = audit(*QUICK, f"transform.{word}")
    assert (found["difference"]["phase"], found["difference"]["name"]) == ("batch", "images")
    said = f"{who} returns another result each time it is called with the same sample"
    assert found["cause"]["text"].startswith(said)


@pytest.mark.parametrize("workers", some(["0,2", "1,2"], 1))
def test_an_augmentation_seeded_by_the_worker_is_found(audit: Callable[..., Any], workers: str) -> None:
    words = ("transform.sample_train=[{_target_: audit_faults.ByWorker}]", "data.placement=disk")
    found = audit(*QUICK, *words, f"vary=data.num_workers:{workers}")
    assert (found["difference"]["phase"], found["difference"]["name"]) == ("batch", "images")
    assert "depends on the worker process" in found["cause"]["text"]
    assert "get_worker_info" in found["cause"]["remedy"]
    assert audit(*QUICK, *words, "vary=data.num_workers:0,0")["same"], "it repeats in one process"


def test_a_key_that_may_change_bits_is_said_to_be_expected(audit: Callable[..., Any]) -> None:
    rounded = audit(*QUICK, "vary=amp:bf16")
    assert rounded["vary"] == {"amp": [False, "bf16"]}
    assert rounded["difference"]["phase"] == "activation"
    assert rounded["cause"]["text"] == "amp changes how numbers are rounded, so this is expected"
    learned = audit(*QUICK, "vary=seed:0,1")
    assert learned["difference"]["phase"] == "start"
    assert learned["cause"]["text"] == "seed changes what is learned, so this is expected"


@pytest.mark.extended
def test_steps_go_on_from_a_checkpoint_and_end_with_the_run(
    audit: Callable[..., Any], train: Callable[..., Any]
) -> None:
    directory = train("epochs=1", "max_steps=7", "checkpoint.every_steps=5", "data.batch_size=32").directory
    checkpoint = directory / "checkpoints" / "step_0000000005.safetensors"
    found = audit("audit", "json=true", f"ckpt_path={checkpoint}", "steps=9")
    assert found["same"]
    assert found["steps"] == 2
    assert found["notes"] == ["2 steps instead of 9: the run ends there"]


@pytest.mark.extended
def test_a_step_that_the_run_had_to_leave_out_is_left_out(audit: Callable[..., Any], train: Callable[..., Any]) -> None:
    directory = train("epochs=1", "max_steps=7", "checkpoint.every_steps=5", "data.batch_size=32").directory
    whole = directory / "checkpoints" / "step_0000000005.safetensors"
    contents = file.read(whole)
    contents["position"]["skipped_steps"] = [6]
    lacking = whole.with_name("lacking.pt")
    file.write(lacking, contents)
    counts = [audit("audit", "json=true", f"ckpt_path={path}", "steps=1")["values"] for path in (whole, lacking)]
    assert counts[0] - counts[1] == 15 + 1 + 15 + 11, "no activations, no loss, no gradients of these and of parameters"


def test_modules_of_a_compiled_model_are_not_looked_into(
    audit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = audit(*QUICK)
    monkeypatch.setattr(Side, "compiled", True)
    found = audit(*QUICK)
    assert found["same"]
    assert found["notes"] == ["activations are skipped: a compiled model cannot be observed"]
    assert whole["values"] - found["values"] == 2 * (15 + 15)


def test_two_sides_that_do_not_fit_into_the_memory_are_a_sentence(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(side: Side) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Side, "step", no_room)
    result = run(*QUICK)
    assert result.status == 2
    assert "data.batch_size: there is not enough memory for batches of 32" in result.err


def test_what_people_are_shown(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, "audit_faults", raising=False)
    words = [word for word in OWN if word != "json=true"]
    quiet = run(*words)
    assert quiet.status == 0
    assert "no difference in 2 steps: " in quiet.out
    told = run(*words, "model.middle=forward")
    assert told.status == 1
    for text in (
        "first difference: step 1, activation middle.1",
        "elements that differ",
        "likely cause: middle.1 (Restless)",
    ):
        assert text in told.out
    assert "what helps: draw from random, numpy.random" in told.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("vary=data.workers:0,2",), ("vary.data.workers: varies what is not a key", "data.num_workers")),
        (("vary=threads:1,2,3",), ("vary.threads: has 3 values, but there are two sides", "vary=threads:A,B")),
        (("vary=data.batch_size:0",), ("vary: data.batch_size=0 cannot be run", "a whole number of at least 1")),
        (("a=one.pt",), ("b: is missing, and a is given", "b=PATH")),
        (("a=one.pt", "b=two.pt", "vary=seed:1"), ("vary: has no effect on checkpoints",)),
        (("a=one.pt", "b=two.pt"), ("there is no one.pt",)),
        (("steps=0",), ("steps: cannot be 0",)),
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


def test_a_sweep_of_audits_goes_on_after_a_difference(run: Callable[..., Any]) -> None:
    result = run("audit", "--multirun", "threads=1", "steps=1", "data.batch_size=32", "vary.seed=0,1")
    assert result.status == 0, result.err
    assert "no difference in 1 step:" in result.out
    assert "first difference: before the first step, start" in result.out
