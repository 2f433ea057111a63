"""`optimizer.no_decay`, `lr_mult` and `layer_decay`: exactly the right parameters in each group, each with its own rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from runner.base.errors import UserError
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.models.mlp import MLP
from runner.models.resnet_cifar import ResNet18
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT
from runner.optim.groups import depths, parameter_groups, tables
from runner.run.optimizer import build_optimizer, table_of_groups
from runner.runtime.blocks import repeated_blocks

OPTIMIZERS = ("adamw", "adam", "sgd", "rmsprop", "muon")


def vit(depth: int = 2) -> ViT:
    return ViT(1, (8, 8), 5, dim=12, depth=depth)


def built(compose: Callable[..., Any], model: nn.Module, *words: str) -> torch.optim.Optimizer:
    composition = compose(*words)
    return build_optimizer(resolve_config(composition, Train), model, nn.Module())[0]


def settings(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> dict[str, Any]:
    """A setting of the group of each parameter, by the parameter's name; a parameter in two groups is an error."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pairs = [(names[id(p)], group[key]) for group in optimizer.param_groups for p in group["params"]]
    assert len(pairs) == len(dict(pairs)) == len(names)
    return dict(pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_leaves_biases_norms_and_positions_alone_and_nothing_else(name: str, compose: Any) -> None:
    model = vit()
    words = (f"optimizer={name}", "optimizer.weight_decay=0.25", "optimizer.no_decay=auto")
    found = settings(model, built(compose, model, *words), "weight_decay")
    for parameter, decay in found.items():
        spared = parameter.endswith("bias") or "norm" in parameter or parameter == "positions"
        assert decay == (0.0 if spared else 0.25), parameter


def test_what_is_a_table_is_told_by_its_module_its_name_and_its_shape() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 4)
            self.class_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
            self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
            self.temperature = nn.Parameter(torch.ones(()))
            self.mixing = nn.Parameter(torch.ones(4, 4))
            self.norm = nn.GroupNorm(2, 4)
            self.depthwise = nn.Conv2d(4, 4, 1, groups=4)
            self.head = nn.Linear(4, 1)

    kept = {"mixing", "depthwise.weight", "head.weight"}
    model = Net()
    assert tables(model) == {name for name, _ in model.named_parameters()} - kept


def test_patterns_name_parameters_and_modules(compose: Any) -> None:
    model = vit()
    words = ("optimizer=adamw", "optimizer.weight_decay=0.1", "optimizer.no_decay=[blocks.0, '*.bias']")
    found = settings(model, built(compose, model, *words), "weight_decay")
    assert {name for name, decay in found.items() if decay == 0} == {
        name for name in found if name.startswith("blocks.0.") or name.endswith(".bias")
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_is_the_optimizers_times_the_factor_of_the_last_pattern_that_matches(name: str, compose: Any) -> None:
    model, plain = vit(), vit()
    words = (f"optimizer={name}", "optimizer.lr_base_batch_size=128", "data.batch_size=64")
    base = settings(plain, built(compose, plain, *words), "initial_lr")
    optimizer = built(compose, model, *words, "optimizer.lr_mult={blocks: 0.5, blocks.1.mlp: 3, head: 10}")
    found = settings(model, optimizer, "initial_lr")
    for parameter, rate in found.items():
        factor = (
            10 if "head" in parameter else 3 if "blocks.1.mlp" in parameter else 0.5 if "blocks" in parameter else 1
        )
        assert rate == pytest.approx(base[parameter] * factor), parameter
    assert found == settings(model, optimizer, "lr")


def test_muon_finds_the_head_whatever_the_groups(compose: Any) -> None:
    model = vit()
    optimizer = built(
        compose, model, "optimizer=muon", "optimizer.no_decay=auto", "optimizer.lr_mult={embed: 2, blocks.1: 3}"
    )
    algorithms = settings(model, optimizer, "algorithm")
    by_muon = {name for name, algorithm in algorithms.items() if algorithm == "muon"}
    assert by_muon == {name for name, p in model.named_parameters() if p.ndim == 2 and name != "head.weight"}


def test_layers_follow_the_blocks_of_the_model_and_the_head_keeps_the_whole_rate(compose: Any) -> None:
    model = vit(depth=3)
    found = settings(model, built(compose, model, "optimizer.lr=0.1", "optimizer.layer_decay=0.5"), "initial_lr")
    expected = {"positions": 0, "embed": 0, "blocks.0": 1, "blocks.1": 2, "blocks.2": 3, "norm": 4, "head": 4}
    for name, rate in found.items():
        layer = next(layer for start, layer in expected.items() if name.startswith(start))
        assert rate == pytest.approx(0.1 * 0.5 ** (4 - layer)), name


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (lambda: MLP(1, (8, 8), 5, hidden=[8, 8]), 3),
        (lambda: SmallCNN(1, 5, width=4), 4),
        (lambda: ResNet18(1, 5, width=4), 10),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), 1),
    ],
    ids=["mlp", "small_cnn", "resnet18", "one layer"],
)
def test_layers_are_counted_from_the_first_to_the_head(model: Callable[[], nn.Module], layers: int) -> None:
    made = model()
    found = depths(made, [name for name, _ in repeated_blocks(made)])
    assert list(found) == [name for name, _ in made.named_parameters()]
    assert list(found.values()) == sorted(found.values())
    assert max(found.values()) - min(found.values()) + 1 == layers


