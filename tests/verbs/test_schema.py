"""`show --schema`: JSON schemas for editors, which accept what is shipped and refuse what a run would refuse."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from omegaconf._utils import get_yaml_loader

from runner.config.schema import VERBS
from runner.config.sources import Sources, text_of
from runner.verbs._schema import json_schemas
from runner.verbs.options import _commented

NAMES = [*VERBS, *Sources().groups()]


@functools.cache
def schemas() -> dict[str, Any]:
    sources = Sources()
    return json_schemas(NAMES, sources, {(each.option, each.key): each.comment for each in _commented(sources)})


@pytest.fixture(scope="module")
def errors() -> Callable[[str, str], list[str]]:
    """What the schema of a primary config or group says about a text of YAML."""
    validators: dict[str, Draft7Validator] = {}

    def look(name: str, text: str) -> list[str]:
        if name not in validators:
            Draft7Validator.check_schema(schemas()[name])
            validators[name] = Draft7Validator(schemas()[name])
        values = yaml.load(text, Loader=get_yaml_loader()) or {}
        return [error.message for error in validators[name].iter_errors(values)]

    return look


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_file_is_valid(name: str, errors: Callable[..., list[str]]) -> None:
    folder = Sources().folders[0]
    files = [folder / f"{name}.yaml"] if name in VERBS else sorted((folder / name).glob("*.yaml"))
    assert files
    assert {path.name: found for path in files if (found := errors(name, text_of(path)))} == {}


@pytest.mark.parametrize(("name", "text"), [
    ("train", "widht: 1"),
    ("train", "epochs: 0"),
    ("train", "amp: sometimes"),
    ("train", "checkpoint: {async: 3}"),
    ("train", "model: {_target_: runner.models.mlp.MLP, widht: 3}"),
    ("eval", "split: tests"),
    ("model", "_target_: runner.models.mlp.MLP\nwidht: 3"),
    ("optimizer", "_target_: torch.optim.AdamW\nlr: fast"),
    ("callbacks", "early: {_target_: runner.engine.callbacks.EarlyStopping, patience: soon}"),
    ("data", "normalize: {men: [1]}"),
    ("transform", "train: [{_target_: runner.data.transforms.augment.RandomShift, widht: 1}]"),
    ("experiment", "epoch: 3"),
    ("train", "model: null"),
    ("train", "metrics: [{_target_: torchmetrics.Accuracy}]"),
    ("optimizer", "_target_: torch.optim.AdamW\nlr: [1]"),
    ("model", "_target_: runner.models.mlp.MLP\ndropout: null"),
])  # fmt: skip
def test_a_mistake_is_refused(name: str, text: str, errors: Callable[..., list[str]]) -> None:
    assert errors(name, text)


@pytest.mark.parametrize(("name", "text"), [
    ("train", "epochs: ${oc.env:EPOCHS}\nckpt_path: null"),
    ("train", "search: {sampler: tpe, optimizer: {lr: {log: [1e-4, 1e-1]}}}"),
    ("model", "_target_: my_package.Net\nwidht: 3"),
    ("optimizer", "generator: {_target_: torch.optim.Adam, lr: 0.1}"),
    ("train", "name: 2024\ntags: [2024, v1]\ndevice: 0\nmax_time: 90\nmetrics: null"),
    ("logger", "csv: {_target_: runner.tracking.loggers.Csv}"),
])  # fmt: skip
def test_what_a_run_takes_is_accepted(name: str, text: str, errors: Callable[..., list[str]]) -> None:
    assert errors(name, text) == []


def test_comments_are_descriptions() -> None:
    properties = schemas()["train"]["properties"]
    assert properties["epochs"]["description"] in text_of(Sources().folders[0] / "train.yaml")
    assert "description" in properties["checkpoint"]["properties"]["keep"]
    (mlp,) = (case["then"] for case in schemas()["model"]["allOf"] if "MLP" in str(case["if"]))
    assert mlp["properties"]["dropout"]["description"]


def test_copied_and_new_options_name_their_schema(accepted: Callable[..., Any], workdir: Path) -> None:
    copied, _ = accepted("copy", "model=mlp", "my_conf"), accepted("new", "callback", "MyCallback")
    command = copied.out.splitlines()[0].partition("python -m runner ")[2]
    assert "my_conf/.schema/callbacks.json" in accepted(*command.split()).out
    for path in (Path("my_conf/model/my_mlp.yaml"), Path("my_conf/callbacks/my_callback.yaml")):
        line, rest = path.read_text().split("\n", 1)
        schema = json.loads((path.parent / line.partition("$schema=")[2]).read_text())
        assert line.startswith("# yaml-language-server: $schema=")
        assert list(Draft7Validator(schema).iter_errors(yaml.safe_load(rest))) == []
    described = accepted("list", "model", "--config-dir", "my_conf").out
    assert "my_mlp" in described
    assert "yaml-language-server" not in described


def test_the_program_prints_the_schema(
    accepted: Callable[..., Any], rejected: Callable[..., Any], workdir: Path
) -> None:
    Path("train").mkdir()  # which is not a folder of options
    assert json.loads(accepted("show", "--schema").out) == schemas()["train"]
    assert json.loads(accepted("show", "--schema", "loss").out) == schemas()["loss"]
    assert "loss" in rejected("show", "--schema", "los").err
    assert "train model" in rejected("show", "--schema", "train", "model").err


def test_presets_keep_their_package_and_own_groups_may_hold_anything(
    accepted: Callable[..., Any], workdir: Path
) -> None:
    accepted("copy", "experiment=fashion_cnn", "my_conf")
    assert (
        "small_cnn"
        in accepted("train", "--config-dir", "my_conf", "experiment=my_fashion_cnn", "--info", "defaults").out
    )
    for name, text in (("backbone/a", "# @package model.backbone\nwidth: 3\n"), ("callbacks/p", "# @package _global_\nepochs: 3\n"),
                       ("transform/own", "p: 1\n"), ("callbacks/more/b", "a: 1\n")):  # fmt: skip
        path = workdir / f"my_conf/{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}")
    written = accepted("show", "--schema", "my_conf").out.split()
    assert {"my_conf/.schema/backbone.json", "my_conf/.schema/callbacks/more.json"} <= set(written)
    of_callbacks = json.loads((workdir / "my_conf/.schema/callbacks.json").read_text())
    valid = {"early": {"_target_": "runner.engine.callbacks.EarlyStopping", "patience": 3}}
    assert list(Draft7Validator(of_callbacks).iter_errors(valid)) == []
