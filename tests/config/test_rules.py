"""Rules between keys, and values that a key cannot have: each is a problem of its key, with what to set."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from runner.config.rules import conflicts
from runner.config.schema.train import Train
from runner.config.validate import typed

NODE = {"_target_": "package.Thing"}
LEAST: dict[str, Any] = {
    "data": {"dataset": NODE},
    **dict.fromkeys(("model", "loss", "task", "optimizer", "scheduler"), NODE),
}


def config(**values: Any) -> Train:
    found, problems = typed(Train, copy.deepcopy(LEAST) | values)
    assert found is not None, [problem.lines() for problem in problems]
    return found


@pytest.mark.parametrize(
    ("values", "keys"),
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
def test_combinations_that_cannot_be_run_are_refused_and_no_others(values: dict[str, Any], keys: list[str]) -> None:
    refused = conflicts(config(**values))
    assert [problem.key for problem in refused] == keys
    assert all(problem.allowed and problem.message for problem in refused)


@pytest.mark.parametrize("value", [True, False, "layer1", "layer?.*", ["a", "b"]], ids=repr)
def test_activation_checkpointing_takes_each_of_its_kinds_as_it_is(value: Any) -> None:
    found = config(activation_checkpointing=value).activation_checkpointing
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("value", [0, 1, 2, 0.5, None, {"a": 1}], ids=repr)
def test_activation_checkpointing_refuses_the_rest(value: Any) -> None:
    found, problems = typed(Train, copy.deepcopy(LEAST) | {"activation_checkpointing": value})
    assert found is None
    (problem,) = problems
    assert problem.key == "activation_checkpointing"
    assert problem.allowed.startswith("true, false, text or a list")


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
    found = problems(*words.split())
    assert list(found) == expected[:1]
    for problem in found.values():
        assert expected[1] in problem.message
        assert problem.allowed


@pytest.mark.parametrize("verb", ["audit", "bench"])
def test_what_is_compared_has_a_batch_size_of_its_own(verb: str, problems: Any) -> None:
    assert list(problems("data.batch_size=auto", verb=verb)) == ["data.batch_size"]
