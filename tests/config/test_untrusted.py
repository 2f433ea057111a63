"""What a config from a file may build where, and that building it fetches nothing."""

from __future__ import annotations

import copy
import dataclasses
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended import some
from torch import nn
from torchvision import models

from runner.base.errors import ConfigError, UserError
from runner.config import keys, stored
from runner.config.composition import Composition
from runner.config.schema.train import Train
from runner.config.stored import merge_with_checkpoint, resolve_with_checkpoint
from runner.config.targets import build
from runner.config.untrusted import _remedy, may_write_cache

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
    in_list = key.endswith(".0")
    keys.put(made, key.removesuffix(".0"), [node] if in_list else node)
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


# Whom a file may make the program trust, and what it may ask for


def test_a_file_cannot_say_whom_to_trust_or_where_to_write(compose):
    values = compose().values | {"trust": ["os"], "output_root": "/", "ckpt_path": "elsewhere.pt"}
    loaded, changed = merge_with_checkpoint(stored.dump(values), "here", compose("trust=[mine]", "ckpt_path=here.pt"))
    assert (loaded["trust"], loaded["output_root"], loaded["ckpt_path"]) == (["mine"], "outputs", "here.pt")
    assert "ckpt_path" not in [key for key, *_ in changed]


@pytest.mark.parametrize(
    "key", ["model", "metrics.x", "callbacks.x", "transform.train.0", "model.deep.inside", "hidden"]
)
def test_a_file_may_build_nothing_strange_wherever_it_names_it(key, compose):
    values = with_node(compose("model=mlp").values, key, {"_target_": "os.system", "command": "touch hacked"})
    with pytest.raises(ConfigError) as caught:
        merge_with_checkpoint(stored.dump(values), "theirs.pt", compose())
    [problem] = caught.value.problems
    assert (problem.key, problem.origin) == (f"{key}._target_", "theirs.pt")
    assert "'os.system' comes from a file and its package is not trusted" in problem.message
    assert [word for word in ("trust=[os]", "conf/local", "RUNNER_TRUST") if word not in problem.allowed] == []


def test_what_the_command_line_names_is_the_users_word_in_its_own_section_alone(compose):
    own, mnist = {"_target_": "strange_package.Net"}, {"_target_": "runner.data.sources.torchvision_sets.mnist"}
    text = stored.dump(with_node(compose("model=mlp").values, "model", own))
    for word in ("model._target_=strange_package.Net", "model=small_cnn"):
        loaded, _ = merge_with_checkpoint(text, "theirs.pt", line := compose(word))
        assert loaded["model"]["_target_"] == line.values["model"]["_target_"]
    for words, node in (("model._target_=strange_package.Net", own), ("data=mnist", mnist)):
        line = compose(words)
        with pytest.raises(ConfigError, match=r"loss\._target_"):
            merge_with_checkpoint(stored.dump(with_node(line.values, "loss", node)), "theirs.pt", line)


