"""Features by name: the same numbers as in the middle of the model, whatever comes after them."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import Tensor, nn

from runner.config.errors import UserError
from runner.models.features import Extractor, listener
from runner.models.mlp import MLP
from runner.models.resnet_cifar import ResNet18
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT


@pytest.fixture
def images() -> Tensor:
    torch.set_num_threads(1)
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def listened(model: nn.Module, name: str, images: Tensor) -> Tensor:
    """What a module of a model in evaluation mode gives, copied at once."""
    seen = []
    hook = model.get_submodule(name).register_forward_hook(lambda m, a, output: seen.append(output.clone()))
    model.eval()
    with torch.no_grad():
        model(images)
    hook.remove()
    return seen[-1]


def test_features_of_a_traced_model_are_what_its_modules_give(images: Tensor) -> None:
    model = ResNet18(1, 5, width=4)
    names = ["stem", "stem.1", "stages.1.0.bn2", "stages.3", "head"]
    with torch.no_grad():
        found = Extractor(model, names)(images)
    assert list(found) == names
    for name in names:
        assert found[name].equal(listened(model, name, images)), name


def test_what_works_in_place_later_does_not_show(images: Tensor) -> None:
    model = MLP(1, (8, 8), 5, hidden=[16])
    with torch.no_grad():
        found = Extractor(model, ["layers.0", "layers.1"])(images)
    assert (found["layers.0"] < 0).any()
    assert found["layers.1"].equal(found["layers.0"].relu())


def test_names_of_the_same_operation_all_get_it(images: Tensor) -> None:
    model = ResNet18(1, 5, width=4)
    with torch.no_grad():
        found = Extractor(model, ["stages", "stages.3", "stages.3.1", "stages.3.1.add", "mean"])(images)
    assert found["stages"].equal(found["stages.3"])
    assert found["stages"].equal(found["stages.3.1"])
    assert found["stages"].equal(found["stages.3.1.add"].relu())
    assert found["mean"].equal(found["stages"].mean(dim=(2, 3)))


def test_the_tokens_of_a_transformer_are_features_too(images: Tensor) -> None:
    model = ViT(1, (8, 8), 5, dim=12, depth=2, heads=3)
    with torch.no_grad():
        found = Extractor(model, ["blocks.0", "head"])(images)
        assert found["head"].equal(model.eval()(images))
    assert found["blocks.0"].equal(listened(model, "blocks.0", images))
    assert found["blocks.0"].shape == (3, 4, 12)


def test_features_of_a_model_whose_forward_looks_at_sizes(images: Tensor) -> None:
    model = SmallCNN(1, 5, width=4)
    names = ["stages.2", "stages.0.1", "head"]
    with torch.no_grad():
        found = Extractor(model, names)(images)
    assert list(found) == names
    for name in names:
        assert found[name].equal(listened(model, name, images)), name
    assert (found["stages.0.1"] < 0).any(), "the ReLU after it works in place"
    assert not any(module._forward_hooks for module in model.modules())


def test_the_model_is_left_in_evaluation_mode_with_the_same_weights(images: Tensor) -> None:
    model = ResNet18(1, 5, width=4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    features = Extractor(model.train(), ["stem"])
    with torch.no_grad():
        features(images)
    assert not any(module.training for module in model.modules())
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_layers_of_torchvision_have_the_names_of_torchvision_and_those_inside_them() -> None:
    from torchvision.models.feature_extraction import create_feature_extractor

    model = torchvision.models.swin_t(weights=None, num_classes=3).eval()
    inputs = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    names = ["features.1.0.stochastic_depth_1", "features.1.0.add", "features.1"]
    with torch.no_grad():
        found = Extractor(model, names)(inputs)
        expected = create_feature_extractor(model, names[:2], suppress_diff_warning=True)(inputs)
        assert Extractor(model, ["features.1.0.mlp.0"])(inputs)["features.1.0.mlp.0"].shape[-1] == 4 * 96
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("model", [ResNet18(1, 5, width=4), SmallCNN(1, 5, width=4)], ids=["traced", "listened to"])
def test_a_name_that_there_is_not_is_told_with_the_nearest_and_those_that_there_are(model: nn.Module) -> None:
    with pytest.raises(UserError, match=r"tensors: the model has no layer 'stagse'; did you mean 'stages'") as error:
        Extractor(model, ["head", "stagse"], key="tensors")
    assert "stages.2" in str(error.value).partition("allowed: ")[2]
    assert "head" in str(error.value)
    assert len(str(error.value)) < 3000
    with pytest.raises(UserError, match="features: names no layer"):
        Extractor(model, [])


class Sizes(nn.Module):
    """Has a number among its operations, and a module that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Conv2d(1, 2, 3), nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        features = self.used(images)
        return features.view(features.size(0), -1)


class Looking(Sizes):
    """The same, and cannot be traced."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) if len(images) > 0 else images


def test_what_is_no_tensor_or_does_not_run_is_told(images: Tensor) -> None:
    with pytest.raises(UserError, match="features: 'size' is a int, not a tensor"):
        Extractor(Sizes(), ["size"])(images)
    with pytest.raises(UserError, match="the model has no layer 'unused'"):
        Extractor(Sizes(), ["unused"])
    with pytest.raises(UserError, match="'unused' does not run"):
        Extractor(Looking(), ["unused"])(images)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (ResNet18(1, 5, width=4), ["stages.0", "mean", "stages.3.1.bn2"]),
        (SmallCNN(1, 5, width=4, dropout=0.0), ["stages.1", "head"]),
    ],
    ids=["traced", "listened to"],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_listener_tells_of_what_is_computed_with(
    model: nn.Module, names: list[str], training: bool, images: Tensor
) -> None:
    model.train(training)
    expected = model(images)
    seen: dict[str, Tensor] = {}
    logits = listener(model, names, seen.__setitem__)(images)
    assert logits.equal(expected)
    assert sorted(seen) == sorted(names)
    gradients = torch.autograd.grad(logits.square().sum(), list(seen.values()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    with pytest.raises(UserError, match="tensors: the model has no layer 'mena'"):
        listener(model, ["mena"], seen.__setitem__, "tensors")
