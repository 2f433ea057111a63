"""From plain values to the typed config: what is refused, what is said about it, and where it came from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import ConfigError, Problem, nearest
from runner.config import keys
from runner.config.changes import changes_refused
from runner.config.keys import describe
from runner.config.load import resolve_config
from runner.config.schema.train import Train
from runner.config.schema.verbs import Eval
from runner.config.sources import shipped
from runner.config.validate import nodes, typed

NODE = {"_target_": "package.Thing"}
LEAST: dict[str, Any] = {
    "data": {"dataset": NODE},
    **dict.fromkeys(("model", "loss", "task", "optimizer", "scheduler"), NODE),
}


def with_value(key: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(LEAST)
    inner = values
    *parents, last = key.split(".")
    for part in parents:
        inner = inner.setdefault(part, {})
    inner[last] = value
    return values


def problem(key: str, value: Any) -> Problem:
    config, found = typed(Train, with_value(key, value))
    assert config is None
    assert len(found) == 1, found
    return found[0]


def test_the_least_config_is_typed_with_every_default():
    config, found = typed(Train, copy.deepcopy(LEAST))
    assert found == []
    assert config is not None
    assert (config.epochs, config.data.batch_size, config.data.split.val, config.model) == (30, 64, 0.1, NODE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("amp", "bf16"), ("amp", True), ("data.num_workers", "auto"), ("data.num_workers", 0), ("epochs", None),
        ("grad_clip.norm", 1), ("data.hflip", 1.0), ("data.normalize.mean", [0.5, 1]), ("trust", ["a", "b"]), ("name", "a/b"),
        ("deterministic", "warn"), ("metrics", {"f1": NODE}), ("callbacks", {"a": NODE, "b": NODE}),
        ("transform.train", [NODE, NODE]),
    ],
)  # fmt: skip
def test_what_a_key_may_hold_is_taken_as_it_is(key, value):
    config, found = typed(Train, with_value(key, value))
    assert found == []
    result: Any = config
    for part in key.split("."):
        result = getattr(result, part)
    assert result == value


def test_a_name_that_yaml_reads_as_a_number_is_text():
    config, _ = typed(Train, with_value("name", 12))
    assert config is not None
    assert config.name == "12"


WRONG = [
    ("epochs", "many", "cannot be many", "a whole number of at least 1 or null"),
    ("epochs", 0, "cannot be 0", "a whole number of at least 1 or null"),
    ("epochs", 2.5, "cannot be 2.5", "a whole number of at least 1 or null"),
    ("seed", -1, "cannot be -1", "a whole number of at least 0"),
    ("seed", True, "cannot be true", "a whole number of at least 0"),
    ("seed", None, "cannot be null", "a whole number of at least 0"),
    ("data.batch_size", True, "cannot be true", "auto or a whole number of at least 1"),
    ("data.split.val", 1.0, "cannot be 1.0", "a number of at least 0 and below 1 or test"),
    ("data.split.val", False, "cannot be false", "a number of at least 0 and below 1 or test"),
    ("grad_clip.norm", 0, "cannot be 0", "a number above 0 or null"),
    ("data.hflip", 1.01, "cannot be 1.01", "a number of at least 0 and at most 1"),
    ("amp", "bf17", "cannot be bf17", "true, false, auto, bf16 or fp16"),
    ("compile", "maybe", "cannot be maybe", "true, false, model or step"),
    ("data.placement", "gpu", "cannot be gpu", "auto, device, ram or disk"),
    ("trust", "mine", "cannot be mine", "a list, each item text"),
    ("trust", [["a"]], "cannot be [a]", "a list, each item text"),
    ("data.normalize.std", ["x"], "cannot be x", "a list, each item a number or null"),
    ("limit", 3, "cannot be 3", "a mapping of train_batches, eval_batches"),
    ("model", "mlp", "cannot be mlp", "a mapping with _target_"),
    ("callbacks.mine", 3, "cannot be 3", "a mapping with _target_"),
    ("metrics.f1", "f1", "cannot be f1", "a mapping with _target_"),
    ("ckpt_path", {"a": 1}, "cannot be {a: 1}", "text or null"),
]


@pytest.mark.parametrize(
    ("key", "value", "message", "allowed"), WRONG, ids=[f"{key}={value}" for key, value, *_ in WRONG]
)
def test_a_wrong_value_is_named_with_what_is_allowed(key, value, message, allowed):
    found = problem(key, value)
    assert (found.key, found.message, found.allowed) == (key, message, allowed)


def test_an_item_of_a_list_of_components_is_named_by_its_number():
    found = problem("transform.train", [NODE, 3])
    assert (found.key, found.message, found.allowed) == ("transform.train.1", "cannot be 3", "a mapping with _target_")


def test_a_misspelt_choice_gets_the_nearest_one():
    assert problem("data.placement", "dvice").nearest == "device"
    assert problem("deterministic", "wran").nearest == "warn"


@pytest.mark.parametrize(
    ("key", "close"), [("sede", "seed"), ("data.batchsize", "batch_size"), ("data.split.vall", "val"), ("zzzz", "")]
)
def test_an_unknown_key_is_named_with_the_nearest_and_all_of_its_section(key, close):
    found = problem(key, 1)
    assert (found.key, found.message, found.nearest) == (key, "is not a key", close)
    section = Train
    for part in key.split(".")[:-1]:
        section = keys.hints(section)[part]
    assert found.allowed == ", ".join(keys.hints(section))


@pytest.mark.parametrize("key", ["model", "data.dataset", "optimizer"])
def test_a_component_that_is_missing_is_named(key):
    values = copy.deepcopy(LEAST)
    inner = values["data"] if key == "data.dataset" else values
    del inner[key.rpartition(".")[2]]
    _, found = typed(Train, values)
    assert [(p.key, p.message, p.allowed) for p in found] == [(key, "is missing", "a mapping with _target_")]


@pytest.mark.parametrize("key", ["model", "data.dataset", "callbacks.mine", "metrics.f1", "logger.x"])
@pytest.mark.parametrize("node", [{}, {"lr": 1}, {"_target_": 3}])
def test_a_component_that_names_nothing_to_build_is_told(key, node):
    found = problem(key, node)
    assert found.key == key
    assert "_target_: package.module.Name" in found.allowed


def test_all_problems_are_reported_at_once():
    values = with_value("sede", 1) | {"epochs": 0, "tf32": 3, "grad_clip": {"norm": -1, "vlaue": 1}, "seed": True}
    del values["model"]
    _, found = typed(Train, values)
    assert {p.key for p in found} == {"sede", "epochs", "tf32", "grad_clip.norm", "grad_clip.vlaue", "seed", "model"}
    text = str(ConfigError(found))
    assert text.startswith("7 problems in the configuration\n")
    assert all(f"  {p.key}: " in text for p in found)


def test_a_key_of_eval_is_none_of_train():
    assert problem("split", "val").message == "is not a key"
    assert typed(Eval, with_value("split", "val"))[1] == []


def test_components_are_found_wherever_the_schema_has_them():
    values = with_value("callbacks", {"a": NODE}) | {"metrics": {"f1": NODE}, "transform": {"train": [NODE, NODE]}}
    found = [key for key, _ in nodes(Train, values)]
    once = {"data.dataset", "model", "loss", "task", "optimizer", "scheduler"}
    assert set(found) == once | {"callbacks.a", "metrics.f1", "transform.train.0", "transform.train.1"}
    assert len(found) == len(set(found))


# Where a value came from


def test_the_origin_is_the_last_override_that_set_the_key(problems):
    assert problems("epochs=3", "epochs=0")["epochs"].origin == "the override epochs=0"


def test_the_origin_of_a_key_inside_an_override_of_its_section_is_that_override(problems):
    assert problems("grad_clip={norm: -1}")["grad_clip.norm"].origin == "the override grad_clip={norm: -1}"


def test_the_origin_drops_the_plus_signs(problems):
    assert problems("++epochs=0")["epochs"].origin == "the override epochs=0"


@pytest.fixture
def own(workdir):
    """A folder of options with mistakes in them."""
    for name, text in {
        "model/own.yaml": "_target_: runner.models.mlp.MLP\nhiden: [3]\n",
        "data/mine.yaml": "defaults:\n  - _base\n  - _self_\ndataset:\n  _target_: runner.data.sources.digits.digits\nhflip: 3\n",
        "experiment/own.yaml": "# @package _global_\nepochs: 0\ngrad_clip:\n  norm: -1\n",
        "other.yaml": "defaults:\n  - train\n  - _self_\naccumulate: 0\n",
    }.items():
        path = workdir / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return workdir / "mine"


@pytest.mark.parametrize(
    ("words", "key", "file"),
    [
        (["model=own"], "model.hiden", "model/own.yaml:2"),
        (["data=mine"], "data.hflip", "data/mine.yaml:6"),
        (["experiment=own"], "epochs", "experiment/own.yaml:2"),
        (["experiment=own"], "grad_clip.norm", "experiment/own.yaml:4"),
        (["--config-name", "other"], "accumulate", "other.yaml:4"),
    ],
)
def test_the_origin_of_a_value_from_a_file_is_that_line_of_the_file(words, key, file, own, problems):
    found = problems("--config-dir", str(own), *words)
    assert found[key].origin == str(own / file)


def test_an_override_is_the_origin_rather_than_the_file_that_it_overrides(own, problems):
    found = problems("--config-dir", str(own), "experiment=own", "epochs=-3")
    assert found["epochs"].origin == "the override epochs=-3"


def test_a_value_of_the_base_that_options_share_comes_from_there(compose):
    composition = compose("data=digits")
    file, _, line = composition.origin("data.prefetch").rpartition(":")
    assert file == str(shipped() / "data" / "_base.yaml")
    assert Path(file).read_text().splitlines()[int(line) - 1].startswith("prefetch:")


def test_checked_raises_every_problem_with_its_origin(compose):
    composition = compose("epochs=0", "model.widht=1")
    with pytest.raises(ConfigError) as caught:
        resolve_config(composition, Train)
    assert {p.key: p.origin for p in caught.value.problems} == {
        "epochs": "the override epochs=0",
        "model.widht": "the override model.widht=1",
    }


def test_checked_gives_the_typed_config(compose):
    composition = compose("epochs=7", "optimizer=sgd")
    config = resolve_config(composition, Train)
    assert config.epochs == 7
    assert config.optimizer["_target_"] == "torch.optim.SGD"


def test_resuming_refuses_what_would_change_the_meaning_of_the_state():
    fixed = ["model.width", "data.dataset.samples", "data.split.seed", "task._target_", "optimizer._target_"]
    free = ["epochs", "optimizer.lr", "data.num_workers", "log.every_steps", "modelling"]
    inside = ["seed", "accumulate", "data.batch_size", "data.shuffle", "limit.train_batches"]
    assert [p.key for p in changes_refused([*fixed, *free, *inside], inside_epoch=False)] == fixed
    assert [p.key for p in changes_refused([*fixed, *free, *inside], inside_epoch=True)] == [*fixed, *inside]


# Words for what is allowed


def test_every_key_can_be_described_in_words():
    for key in keys.all_keys(Eval):
        text = describe(keys.find(Eval, key))
        assert text
        assert "typing" not in text
        assert "<" not in text


@pytest.mark.parametrize(
    ("word", "choices", "expected"),
    [
        ("sede", ["seed", "speed"], "seed"),
        ("SEED", ["seed"], "seed"),
        ("optim", ["optimizer", "options"], "optimizer"),
        ("xyz", ["seed"], ""),
        ("e", ["epochs", "evaluate"], ""),
        ("seed", [], ""),
    ],
)
def test_the_nearest_choice_is_near_or_none(word, choices, expected):
    assert nearest(word, choices) == expected


def test_a_problem_is_told_key_first_then_what_is_allowed_then_its_origin():
    lines = Problem("a.b", "cannot be 3", "a word", "c", "the override a.b=3").lines()
    assert lines == ["a.b: cannot be 3; did you mean 'c'?", "    allowed: a word", "    from: the override a.b=3"]
