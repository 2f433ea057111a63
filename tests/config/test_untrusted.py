"""What a config from a file may build where, and that building it fetches nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended import some
from torch import nn
from torchvision import models

from runner.base.errors import ConfigError, UserError
from runner.config import stored
from runner.config.composition import Composition
from runner.config.stored import merge_with_checkpoint
from runner.config.targets import build
from runner.config.untrusted import _remedy

Compose = Callable[..., Composition]
PLACES = (
    *("loss", "optimizer", "scheduler", "task", "model", "metrics.x", "callbacks.x", "logger.x", "data.dataset"),
    *("transform.train.0", "transform.mix", "model.nested", "loss.nested", "metrics.x.nested", "data.dataset.nested"),
)
DOWNLOADS = {
    "torchvision.datasets.MNIST": "data.dataset",
    "runner.data.sources.torchvision_sets.kmnist": "data.dataset",
    "torchvision.models.resnet18": "model",
    "torchvision.models.segmentation.fcn_resnet50": "model",
    "runner.models.torchvision_zoo.classifier": "model",
    "runner.tracking.loggers.TensorBoard": "logger",
}


def with_node(values: dict[str, Any], key: str, node: dict[str, Any]) -> dict[str, Any]:
    """A config with something else at a dotted key."""
    made = copy.deepcopy(values)
    inner: Any = made
    *parents, last = key.split(".")
    if parents[:1] == ["transform"] and last == "0":
        made["transform"][parents[1]] = [node]
        return made
    for part in parents:
        inner[part] = inner.get(part) or {}
        inner = inner[part]
    inner[last] = node
    return made


@pytest.mark.parametrize("target", DOWNLOADS)
def test_a_target_that_downloads_or_writes_is_built_in_its_own_section_alone(target: str, compose: Compose) -> None:
    line = compose()
    for place in PLACES:
        text = stored.dump(with_node(line.values, place, {"_target_": target, "root": "evil", "download": True}))
        if place.startswith(DOWNLOADS[target]):
            merge_with_checkpoint(text, "theirs.pt", line)
            continue
        with pytest.raises(ConfigError) as caught:
            merge_with_checkpoint(text, "theirs.pt", line)
        [problem] = caught.value.problems
        section = "data.dataset" if place.startswith("data.") else place.split(".")[0]
        assert problem.key == f"{place}._target_"
        assert f"which is not built in the section {section}" in problem.message
        assert "trust=" not in problem.allowed


def test_the_users_word_counts_in_its_own_section_alone(compose: Compose) -> None:
    line = compose("data=mnist")
    node = {"_target_": "runner.data.sources.torchvision_sets.mnist", "root": "evil", "download": True}
    with pytest.raises(ConfigError, match=r"loss\._target_"):
        merge_with_checkpoint(stored.dump(with_node(line.values, "loss", node)), "theirs.pt", line)
    own = {"_target_": "strange_package.Net"}
    line = compose("model._target_=strange_package.Net")
    with pytest.raises(ConfigError, match=r"loss\._target_"):
        merge_with_checkpoint(stored.dump(with_node(line.values, "loss", own)), "theirs.pt", line)


def test_downloads_of_data_are_off_at_every_depth(compose: Compose) -> None:
    inner = {"_target_": "torchvision.datasets.MNIST", "root": "evil", "download": True}
    node = {
        "_target_": "torch.utils.data.ConcatDataset",
        "datasets": [inner, {"_target_": "torch.utils.data.Subset", "dataset": inner, "indices": [0]}],
        "_args_": [inner],
        "download": True,
    }
    text = stored.dump(with_node(compose().values, "data.dataset", node))
    values, changed = merge_with_checkpoint(text, "theirs.pt", compose())
    assert "True" not in str(values["data"]["dataset"])
    assert not changed


def never(*args: Any, **options: Any) -> Any:
    raise AssertionError("something was fetched")


BUILDERS = [
    {"_target_": "torchvision.models.resnet18", "weights": "DEFAULT"},
    {"_target_": "torchvision.models.resnet18", "pretrained": True},
    {"_target_": "torchvision.models.resnet18", "_args_": ["IMAGENET1K_V1"]},
    {"_target_": "torchvision.models.get_model", "name": "resnet18", "weights": "DEFAULT"},
    {"_target_": "torchvision.models.get_model", "_args_": ["lraspp_mobilenet_v3_large"]},
    {"_target_": "torchvision.models.segmentation.lraspp_mobilenet_v3_large"},
    {"_target_": "torchvision.models.segmentation.lraspp_mobilenet_v3_large", "weights": "DEFAULT"},
    {"_target_": "torchvision.models.segmentation.lraspp_mobilenet_v3_large", "pretrained_backbone": True},
    {
        "_target_": "runner.models.torchvision_zoo.classifier",
        "name": "resnet18",
        "num_classes": 3,
        "weights": "DEFAULT",
    },
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("nested", some([False, True], 1), ids=["alone", "nested"])
@pytest.mark.parametrize("node", BUILDERS, ids=str)
def test_a_model_that_takes_its_weights_from_a_checkpoint_fetches_none(
    node: dict[str, Any], nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", never)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", never)
    monkeypatch.setattr("runner.models.torchvision_zoo.reachable", lambda _: True)
    node = node | {"fetch_weights": True} if "classifier" in node["_target_"] else node
    outer = {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Sequential", "_args_": [node]}]}
    with pytest.raises(AssertionError, match="something was fetched"):
        build("model", node)
    assert isinstance(build("model", outer if nested else node, fetch=False), nn.Module)


def test_without_weights_the_other_arguments_of_a_builder_stay() -> None:
    made = build("model", {"_target_": "torchvision.models.vit_b_32", "image_size": 64, "num_classes": 3}, fetch=False)
    assert (made.image_size, made.heads[-1].out_features) == (64, 3)
    assert isinstance(made, models.VisionTransformer)


@pytest.mark.parametrize(("named", "reason"), [({"name": "nothing"}, "Unknown model nothing"), ({}, "missing")])
def test_a_name_that_no_builder_has_is_refused(named: dict[str, str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build("model", {"_target_": "torchvision.models.get_model", **named}, fetch=False)


# What is advised


def test_trust_that_was_given_is_not_advised_again() -> None:
    assert "trust=[own_parts]" in _remedy("own_parts.Net", [], "model")
    for path in ("own_parts.Nte", "own_parts.Net.inner", "own_parts.Alias"):
        assert "a public class or function" in _remedy(path, ["own_parts"], "model")
    assert "trust" not in _remedy("torch.hub.load", ["own_parts"], "loss")
    assert "torch.nn.modules" in _remedy("torch.hub.load", [], "loss")


@pytest.mark.parametrize(("name", "reason"), [("ImageFolder", "No such file"), ("MNIST", "Dataset not found")])
def test_files_that_are_not_there_are_a_sentence_for_a_nested_data_set_too(name: str, reason: str) -> None:
    inner = {"_target_": f"torchvision.datasets.{name}", "root": "/nowhere"}
    for key, node in (
        ("", inner),
        (r"\.datasets\.0", {"_target_": "torch.utils.data.ConcatDataset", "datasets": [inner]}),
    ):
        with pytest.raises(UserError, match=rf"^data\.dataset{key}: .*{name} refuses its arguments: .*{reason}"):
            build("data.dataset", node)
