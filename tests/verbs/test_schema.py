"""`show --schema`: JSON schemas for editors, which accept what is shipped and refuse what a run would refuse."""

from __future__ import annotations

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
from runner.verbs.options import _schema

NAMES = [*VERBS, *Sources().groups()]


@pytest.fixture(scope="module")
def errors() -> Callable[[str, str], list[str]]:
    """What the schema of a primary config or group says about a text of YAML."""
    made: dict[str, Draft7Validator] = {}

    def look(name: str, text: str) -> list[str]:
        if name not in made:
            Draft7Validator.check_schema(schema := _schema(name, Sources()))
            made[name] = Draft7Validator(schema)
        return [error.message for error in made[name].iter_errors(yaml.load(text, Loader=get_yaml_loader()) or {})]

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
])  # fmt: skip
def test_a_mistake_is_refused(name: str, text: str, errors: Callable[..., list[str]]) -> None:
    assert errors(name, text)


@pytest.mark.parametrize(("name", "text"), [
    ("train", "epochs: ${oc.env:EPOCHS}\nckpt_path: null"),
    ("train", "search: {sampler: tpe, optimizer: {lr: 'log(1e-4, 1e-1)'}}"),
    ("model", "_target_: my_package.Net\nwidht: 3"),
    ("optimizer", "generator: {_target_: torch.optim.Adam, lr: 0.1}"),
    ("logger", "csv: {_target_: runner.tracking.loggers.CSV}"),
])  # fmt: skip
def test_what_a_run_takes_is_accepted(name: str, text: str, errors: Callable[..., list[str]]) -> None:
    assert errors(name, text) == []


def test_comments_are_descriptions() -> None:
    properties = _schema("train", Sources())["properties"]
    assert properties["epochs"]["description"] in text_of(Sources().folders[0] / "train.yaml")
    assert "description" in properties["checkpoint"]["properties"]["keep"]
    (mlp,) = (case["then"] for case in _schema("model", Sources())["allOf"] if "MLP" in str(case["if"]))
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


def test_the_program_prints_the_schema(accepted: Callable[..., Any], rejected: Callable[..., Any]) -> None:
    assert json.loads(accepted("show", "--schema").out) == _schema("train", Sources())
    assert json.loads(accepted("show", "--schema", "loss").out) == _schema("loss", Sources())
    assert "loss" in rejected("show", "--schema", "los").err