def test_what_lies_between_two_blocks_belongs_to_the_later_one() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("stem", "a", "between", "b", "head")})
    found = depths(model, ["a", "b"])
    assert [found[f"{name}.weight"] for name in ("stem", "a", "between", "b", "head")] == [0, 1, 2, 2, 3]


def test_frozen_parameters_are_in_no_group_and_each_of_the_others_in_one() -> None:
    model = vit()
    model.embed.requires_grad_(False)
    groups = parameter_groups(model, "auto", {"head": 2.0}, layer_decay=0.7, blocks=["blocks.0", "blocks.1"])
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("key", "value", "name", "meant"),
    [("lr_mult", "{haed: 2}", "haed", "head"), ("no_decay", "[block]", "block", "blocks")],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name(
    key: str, value: str, name: str, meant: str, compose: Any
) -> None:
    with pytest.raises(UserError, match="allowed: names with") as caught:
        built(compose, vit(), f"optimizer.{key}={value}")
    says = f"optimizer.{key}: the model has no module or parameter '{name}'; did you mean '{meant}'?"
    assert says in str(caught.value)


def test_an_optimizer_without_weight_decay_cannot_keep_it_from_anything(compose: Any) -> None:
    words = ["optimizer._target_=torch.optim.Rprop"]
    words += [f"~optimizer.{name}" for name in ("betas", "eps", "weight_decay", "amsgrad")]
    with pytest.raises(UserError, match="has no weight_decay"):
        built(compose, vit(), *words, "optimizer.no_decay=auto")


def test_the_table_has_a_row_for_each_group_and_none_without_groups(compose: Any) -> None:
    model = SmallCNN(1, 5, width=4)
    assert table_of_groups(built(compose, model)) == []
    rows = table_of_groups(built(compose, model, "optimizer.lr=0.5", "optimizer.lr_mult={head: 0.1}"))
    assert [row[0] for row in rows] == ["all others", "head"]
    assert rows[1][1:] == ["2", str(16 * 5 + 5), "0.05", "0.05"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), 0.1),
        (("optimizer.lr_base_batch_size=64",), 0.1),
        (("optimizer.lr_base_batch_size=256",), 0.025),
        (("optimizer.lr_base_batch_size=256", "accumulate=8"), 0.2),
    ],
)
def test_the_rate_is_in_proportion_to_the_samples_of_a_step(words, expected, compose):
    words = ("optimizer=sgd", "optimizer.lr=0.1", "data.batch_size=64", *words)
    for group in built(compose, nn.Linear(2, 2), *words).param_groups:
        assert group["lr"] == group["initial_lr"] == pytest.approx(expected)


def test_both_rates_of_muon_follow(compose):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    words = ("optimizer=muon", "optimizer.lr_base_batch_size=32", "data.batch_size=64")
    optimizer = built(compose, model, *words)
    rates = {group["algorithm"]: group["initial_lr"] for group in optimizer.param_groups}
    assert rates == {"muon": pytest.approx(2 * 0.02), "adamw": pytest.approx(2 * 0.003)}
