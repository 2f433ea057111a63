"""timm's models by name: channels, classes and sizes of the data, preprocessing, refusals in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from extras import needs

from runner.base.errors import UserError
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.models.timm_zoo import classifier, preferred_data

pytestmark = needs("timm")

NAME = "test_resnet"  # the smallest ones of timm
VIT = "test_vit"


@pytest.mark.parametrize("name", [NAME, VIT])
def test_models_take_the_channels_and_the_size_of_the_data_and_give_its_classes(name: str) -> None:
    model = classifier(name, num_classes=7, in_channels=1, image_size=(32, 32))
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 7)


def test_options_reach_the_model() -> None:
    assert classifier(NAME, 2, options={"drop_rate": 0.5}).drop_rate == 0.5  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"drop_pth": 1}, "drop_pth"), ({"checkpoint_path": "a.pth"}, "checkpoint_path"), ({"in_chans": 1}, "in_chans")],
)
def test_options_that_are_not_the_model_s_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        classifier(NAME, 2, options=options)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet10x", "no timm model 'resnet10x'; did you mean 'resnet10t'"),
        ("resnet18.a1_in1kk", "no weights 'a1_in1kk'; did you mean 'a1_in1k'"),
        ("hf-hub:timm/resnet18", "no timm model"),
        ("local-dir:/tmp", "no timm model"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        classifier(name, 2)
    assert caught.value.problems[0].key == "model.name"


def test_weights_that_cannot_be_loaded_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.models._builder.load_pretrained", Mock(side_effect=OSError("the network is off")))
    monkeypatch.setattr("runner.models.checks.reachable", lambda url: True)
    with pytest.raises(
        UserError, match=r"the network is off\n.*https://huggingface.co/timm/test_resnet.*init_from=FILE"
    ) as caught:
        classifier(NAME, 2, pretrained=True)
    assert caught.value.problems[0].key == "model.pretrained"


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    asked = list[str]()
    monkeypatch.setattr("runner.models.checks.reachable", lambda url: bool(asked.append(url)))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"huggingface.co does not answer.*does not have them\n.*init_from=FILE"):
        classifier(NAME, 2, pretrained=True)
    assert (asked, constants.HF_HUB_OFFLINE) == (["https://huggingface.co"], False)


def test_without_timm_the_command_to_install_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"pip install 'runner\[timm\]'"):
        classifier(NAME, 2)


def test_weights_bring_their_preprocessing_unless_the_command_line_says_otherwise(
    compose: Callable[..., Any],
) -> None:
    own = preferred_data(VIT, preprocessing=True)
    assert own == preferred_data(VIT, pretrained=True)
    assert preferred_data(VIT) == preferred_data(VIT, pretrained=True, preprocessing=False) == {}

    def data(*words: str) -> Any:
        return resolve_config(compose("data=image_folder", "model=timm", f"model.name={VIT}", *words), Train).data

    wanted = data("model.preprocessing=true")
    assert (wanted.image_size, wanted.normalize.mean, wanted.normalize.std) == (160, [0.5] * 3, [0.5] * 3)
    assert data("model.pretrained=true").image_size == 160
    assert data("model.preprocessing=true", "data.image_size=64").image_size == 64
    assert data().image_size == 224


def test_an_initialisation_that_would_overwrite_trained_weights_is_refused(problems: Callable[..., Any]) -> None:
    assert "init" in problems("model=timm", "model.pretrained=true", "init=kaiming")
    assert "init" not in problems("model=timm", "init=kaiming")
