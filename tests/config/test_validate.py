"""From plain values to the typed config: what is refused, what is said about it, and where it came from."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import ConfigError, Problem, nearest
from runner.config import keys
from runner.config.keys import describe
from runner.config.rules import Entry, conflicts, entries, moment
from runner.config.schema.sections import Data, Split
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
    if value is ...:
        del inner[last]
    return values


def problem(key: str, value: Any) -> Problem:
    config, found = typed(Train, with_value(key, value))
    assert config is None
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("amp", "bf16"), ("amp", True), ("data.num_workers", "auto"), ("data.num_workers", 0), ("epochs", None),
        ("grad_clip.norm", 1), ("data.hflip", 1.0), ("data.normalize.mean", [0.5, 1]), ("trust", ["a", "b"]), ("name", "a/b"),
        ("deterministic", "warn"), ("metrics", {"f1": NODE}), ("callbacks", {"a": NODE, "b": NODE}),
        ("transform.train", [NODE, NODE]), *(("activation_checkpointing", value) for value in (True, "layer?.*", ["a", "b"])),
    ],
)  # fmt: skip
def test_what_a_key_may_hold_is_taken_as_it_is(key, value):
    config, found = typed(Train, with_value(key, value))
    assert found == []
    result = functools.reduce(getattr, key.split("."), config)
    assert (result, isinstance(result, bool)) == (value, isinstance(value, bool))
    assert config is not None
    assert (config.data.batch_size, config.data.split.val, config.model) == (64, 0.1, NODE)


# A key, its value, what is said, what is allowed, and what is meant; a key of a component in a list has its number.
WRONG: list[tuple[Any, ...]] = [
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
    ("amp", "bf17", "cannot be bf17", "true, false, auto, bf16 or fp16", "bf16"),
    ("compile", "maybe", "cannot be maybe", "true, false, model, blocks or step"),
    ("data.placement", "gpu", "cannot be gpu", "auto, device, ram or disk"),
    ("trust", "mine", "cannot be mine", "a list, each item text"),
    ("trust", [["a"]], "cannot be [a]", "a list, each item text"),
    ("data.normalize.std", ["x"], "cannot be x", "a list, each item a number or null"),
    ("limit", 3, "cannot be 3", "a mapping of train_batches, eval_batches"),
    ("model", "mlp", "cannot be mlp", "a mapping with _target_"),
    ("callbacks.mine", 3, "cannot be 3", "a mapping with _target_"),
    ("metrics.f1", "f1", "cannot be f1", "a mapping with _target_"),
    ("ckpt_path", {"a": 1}, "cannot be {a: 1}", "text or null"),
    *(("activation_checkpointing", value, f"cannot be {text}", "true, false, text or a list, each item text")
      for value, text in ((0.5, "0.5"), (2, "2"), (1, "1"), (None, "null"))),
    ("transform.train.1", [NODE, 3], "cannot be 3", "a mapping with _target_"),
    *(("model", ..., "is missing", "a mapping with _target_"), ("data.dataset", ..., "is missing", "a mapping with _target_")),
    *((key, node, "names nothing to build", "a mapping with _target_: package.module.Name")
      for key in ("model", "data.dataset", "callbacks.mine", "metrics.f1", "logger.x")
      for node in ({}, {"lr": 1}, {"_target_": 3})),
    # What is meant
    ("data.placement", "dvice", "cannot be dvice", "auto, device, ram or disk", "device"),
    ("deterministic", "wran", "cannot be wran", "true, false or warn", "warn"),
    ("resume", "last", "cannot be last", "auto or null", "ckpt_path=last"),
    ("checkpoint", "last", "cannot be last", None, "ckpt_path"),
    ("amp", 16, "cannot be 16", None, "fp16"),
    ("dtype", "float16", "cannot be float16", "float32 or float64", "amp=fp16"),
    # All keys of the section are allowed, and one may be near
    ("sede", 1, "is not a key", ", ".join(keys.hints(Train)), "seed"),
    ("data.batchsize", 1, "is not a key", ", ".join(keys.hints(Data)), "batch_size"),
    ("data.split.vall", 1, "is not a key", ", ".join(keys.hints(Split)), "val"),
    ("zzzz", 1, "is not a key", None, ""),
    ("split", "val", "is not a key", None, None),  # which is one of eval
]  # fmt: skip


@pytest.mark.parametrize("row", WRONG, ids=[f"{key}={value}" for key, value, *_ in WRONG])
def test_a_wrong_value_is_named_with_what_is_allowed_and_what_is_meant(row: tuple[Any, ...]) -> None:
    key, value, message, allowed, meant = (*row, "")[:5]
    found = problem(key.rstrip(".0123456789") if isinstance(value, list) else key, value)
    expected = Problem(
        key, message, found.allowed if allowed is None else allowed, found.nearest if meant is None else meant
    )
    assert found == expected


def test_all_problems_are_reported_at_once():
    values = with_value("sede", 1) | {"epochs": 0, "tf32": 3, "grad_clip": {"norm": -1, "vlaue": 1}, "seed": True}
    del values["model"]
    _, found = typed(Train, values)
    assert {p.key for p in found} == {"sede", "epochs", "tf32", "grad_clip.norm", "grad_clip.vlaue", "seed", "model"}
    text = str(ConfigError(found))
    assert text.startswith("7 problems in the configuration\n")
    assert all(f"  {p.key}: " in text for p in found)


def test_a_key_of_eval_is_one():
    assert typed(Eval, with_value("split", "val"))[1] == []


def test_components_are_found_wherever_the_schema_has_them():
    values = with_value("callbacks", {"a": NODE}) | {"metrics": {"f1": NODE}, "transform": {"train": [NODE, NODE]}}
    found = [key for key, _ in nodes(Train, values)]
    once = {"data.dataset", "model", "loss", "task", "optimizer", "scheduler"}
    assert set(found) == once | {"callbacks.a", "metrics.f1", "transform.train.0", "transform.train.1"}
    assert len(found) == len(set(found))


# Where a value came from


@pytest.mark.parametrize(
    ("words", "key", "word"),
    [
        (["epochs=3", "epochs=0"], "epochs", "epochs=0"),  # the last one
        (["grad_clip={norm: -1}"], "grad_clip.norm", "grad_clip={norm: -1}"),
        (["++epochs=0"], "epochs", "epochs=0"),
        (["epochs=0", "model.widht=1"], "model.widht", "model.widht=1"),
        (["--config-dir", "mine", "experiment=own", "epochs=-3"], "epochs", "epochs=-3"),  # rather than the file
    ],
)
def test_the_origin_of_a_value_of_the_command_line_is_its_override(words, key, word, own, problems):
    assert problems(*words)[key].origin == f"the override {word}"


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


def test_a_value_of_the_base_that_options_share_comes_from_there(compose):
    composition = compose("data=digits")
    file, _, line = composition.origin("data.prefetch").rpartition(":")
    assert file == str(shipped() / "data" / "_base.yaml")
    assert Path(file).read_text().splitlines()[int(line) - 1].startswith("prefetch:")


# Rules between keys


def config(**values: Any) -> Train:
    found, problems = typed(Train, copy.deepcopy(LEAST) | values)
    assert found is not None, [problem.lines() for problem in problems]
    return found


def test_a_name_that_yaml_reads_as_a_number_is_text():
    assert config(name=12).name == "12"


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"epochs": None}, ["epochs"]),
        ({"epochs": None, "max_steps": 5}, []),
        ({"deterministic": True, "cudnn_benchmark": True, "tf32": True}, ["cudnn_benchmark", "tf32"]),
        ({"deterministic": "warn", "cudnn_benchmark": True, "tf32": True}, []),
        ({"data": {"dataset": NODE, "split": {"val": 0.5, "test": 0.5}}}, ["data.split"]),
        ({"data": {"dataset": NODE, "split": {"val": 0.5, "test": 0.49}}}, []),
        ({"data": {"dataset": NODE, "normalize": {"mean": [0.5]}}}, ["data.normalize"]),
        ({"data": {"dataset": NODE, "normalize": {"mean": [0.5], "std": [0.0]}}}, ["data.normalize.std"]),
        ({"data": {"dataset": NODE, "normalize": {"mean": [0.5], "std": [1, 1]}}}, ["data.normalize"]),
        ({"data": {"dataset": NODE, "placement": "device", "num_workers": 1}}, ["data.num_workers"]),
        ({"data": {"dataset": NODE, "placement": "device", "num_workers": 0}}, []),
        ({"data": {"dataset": NODE, "placement": "ram"}, "transform": {"sample_train": [NODE]}}, ["transform"]),
        ({"evaluate": {"every_epochs": None}, "scheduler": {"_target_": "a.Plateau"}}, ["scheduler"]),
        ({"evaluate": {"every_epochs": None, "every_steps": 5}, "scheduler": {"_target_": "a.Plateau"}}, []),
        ({"evaluate": {"every_epochs": None}, "callbacks": {"s": {"_target_": "a.EarlyStopping"}}}, ["callbacks.s"]),
        *(({"name": name}, ["name"]) for name in ("", "..", "a/../b", "/a", "~a", "a=b", "a,b", "a//b", ".")),
        *(({"name": name}, []) for name in ("a", "a/b", "a b", "A-1_2.3", "résumé")),
        ({"compile": True, "compiler": {"mode": "reduce-overhead"}, "accumulate": 2}, ["compiler.mode"]),
        ({"compile": "step", "compiler": {"mode": "max-autotune"}, "accumulate": 2}, ["compiler.mode"]),
        ({"compile": True, "compiler": {"mode": "max-autotune-no-cudagraphs"}, "accumulate": 2}, []),
        ({"compile": True, "compiler": {"mode": "reduce-overhead"}}, []),
        ({"compile": False, "compiler": {"mode": "reduce-overhead"}, "accumulate": 2}, []),
        ({"compile": "model", "compiler": {"mode": "max-autotune"}, "deterministic": True}, ["compiler.mode"]),
        ({"compile": "model", "compiler": {"mode": "max-autotune"}, "deterministic": "warn"}, []),
        ({"compile": True, "deterministic": True}, []),
        ({"matmul_precision": "medium", "deterministic": True}, ["matmul_precision"]),
        ({"matmul_precision": "highest", "deterministic": True}, []),
        ({"matmul_precision": "highest", "tf32": True}, ["matmul_precision"]),
        ({"matmul_precision": "high", "tf32": True}, []),
        ({"optimizer": NODE | {"fused": True, "foreach": True}}, ["optimizer.fused"]),
        ({"optimizer": NODE | {"fused": True, "foreach": False}}, []),
        ({"activation_checkpointing": []}, ["activation_checkpointing"]),
        ({"activation_checkpointing": ""}, ["activation_checkpointing"]),
    ],
    ids=str,
)
def test_combinations_that_cannot_be_run_are_refused_and_no_others(values: dict[str, Any], refused: list[str]) -> None:
    found = conflicts(config(**values))
    assert [problem.key for problem in found] == refused


# Words of a command line, the key, and what is said about it; with no key there is no problem.
WORDS = """
activation_checkpointing=2 | activation_checkpointing | can no longer be 2
activation_checkpointing=0.5 | activation_checkpointing | can no longer be 0.5
ema=0.9 swa=0.5 | swa | only one average is supported
ema=1.0 | ema | cannot be 1.0
ema=0 | ema | cannot be 0
swa=-1 | swa | cannot be -1
swa=0.5 evaluate.every_epochs=null | swa | at evaluations
averaging.lr_factor=0.1 | averaging.lr_factor | has no effect without swa
averaging.recalibrate_batches=3 ema=0.9 | averaging.recalibrate_batches | has no effect without swa
grad_clip.agc=0 | grad_clip.agc | cannot be 0
data.batch_size=automatic | data.batch_size | cannot be automatic
data.batch_size=0 | data.batch_size | cannot be 0
audit data.batch_size=auto | data.batch_size | may find another number for each side
unfreeze_at=100 | unfreeze_at | has no effect, as freeze names nothing
freeze=[stem] unfreeze_at=soon | unfreeze_at | is not valid: 'soon' is not a number of optimizer steps
freeze=[stem@2h] | freeze | is not valid: '2h' is not a number of optimizer steps
freeze=['@3'] | freeze | is not valid: '@3' is not a pattern
freeze=['stem@'] | freeze | is not valid: 'stem@' is not a pattern
init=[normal,kaiming] | init | draws the weights 2 times: normal, kaiming
model=torchvision model.weights=DEFAULT init=kaiming | init | which would overwrite the weights that model.weights loads
init_mismatch=skip | init_mismatch | has no effect without init_from
init=he | init | cannot be he
data.split.val=test data.split.folds=3 | data.split.val | is test, and data.split.folds=3 divides the data
data.split.val=test data.split.test=0.1 | data.split.val | is test, and data.split.test=0.1 divides the data
model.head=deep | model.head | cannot be deep
model.head=[0] | model.head | cannot be
optimizer=rmsprop optimizer.fused=true | optimizer.fused | is not an argument of torch.optim.RMSprop
optimizer.lr_base_batch_size=0 | optimizer.lr_base_batch_size | cannot be 0
optimizer.lr_base_batch_size=true | optimizer.lr_base_batch_size | cannot be true
optimizer.lr_base_batch_size=1.5 | optimizer.lr_base_batch_size | cannot be 1.5
+optimizer.lr_base_batch_siz=64 | optimizer.lr_base_batch_siz | is not an argument
evaluate.every_epochs=0.5 | evaluate.every_epochs | cannot be 0.5
optimizer.foreach=true optimizer.fused=true | optimizer.fused | is true, and so is optimizer.foreach
optimizer.layer_decay=1.5 | optimizer.layer_decay | cannot be 1.5
optimizer.layer_decay=0 | optimizer.layer_decay | cannot be 0
optimizer.no_decay=some | optimizer.no_decay | cannot be some
optimizer.lr_mult={head:-1} | optimizer.lr_mult | cannot be
optimizer.lr_mult=2 | optimizer.lr_mult | cannot be 2
freeze=all-but-head unfreeze_at=2ep
freeze=[stem@2ep,stages.?.*,'*.bn[12]'] unfreeze_at=100
init=[kaiming,zero_gamma,prior_bias]
model=torchvision model.weights=DEFAULT init=prior_bias
model.head=[512,256]
model.head=none
model.head=[]
+optimizer.fused=null optimizer=rmsprop
"""


@pytest.mark.parametrize("row", WORDS.strip().splitlines())
def test_what_a_command_line_cannot_ask_for_is_a_problem_of_its_key(row: str, problems: Any) -> None:
    words, *expected = row.split(" | ")
    verb = {"verb": "audit"} if words.startswith("audit ") else {}
    found = problems(*words.removeprefix("audit ").split(), **verb)
    assert list(found) == expected[:1]
    for problem in found.values():
        assert expected[1] in problem.message


# The entries of `freeze`


def test_a_moment_is_a_number_of_steps_or_of_epochs():
    assert [moment(text) for text in (None, 100, "1", "2ep")] == [(None, None), (100, None), (1, None), (None, 2)]


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "2 ep", "0ep", "1.5", "2epochs", 0])
def test_anything_else_is_no_moment(text):
    with pytest.raises(ValueError, match="is not a number of optimizer steps"):
        moment(text)


def test_a_moment_of_its_own_comes_before_that_of_all():
    found = entries(["stem", "stages.0@3ep", "layer?@20"], "10")
    assert found == [Entry("stem", 10, None), Entry("stages.0", None, 3), Entry("layer?", 20, None)]
    assert entries("all-but-head", None) == [Entry("all-but-head", None, None)]
    assert entries(None, 5) == []


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
