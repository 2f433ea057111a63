"""Features by name: the same numbers as in the middle of the model, whatever comes after them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.models.features import Extractor, listener
from runner.models.mlp import MLP
from runner.models.resnet_cifar import ResNet18
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def module_output(model: nn.Module, name: str, images: Tensor) -> Tensor:
    """The output of a module of a model in evaluation mode, copied at once."""
    outputs = []
    hook = model.get_submodule(name).register_forward_hook(lambda m, a, output: outputs.append(output.clone()))
    model.eval()
    with torch.no_grad():
        model(images)
    hook.remove()
    return outputs[-1]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (ResNet18(1, 5, width=4), ["stem", "stem.1", "stages.1.0.bn2", "stages.3", "head"]),
        (SmallCNN(1, 5, width=4), ["stages.2", "stages.0.1", "head"]),
        (ViT(1, (8, 8), 5, dim=12, depth=2, heads=3), ["blocks.0", "head"]),
    ],
    ids=["resnet", "cnn", "vit"],
)
def test_features_are_the_outputs_of_the_modules_and_leave_the_model_as_it_was(
    model: nn.Module, names: list[str], images: Tensor
) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        found = Extractor(model.train(), names)(images)
        assert found["head"].equal(model(images))
    assert list(found) == names
    for name in names:
        assert found[name].equal(module_output(model, name, images)), name
    assert not any(module.training or module._forward_hooks for module in model.modules())
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_a_later_operation_in_place_does_not_change_a_feature(images: Tensor) -> None:
    model = MLP(1, (8, 8), 5, hidden=[16])
    with torch.no_grad():
        found = Extractor(model, ["layers.0", "layers.1"])(images)
    assert (found["layers.0"] < 0).any()
    assert found["layers.1"].equal(found["layers.0"].relu())


def test_an_unknown_name_is_refused_with_the_nearest_and_the_known_ones() -> None:
    model = ResNet18(1, 5, width=4)
    with pytest.raises(UserError, match=r"features: the model has no layer 'stagse'; did you mean 'stages'") as error:
        Extractor(model, ["head", "stagse"])
    allowed = str(error.value).partition("allowed: ")[2]
    assert {"stages.2", "head"} <= {*allowed.split(" and ")[0].split(", ")}
    assert len(allowed) < 3000
    with pytest.raises(UserError, match="features: names no layer"):
        Extractor(model, [])


class Pair(nn.Module):
    """A module that does not run, and one whose output is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Module(), nn.Linear(2, 2)
        self.inner.forward = lambda images: {"images": images}

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images)["images"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "problem"), [("inner", "is a dict, not a tensor"), ("unused", "does not run")])
def test_a_module_without_a_tensor_is_refused(name: str, problem: str, images: Tensor) -> None:
    with pytest.raises(UserError, match=f"features: '{name}' {problem}"):
        Extractor(Pair(), [name])(images)


@pytest.mark.parametrize("training", [True, False])
def test_a_listener_gets_the_tensors_that_are_computed_with(training: bool, images: Tensor) -> None:
    model, names = ResNet18(1, 5, width=4).train(training), ["stages.0", "stages.3.1.bn2"]
    expected = model(images)
    seen: dict[str, Tensor] = {}
    logits = listener(model, names, seen.__setitem__)(images)
    assert logits.equal(expected)
    assert sorted(seen) == sorted(names)
    gradients = torch.autograd.grad(logits.square().sum(), list(seen.values()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
