"""Keys of a component that the program reads itself."""

from __future__ import annotations

from runner.config.schema.sections import OptimizerExtras
from runner.config.targets import bind, build, extras_of

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


class Scaling:
    """Something to build that has an argument of the name of an extra."""

    def __init__(self, lr_base_batch_size: str = "none") -> None:
        self.lr_base_batch_size = lr_base_batch_size


def test_a_component_is_built_without_the_keys_that_the_program_reads():
    import torch

    weights = [torch.nn.Parameter(torch.zeros(1))]
    assert build("optimizer", SGD | {"lr_base_batch_size": 64}, weights).defaults["lr"] == 0.1
    assert bind("optimizer", SGD | {"lr_base_batch_size": 64}, positional=1) == []


def test_extras_that_a_config_leaves_out_have_their_defaults():
    assert extras_of("optimizer", SGD) == OptimizerExtras()
    assert extras_of("optimizer", SGD | {"lr_base_batch_size": 64}).lr_base_batch_size == 64


def test_an_argument_of_the_component_itself_is_none_of_the_extras():
    own = {"_target_": f"{__name__}.Scaling", "lr_base_batch_size": "mine"}
    assert build("optimizer", own).lr_base_batch_size == "mine"
    assert bind("optimizer", own) == []
    assert extras_of("optimizer", own) == OptimizerExtras()
