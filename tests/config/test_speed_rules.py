"""What the toggles of speed and memory refuse, alone and together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from runner.config.errors import Problem
from runner.config.rules import conflicts
from runner.config.schema.sections import Compiler
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
)
def test_what_cannot_be_had_together_is_refused(values: dict[str, Any], keys: list[str]) -> None:
    found = conflicts(config(**values))
    assert [problem.key for problem in found] == keys
    assert all(problem.allowed for problem in found)


@pytest.mark.parametrize("value", [True, False, 1, 2, 0.5, "layer1", "layer?.*", ["a", "b"]], ids=repr)
def test_activation_checkpointing_takes_each_of_its_kinds_as_it_is(value: Any) -> None:
    found = config(activation_checkpointing=value).activation_checkpointing
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("value", [0, -1, 0.0, 1.0, 1.5, None, {"a": 1}], ids=repr)
def test_activation_checkpointing_refuses_the_rest(value: Any) -> None:
    found, problems = typed(Train, copy.deepcopy(LEAST) | {"activation_checkpointing": value})
    assert found is None
    (problem,) = problems
    assert problem.key == "activation_checkpointing"
    assert problem.allowed.startswith("true, false, a whole number of at least 1, a number above 0 and below 1, text")


def test_the_compiler_is_left_at_its_defaults() -> None:
    assert config().compiler == Compiler(mode="default", fullgraph=False, dynamic=False)
    assert config(compile="step").compile == "step"


def test_a_kernel_that_an_optimizer_lacks_is_refused(problems: Callable[..., dict[str, Problem]]) -> None:
    found = problems("optimizer=rmsprop", "optimizer.fused=true")["optimizer.fused"]
    assert found.message == "is not an argument of torch.optim.RMSprop"


def test_kernels_left_open_fit_every_optimizer(problems: Callable[..., dict[str, Problem]]) -> None:
    assert problems("optimizer=rmsprop", "+optimizer.fused=null") == {}