ADDRESS = "is the address .*: "
# A key, what a file has there, why that is refused, and the words that allow it, if any do.
REFUSED = [
    *(("name", name, "cannot be", [f"name={name}"]) for name in ("../up", "/absolute", "a/../../b")),
    *(("name", name, "cannot be", []) for name in ("line\nend", "\x1b[2J", "x" * 300, "")),
    *((key, value, "cannot be .*, as it comes from a file", [f"{key}=2"]) for key, value in (
        ("threads", 10**6), ("devices", 10**6), ("devices", list(range(2000))), ("max_restarts", 10**9), ("epochs", 10**15),
        ("data.num_workers", 10**6), ("data.prefetch", 10**6), ("data.split.folds", 10**9), ("data.image_size", 10**6),
    )),
    *((key, value, "cannot be .*, as it comes from a file", []) for key, value in (
        ("model.dropout", 1e9), ("model.hidden", [3, 10**9]), ("task.num_classes", 10**9),
        ("transform.eval", [{"_target_": "torchvision.transforms.Resize", "size": 10**9}]),
    )),
    *((key, value, ADDRESS + re.escape(word), [f"+{shlex.split(word)[0]}"]) for key, value, word in (
        ("data.root", "http://host/photos", "data.root=http://host/photos"),
        ("data.root", "s3://bucket/a b", "'data.root=\"s3://bucket/a b\"'"),
        ("data.dataset.root", "simplecache::s3://bucket", "data.dataset.root=simplecache::s3://bucket"),
        ("data.dataset.train", ["a.tar", "memory://b"], "'data.dataset.train=[a.tar,memory://b]'"),
        ("model.hidden", [{"a": "ftp://b"}], "'model.hidden=[{a:ftp://b}]'"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("key", "given", "why", "words"), REFUSED, ids=[f"{row[0]}={row[1]}"[:40] for row in REFUSED])
def test_a_file_may_not_have_what_takes_too_much_or_leads_elsewhere(key, given, why, words, original, compose) -> None:
    keys.put(original, key, given)
    text = stored.dump(original)
    with pytest.raises(ConfigError, match=rf"(?s){key}[\w.]*: {why}"):
        merge_with_checkpoint(text, "c.pt", compose())
    if words:
        values, _ = merge_with_checkpoint(text, "c.pt", compose(*words))
        assert keys.at(values, key) == (2 if words[0].endswith("=2") else given)


def test_an_address_where_nothing_is_built_or_that_is_for_people_is_not_refused(original, compose) -> None:
    original |= {"notes": "see https://host/page", "tags": ["https://host"]}
    merge_with_checkpoint(stored.dump(original), "c.pt", compose())
    keys.put(original, "data.root", "http://host/photos")
    merge_with_checkpoint(stored.dump(original), "c.pt", compose(), ["model"])
    with pytest.raises(ConfigError, match="is the address"):
        merge_with_checkpoint(stored.dump(original), "c.pt", compose(), ["data"])


def test_a_file_may_weigh_a_term_of_a_loss_with_any_float(original, compose) -> None:
    original["task"]["style_weight"] = 1e10
    values, _ = merge_with_checkpoint(stored.dump(original), "c.pt", compose())
    assert values["task"]["style_weight"] == 1e10


def test_loggers_that_may_send_elsewhere_come_from_the_command_line_alone(original, compose, monkeypatch) -> None:
    monkeypatch.setenv("RUNNER_TRUST", "yaml")
    original["logger"] = {
        "csv": {"_target_": "runner.tracking.loggers.Csv"},
        "mlflow": {"_target_": "runner.tracking.trackers.loggers.MLflow", "tracking_uri": "http://other"},
        "own": {"_target_": "yaml.YAMLObject", "url": "http://other"},
    }
    text = stored.dump(original)

    def loggers(*words: str, **values: Any) -> dict[str, Any]:
        line = compose(*words)
        return merge_with_checkpoint(text, "c.pt", dataclasses.replace(line, values=line.values | values))[0]["logger"]

    assert list(loggers()) == ["csv"]
    assert list(loggers("logger.mlflow.wait_s=1")) == ["csv"], "a part of it does not bring the rest back"
    assert loggers("logger=mlflow")["mlflow"]["tracking_uri"] is None
    in_folder = loggers(logger=compose("logger=mlflow").values["logger"])
    assert (list(in_folder), in_folder["mlflow"]["tracking_uri"]) == (["csv", "mlflow"], None)


def test_a_file_cannot_have_data_fetched(original, compose) -> None:
    original["data"]["download"] = True
    original["data"]["dataset"] = {"_target_": "runner.data.sources.torchvision_sets.mnist", "download": True}
    text = stored.dump(original)
    values, differences = merge_with_checkpoint(text, "c.pt", compose())
    assert (values["data"]["download"], values["data"]["dataset"]["download"]) == (False, False)
    assert not any("download" in key for key, _, _ in differences)
    assert merge_with_checkpoint(text, "c.pt", compose("data.download=true"))[0]["data"]["download"] is True


def test_a_cache_is_made_only_in_a_folder_that_the_user_has_named(compose) -> None:
    def allowed(text: str, line: Composition) -> bool:
        return may_write_cache(resolve_with_checkpoint(text, "c.pt", line, Train)[0], line.values)

    line = compose()
    original = line.values
    assert allowed(stored.dump(original), line)
    for key in ("root", "cache_dir"):
        elsewhere = copy.deepcopy(original)
        elsewhere["data"][key] = "/elsewhere"
        text = stored.dump(elsewhere)
        assert not allowed(text, line)
        assert allowed(text, compose(f"data.{key}=/elsewhere"))


def test_data_of_an_own_option_that_says_only_the_data_set_have_the_defaults(original, compose) -> None:
    line = compose()
    text, whole = stored.dump(original | {"data": original["data"] | {"download": True}}), line.values["data"]
    short = dataclasses.replace(line, values=line.values | {"data": {"dataset": whole["dataset"]}})
    values, _ = merge_with_checkpoint(text, "c.pt", short)
    assert values["data"]["download"] is False
    config, _ = resolve_with_checkpoint(stored.dump(line.values), "c.pt", short, Train)
    assert may_write_cache(config, short.values)


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
    outer = {"_target_": "torch.utils.data.ConcatDataset", "datasets": [inner]}
    for key, node in (("", inner), (r"\.datasets\.0", outer)):
        with pytest.raises(UserError, match=rf"^data\.dataset{key}: .*{name} refuses its arguments: .*{reason}"):
            build("data.dataset", node)
