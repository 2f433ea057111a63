"""Torchvision's models by name: heads and stems that fit the data, weights from a file, refusals in a sentence."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from extended import some
from extras import needs
from torch import Tensor, nn
from torchvision import models

from runner.base.errors import UserError
from runner.checkpoint.file import read
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.models.torchvision_zoo import classifier
from runner.train import build_run

pytestmark = pytest.mark.slow

NAME = "shufflenet_v2_x0_5"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like torch.hub's with the weights of two models."""
    made = tmp_path_factory.mktemp("home")
    folder = made / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("squeezenet1_1", NAME):
        torch.manual_seed(5)
        state = models.get_model(name, weights=None).state_dict()
        torch.save(state, folder / Path(models.get_model_weights(name).DEFAULT.url).name)
    return made


@pytest.fixture
def stored(home: Path, offline: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The weights of one of them, and no network."""
    monkeypatch.setenv("TORCH_HOME", str(home))
    (path,) = (home / "hub" / "checkpoints").glob("shufflenet*")
    return dict(torch.load(path))


def first(model: nn.Module) -> nn.Conv2d:
    return next(module for module in model.modules() if isinstance(module, nn.Conv2d))


@pytest.mark.parametrize("name", some(["resnet18", "mobilenet_v3_small", "squeezenet1_0", NAME, "mnasnet0_5"], 1, 2, 3))
def test_models_take_the_data_s_channels_and_give_its_classes(name: str) -> None:
    model = classifier(name, num_classes=7, in_channels=1)
    logits = model(torch.randn(2, 1, 64, 64))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(("name", "side"), [("googlenet", 64), ("inception_v3", 96)])
def test_models_with_auxiliary_heads_give_plain_logits_while_training(name: str, side: int) -> None:
    with torch.device("meta"):
        model = classifier(name, num_classes=5, in_channels=3)
        logits = model.train()(torch.empty(2, 3, side, side))
    assert isinstance(logits, Tensor)
    assert logits.shape == (2, 5)


def test_the_global_seed_alone_decides_the_weights() -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return classifier(NAME, num_classes=4, in_channels=2, image_size=(32, 32)).state_dict()

    one, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["conv1.0.weight"], other["conv1.0.weight"])


def test_a_new_stem_keeps_the_scale_of_the_features() -> None:
    colour, grey = first(classifier("resnet18", 10, 3)), first(classifier("resnet18", 10, 1))
    with torch.no_grad():
        scales = [conv(torch.randn(8, conv.in_channels, 32, 32)).std().item() for conv in (colour, grey)]
    assert scales[0] == pytest.approx(scales[1], rel=0.1)


def test_vit_is_built_for_the_size_of_the_images() -> None:
    with torch.device("meta"):
        model = classifier("vit_b_16", 10, 3, image_size=(32, 32))
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.extended
def test_trying_the_size_leaves_no_trace() -> None:
    torch.manual_seed(3)
    tried = classifier(NAME, 4, 3, image_size=(32, 32))
    after_trying = torch.rand(())
    torch.manual_seed(3)
    untried = classifier(NAME, 4, 3)
    assert torch.equal(after_trying, torch.rand(()))
    assert tried.training
    for name, value in untried.state_dict().items():
        assert torch.equal(tried.state_dict()[name], value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("alexnet", {"image_size": (8, 8)}, "model.name: alexnet does not support images of 8x8 pixels"),
        ("vit_b_16", {"image_size": (8, 8)}, "model.name: vit_b_16 does not support images of 8x8 pixels"),
        ("vit_b_16", {"image_size": (32, 48)}, "model.name: vit_b_16 does not support images of 32x48 pixels"),
        ("resnt18", {}, r"model\.name: .*'resnt18'; did you mean 'resnet18'"),
        ("fcn_resnet50", {}, "no torchvision classification model 'fcn_resnet50'"),
        ("resnet18", {"weights": "V7"}, r"model\.weights: resnet18 has no weights 'V7'\n.*IMAGENET1K_V1.*null"),
    ],
)
def test_what_there_is_not_is_a_sentence_with_the_key(name: str, options: dict[str, Any], said: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=said):
        classifier(name, 10, 3, **options)


@pytest.mark.parametrize("weights", ["DEFAULT", "IMAGENET1K_V1", "ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1"])
def test_weights_fill_all_but_a_head_for_other_classes(stored: dict[str, Tensor], weights: str) -> None:
    state = classifier(NAME, num_classes=10, weights=weights).state_dict()
    assert state["fc.weight"].shape == (10, 1024)
    assert all(torch.equal(state[name], value) for name, value in stored.items() if not name.startswith("fc."))


def test_weights_keep_their_head_for_their_own_classes_and_a_convolutional_one_is_replaced_too(
    stored: dict[str, Tensor],
) -> None:
    state = classifier(NAME, num_classes=1000, weights="DEFAULT").state_dict()
    assert torch.equal(state["fc.weight"], stored["fc.weight"])
    model = classifier("squeezenet1_1", num_classes=3, weights="DEFAULT")
    assert isinstance([each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)][-1], nn.Conv2d)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)


def test_a_new_head_guesses_evenly(stored: dict[str, Tensor]) -> None:
    model = classifier(NAME, num_classes=10, weights="DEFAULT").eval()
    loss = F.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.arange(4))
    assert loss.item() == pytest.approx(torch.tensor(10.0).log().item(), rel=0.05)


@needs("timm")
@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_pretrained_kernels_of_other_channels_are_those_of_timm(stored: dict[str, Tensor], channels: int) -> None:
    from timm.models import adapt_input_conv

    colour = first(classifier(NAME, 10, in_channels=3, weights="DEFAULT"))
    fitted = first(classifier(NAME, 10, in_channels=channels, weights="DEFAULT"))
    torch.testing.assert_close(fitted.weight, adapt_input_conv(channels, colour.weight))
    if channels == 1:
        assert torch.equal(fitted.weight, colour.weight.sum(1, keepdim=True))


@pytest.mark.parametrize("channels", [1, 6])
def test_pretrained_kernels_see_grey_images_as_they_did_in_colour(stored: dict[str, Tensor], channels: int) -> None:
    colour = first(classifier(NAME, 10, in_channels=3, weights="DEFAULT"))
    fitted = first(classifier(NAME, 10, in_channels=channels, weights="DEFAULT"))
    grey = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(fitted(grey.expand(-1, channels, -1, -1)), colour(grey.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize("content", [None, b"not weights"])
def test_weights_that_cannot_be_fetched_or_read_say_where_the_file_belongs(offline: Path, content: bytes) -> None:
    place = offline / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    if content is not None:
        place.parent.mkdir(parents=True)
        place.write_bytes(content)
    said = rf"model\.weights: .* could not be loaded(.|\n)*https://.*{re.escape(str(place))}"
    with pytest.raises(UserError, match=said):
        classifier("resnet18", 10, weights="DEFAULT")


IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
AVERAGE = {"mean": [pytest.approx(0.449)], "std": [pytest.approx(0.226)]}
GIVEN = ("data.normalize.mean=[0.5,0.5,0.5]", "data.normalize.std=[0.2,0.2,0.2]")


@pytest.mark.parametrize(
    ("words", "size", "normalize"),
    [
        (("data=cifar10",), 224, IMAGENET),
        (("data=cifar10", "data.image_size=64"), 64, IMAGENET),
        (("data=cifar10", *GIVEN), 224, {"mean": [0.5] * 3, "std": [0.2] * 3}),
        (("data=mnist",), 224, AVERAGE),  # over the colours, for grey images
    ],
)
def test_images_are_prepared_as_the_weights_want_them_unless_the_command_line_says_otherwise(
    words: tuple[str, ...], size: int, normalize: dict[str, Any], compose: Callable[..., Any]
) -> None:
    composition = compose("model=torchvision", f"model.name={NAME}", "model.weights=DEFAULT", *words)
    data = resolve_config(composition, Train).data
    assert (data.image_size, dataclasses.asdict(data.normalize)) == (size, normalize)


def test_random_weights_want_nothing(compose: Callable[..., Any]) -> None:
    composition = compose("model=torchvision", "data=cifar10")
    data, before = resolve_config(composition, Train).data, composition.values["data"]
    assert (data.image_size, dataclasses.asdict(data.normalize)) == (before["image_size"], before["normalize"])


@pytest.mark.extended
def test_trained_weights_are_fitted_frozen_and_said_to_be(
    stored: dict[str, Tensor], train: Callable[..., Any], accepted: Callable[..., Any]
) -> None:
    words = ("model=torchvision", f"model.name={NAME}", "model.weights=DEFAULT", "freeze=all-but-head")
    data = ("data=synthetic", "data.dataset.samples=24", "data.image_size=32", "data.batch_size=4")
    result = train(*words, *data, "max_steps=2", "evaluate.test=false")
    assert f"{NAME} (torchvision), " in result.out
    last = read(result.directory / "checkpoints" / "last.safetensors")["model"]
    trunk = [name for name in stored if not name.startswith("fc.")]
    assert all(torch.equal(last[name], stored[name]) for name in trunk), "weights and statistics are those of the file"
    row = next(line for line in result.out.splitlines() if line.startswith("  images"))
    assert "224 pixels, mean 0.485, 0.456, 0.406" in row
    assert "(from the pretrained weights, except data.image_size)" in row
    accepted("eval", f"ckpt_path={result.directory}", "split=val", "threads=1")


def test_weights_for_other_classes_can_be_given_a_deep_head(
    stored: dict[str, Tensor], compose: Callable[..., Any]
) -> None:
    words = ("model=torchvision", f"model.name={NAME}", "model.weights=DEFAULT", "model.head=[8]")
    composition = compose(*words, "data=synthetic", "data.dataset.samples=24", "data.image_size=32")
    model = build_run(resolve_config(composition, Train)).model
    assert [model.fc[0].in_features, model.fc[0].out_features, model.fc[2].in_features] == [1024, 8, 8]
    assert torch.equal(model.conv1[0].weight, stored["conv1.0.weight"])


@pytest.mark.parametrize("name", [NAME, "squeezenet1_1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_without_fetching_the_model_is_the_one_that_its_weights_are_of(
    name: str, channels: int, stored: dict[str, Tensor]
) -> None:
    fetched = classifier(name, 7, channels, weights="DEFAULT").state_dict()
    shaped = classifier(name, 7, channels, weights="DEFAULT", fetch_weights=False).state_dict()
    assert {key: value.shape for key, value in shaped.items()} == {key: value.shape for key, value in fetched.items()}


def test_a_model_that_recolours_its_input_for_its_weights_does_so_without_fetching_them(
    stored: dict[str, Tensor],
) -> None:
    model = classifier("googlenet", 7, weights="DEFAULT", fetch_weights=False)
    assert model.transform_input is True
    assert isinstance(model.fc, nn.Linear)
    assert model.fc.out_features == 7
    with torch.device("meta"):
        vit = classifier("vit_b_16", 7, weights="IMAGENET1K_SWAG_E2E_V1", image_size=(384, 384), fetch_weights=False)
    assert vit.image_size == 384


@pytest.mark.extended
@pytest.mark.parametrize(("name", "side"), some([("googlenet", 64), ("inception_v3", 96)], 0, several=True))
def test_weights_of_models_with_auxiliary_heads_are_taken_and_the_heads_left_out(
    name: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        state = models.get_model(name, weights=None, aux_logits=True, init_weights=False).state_dict()
    # Numbers of one element each, which take no memory to speak of.
    state = {key: torch.ones((), dtype=value.dtype).expand(value.shape) for key, value in state.items()}
    entry = models.get_model_weights(name).DEFAULT
    monkeypatch.setattr(type(entry), "get_state_dict", lambda *_, **__: state)
    monkeypatch.setattr("runner.models.torchvision_zoo.reachable", lambda _: True)
    model = classifier(name, 5, weights="DEFAULT", image_size=(side, side))
    assert model.transform_input is True
    found = model.state_dict()
    assert not [key for key in found if "aux" in key.lower()]
    first_kernel = next(key for key in found if key.endswith("conv.weight"))
    assert bool((found[first_kernel] == 1).all()), "the weights are those that were given"
    shaped = classifier(name, 5, weights="DEFAULT", fetch_weights=False).state_dict()
    assert {key: value.shape for key, value in shaped.items()} == {key: value.shape for key, value in found.items()}
    with torch.device("meta"):
        assert model.to("meta").train()(torch.empty(2, 3, side, side)).shape == (2, 5)
