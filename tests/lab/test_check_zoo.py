"""`check` finds each of many faults by the check for it, and none in a training without one."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extended import some

sys.path.insert(0, str(Path(__file__).parent))
import check_photo_zoo
import check_zoo

from runner.lab.check.run import BUILD, CHECKS

HEALTHY = (
    *("threads=1", "device=cpu", "data=digits", "data.dataset={_target_: check_zoo.shapes}", "data.split.val=0.2"),
    *("data.normalize={mean: null, std: null}", "data.batch_size=32", "transform=standard", "epochs=2"),
    "model={_target_: check_zoo.Net, num_classes: null}",
)

PHOTOS = (
    *("threads=1", "device=cpu", "data=digits", "data.dataset={_target_: check_photos.dataset}", "data.split.val=0.2"),
    *("data.normalize={mean: null, std: null}", "data.batch_size=16", "transform=standard", "epochs=6"),
    "model={_target_: check_photo_parts.Net, num_classes: null}",
)
SHIFT = "transform.train=[{_target_: runner.data.transforms.augment.RandomShift, share: 0.125}]"


def _shapes(fault: str) -> str:
    return f"data.dataset={{_target_: check_zoo.shapes, fault: {fault}}}"


OF_DATA = ("data", "labels", "baselines")


@pytest.fixture
def check(composed_check: Callable[..., Any]) -> Callable[..., dict[str, dict[str, Any]]]:
    """The checks by name, of a healthy training and further words."""
    return functools.partial(composed_check, HEALTHY)


def by_name(result: Any) -> dict[str, dict[str, Any]]:
    """The checks by name that a call printed."""
    assert result.status in (0, 1), result.err
    return {each["name"]: each for each in json.loads(result.out)["checks"]}


CASES = check_zoo.CASES + check_photo_zoo.CASES
EACH = [(HEALTHY if case in check_zoo.CASES else PHOTOS, case) for case in CASES]


@pytest.mark.parametrize(
    ("base", "case"),
    some(EACH, *check_zoo.first_of_each(CASES), several=True),
    ids=lambda value: f"{value.fault} {value.check}".replace(" ", "-") if isinstance(value, check_zoo.Case) else "",
)
def test_each_fault_is_found_by_the_check_for_it(
    composed_check: Callable[..., Any], base: tuple[str, ...], case: check_zoo.Case
) -> None:
    (group,) = (each.group for each in (BUILD, *CHECKS) if each.name == case.check)
    # A fault of the images is none of the outputs, unless there can be no batch.
    others = ["outputs"] if base is HEALTHY and group in OF_DATA and case.check != "image-shapes" else []
    made = composed_check(base, *case.words, f"only=[{','.join([case.check, *others])}]")
    assert base is HEALTHY or case.check == "build" or made["build"]["status"] == "pass", made["build"]
    found = made.pop(case.check)
    assert found["status"] in ([case.status] if case.status else ["warn", "fail"]), found
    assert case.evidence in found["evidence"]
    assert found["fix"]
    alarms = [each for each in made.values() if each["group"] in others and each["status"] in ("fail", "warn")]
    assert not alarms


def test_a_loss_without_a_gradient_is_found_where_it_is_built(composed_check: Callable[..., Any]) -> None:
    loss = "loss={_target_: check_photo_parts.Loss, fault: detached}"
    build = composed_check(PHOTOS, loss, "only=[loss-minimum]")["build"]
    assert build["status"] == "fail"
    assert "no gradient" in build["evidence"]


def test_dropout_that_is_always_on_does_not_look_like_samples_that_mix(check: Callable[..., Any]) -> None:
    made = check("model.fault=dropout always on", "only=[outputs]")
    assert [name for name, each in made.items() if each["status"] == "fail"] == ["repeatable-evaluation"]


@pytest.mark.parametrize("words", [(), check_zoo.REGRESSION], ids=["classification", "regression"])
def test_nothing_is_found_where_nothing_is_wrong(accepted: Callable[..., Any], words: tuple[str, ...]) -> None:
    made = by_name(accepted("check", "json=true", *HEALTHY, *words))
    assert not [each for each in made.values() if each["status"] not in ("pass", "skip")]
    assert sum(each["status"] == "pass" for each in made.values()) > 30


PALE = (_shapes("white pages"), SHIFT)
PRETRAINED = "model={_target_: check_zoo.Pretrained, num_classes: null}"
MEANT = {
    "bias of the class shares": (("init=prior_bias", _shapes("common class")), "initial-loss", "the class shares"),
    "statistics of trained weights": (
        (PRETRAINED, "data.normalize={mean: [0.5, 0.5, 0.4], std: [0.25, 0.25, 0.2]}"), "normalization",
        "as the pretrained weights of the model expect",
    ),
    "pixels from 0 to 1": (("data.normalize={mean: [0.0], std: [1.0]}",), "normalization", "nothing is normalized"),
    "augmented white pages": (PALE, "augmentation", "with augmentation"),
    "white pages of one border": (PALE, "batch-repeats", "0% of"),
    "one drawing twice": ((_shapes("one glyph twice"),), "leakage", "1 of 100 of test"),
    "weighted classes": (
        (_shapes("common class"), "loss.class_weights=balanced"), "class-balance", "handled by loss.class_weights",
    ),
    "balanced classes": (
        (_shapes("common class"), "data.sampler=balanced"), "class-balance", "handled by data.sampler=balanced",
    ),
    "faint numbers": (
        (*check_zoo.REGRESSION[:2], _shapes("faint numbers, kind: regression")), "learnable", "standard errors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANT)
def test_what_is_meant_is_no_fault(check: Callable[..., Any], case: str) -> None:
    words, name, evidence = MEANT[case]
    found = check(*words, f"only=[{name}]")[name]
    assert found["status"] == "pass", found
    assert evidence in found["evidence"]


def test_an_error_of_the_model_is_told_and_the_data_are_checked_nevertheless(check: Callable[..., Any]) -> None:
    found = check("model.fault=raises", "only=[data,logits]")
    assert found["build"]["status"] == "fail"
    assert "KeyError: 'raises'" in found["build"]["evidence"]
    assert "HYDRA_FULL_ERROR=1" in found["build"]["fix"]
    assert found["image-range"]["status"] == "pass"
    assert "logits" not in found


def test_an_error_of_the_data_set_is_told(check: Callable[..., Any]) -> None:
    found = check("data.dataset={_target_: check_zoo.shapes, samples: 400, kind: unheard of}", "only=[image-range]")
    assert found["build"]["status"] == "fail"
    assert [*found] == ["build"]


def test_there_are_faults_enough_and_every_check_has_one() -> None:
    assert len({case.fault for case in check_zoo.CASES}) >= 25
    assert len(check_photo_zoo.CASES) >= 80
    assert len(check_photo_zoo.HEALTHY) >= 20
    assert sorted(check_photo_zoo.HEALTHY) == sorted(name for names in check_photo_zoo.COMBINED for name in names)
    # One takes a checkpoint, and faults of samples of any kind are in `test_check_whole.py`
    beside = {"beats-baselines", *(each.name for each in CHECKS if each.group == "samples")}
    assert {case.check for case in CASES} == {"build", *(each.name for each in CHECKS)} - beside
    on_photos = {case.check for case in check_photo_zoo.CASES}
    assert on_photos >= {each.name for each in CHECKS if each.group in ("batches", "settings")}


def test_a_run_is_compared_with_baselines(train: Callable[..., Any], run: Callable[..., Any]) -> None:
    found = {}
    for name, words in {"good": ("epochs=6",), "bad": ("optimizer.lr=1e-12",)}.items():
        trained = train(*HEALTHY, "evaluate.test=false", *words)
        with_run = (f"ckpt_path={trained.directory}", "trust=[check_zoo]", "only=[baselines,initial-loss]")
        found[name] = by_name(run("check", "json=true", *HEALTHY, *with_run))
    assert found["good"]["beats-baselines"]["status"] in ("pass", "warn")
    assert found["bad"]["beats-baselines"]["status"] == "fail"
    assert "most frequent class" in found["bad"]["beats-baselines"]["evidence"]
    assert found["bad"]["initial-loss"]["status"] == "skip", "the weights are not those of a start"


@pytest.mark.parametrize("names", some(check_photo_zoo.COMBINED, 1), ids=", ".join)
def test_healthy_trainings_raise_nothing(composed_check: Callable[..., Any], names: tuple[str, ...]) -> None:
    checks = composed_check(PHOTOS, *(word for name in names for word in check_photo_zoo.HEALTHY[name]))
    assert not [each for each in checks.values() if each["status"] not in ("pass", "skip")]
    assert sum(each["status"] == "pass" for each in checks.values()) > 45


TRAININGS = list(check_photo_zoo.TRAININGS)


@pytest.mark.parametrize("name", some(TRAININGS, TRAININGS.index("mlp, adam")))
def test_a_healthy_training_of_another_kind_raises_nothing(accepted: Callable[..., Any], name: str) -> None:
    skipped = () if name in check_photo_zoo.WHOLE else ("skip=[data,labels,baselines]",)
    checks = by_name(
        accepted("check", "json=true", *check_photo_zoo.SHIPPED, *check_photo_zoo.TRAININGS[name], *skipped)
    )
    assert not {name: each["evidence"] for name, each in checks.items() if each["status"] != "pass" and each["fix"]}


@pytest.mark.parametrize("name", some(check_zoo.TASKS, *range(6)))
def test_a_healthy_task_with_own_steps_raises_nothing(composed_check: Callable[..., Any], name: str) -> None:
    task, data, model, words = check_zoo.TASKS[name]
    parts = {"task": f"healthy_tasks.{task}", "model": f"healthy_tasks.{model}", "data.dataset": data}
    if "." not in data:
        parts["data.dataset"], words = "healthy_tasks.Samples", (*words, f"+data.dataset.kind={data}")
    checks = composed_check((*check_zoo.OWN, *(f"{key}._target_={name}" for key, name in parts.items()), *words))
    assert not {name: each["evidence"] for name, each in checks.items() if each["status"] not in ("pass", "skip")}
    assert sum(each["status"] == "pass" for each in checks.values()) > 20
