"""The shipped YAML: every option works, says what it is, and agrees with the schema."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from runner.config import keys
from runner.config.composition import Composition
from runner.config.keys import to_plain
from runner.config.load import problems_in
from runner.config.schema import VERBS
from runner.config.schema.train import Train
from runner.config.sources import Sources, shipped
from runner.config.validate import typed
from runner.config.yaml_files import compose as compose_yaml
from runner.config.yaml_files import walk

SOURCES = Sources()
OPTIONS = [option for group in SOURCES.groups() for option in SOURCES.options(group)]
FILES = sorted(shipped().rglob("*.yaml"))
FILES = [path for path in FILES if "local" not in path.relative_to(shipped()).parts]

groups = pytest.mark.parametrize("group", SOURCES.groups())
files = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(shipped())))


@pytest.fixture
def compose(compose: Callable[..., Composition]) -> Callable[..., Composition]:
    """What words amount to; of several values, the first."""
    return lambda *words, verb="train": compose("--multirun", *words, verb=verb)


@groups
def test_every_option_composes_to_a_config_without_a_mistake(group, compose):
    wrong = {}
    for option in SOURCES.options(group):
        # Samples of another kind than (image, target) have no batch transforms, which are on by default
        whole_samples = group == "data" and "\nimages: " in option.path.read_text()
        needed = {
            "own": ["data.dataset._target_=runner.data.sources.digits.digits"],
            "coco": ["experiment=detection"],
            "yolo": ["experiment=detection"],
            "segmentation_folder": ["experiment=segmentation"],
        }.get(option.name, [])
        composition = compose(f"{group}={option.name}", *needed, *["transform=none"] * whole_samples)
        assert composition.group_choices[group] == option.name
        wrong[option.name] = problems_in(composition.values, composition, Train)[1]
    assert not any(wrong.values()), wrong


@groups
def test_every_option_begins_with_what_it_is_and_a_command_that_selects_it(group, compose):
    for option in SOURCES.options(group):
        assert re.fullmatch(r"\S.{10,}[.?]", option.description), option.description
        command = shlex.split(option.comments[1])
        assert command[:4] == ["python", "-m", "runner", "train"]
        words = command[4:]
        assert f"{group}={option.name}" in words
        if len(words) > 1:  # with one word it is what the test above composes
            composition = compose(*words)
            assert composition.group_choices[group] == option.name
            assert problems_in(composition.values, composition, Train)[1] == [], option.name


@pytest.mark.parametrize("name", VERBS)
def test_the_command_at_the_head_of_a_verbs_config_is_understood(name, compose):
    head = (shipped() / f"{name}.yaml").read_text().splitlines()[1].lstrip("# ")
    *_, verb = shlex.split(head)[:4]
    composition = compose(*shlex.split(head)[4:], verb=verb)
    assert verb == name
    assert problems_in(composition.values, composition, VERBS[verb])[1] == []


@files
def test_every_file_begins_with_a_sentence_and_every_key_has_a_comment_on_its_line(path):
    lines = path.read_text().splitlines()
    first = next(line for line in lines if not line.startswith("# @"))
    assert re.fullmatch(r"# \S.{10,}[.?]", first), first
    for key, at, value in walk(compose_yaml(path)):
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        if at is not value and not is_block and not key.startswith("defaults"):
            line = lines[at.start_mark.line]
            assert re.search(r"  # \S.{3,}", line), f"{key} in line {at.start_mark.line + 1}: {line}"


@groups
def test_presets_set_only_keys_that_exist(group):
    for option in SOURCES.options(group):
        content = yaml.safe_load(option.path.read_text()) or {}
        for name in ("defaults", "hydra"):
            content.pop(name, None)
        prefix = "" if option.is_global else f"{group}."
        unknown = [key for key in keys.flatten(content) if key and keys.find(Train, prefix + key) is None]
        assert unknown == [], option.path


def values_in_files(verb: str) -> dict[str, Any]:
    """The defaults of a verb as the YAML has them, interpolations resolved."""
    whole = yaml.safe_load((shipped() / "train.yaml").read_text())
    whole |= yaml.safe_load((shipped() / f"{verb}.yaml").read_text())
    for name in ("defaults", "hydra"):
        whole.pop(name, None)
    resolved: Any = OmegaConf.to_container(OmegaConf.create(whole), resolve=True)
    for group in ("adapters", "data"):
        resolved[group] = yaml.safe_load((shipped() / group / "_base.yaml").read_text())
    resolved["transform"] = yaml.safe_load((shipped() / "transform" / "none.yaml").read_text())
    for group in ("callbacks", "logger"):
        resolved[group] = yaml.safe_load((shipped() / group / "none.yaml").read_text())
    return resolved


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_of_the_schema_is_in_the_files_with_the_same_default(verb):
    node = {"_target_": "package.Thing"}
    required = {"data": {"dataset": node}, **dict.fromkeys(("model", "optimizer", "scheduler", "loss", "task"), node)}
    config, _ = typed(VERBS[verb], required)
    values, defaults = values_in_files(verb), keys.flatten(to_plain(config))
    defaults = {key: default for key, default in defaults.items() if not key.endswith("_target_")}
    if verb != "train":
        defaults = {key: default for key, default in defaults.items() if key.split(".")[0] not in keys.hints(Train)}
    assert defaults
    for key, default in defaults.items():
        value = keys.at(values, key)
        assert (value, type(value)) == (default, type(default)), key


@pytest.mark.parametrize("verb", VERBS)
def test_every_top_level_key_of_the_files_is_in_the_schema(verb):
    values, schema = values_in_files(verb), VERBS[verb]
    assert set(values) <= set(keys.hints(schema))
    for key in keys.flatten({name: value for name, value in values.items() if name not in ("callbacks", "logger")}):
        assert keys.find(schema, key) is not None, key


def test_parts_of_options_cannot_be_listed_but_are_used():
    assert SOURCES.option("data", "_base") not in [None, *SOURCES.options("data")]
