"""A mistake in a user's YAML file is a sentence with the file and the line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.base.errors import ConfigError
from runner.config.yaml_files import mistakes_in

HEAD = "# @package _global_\n"


@pytest.mark.parametrize(
    ("content", "where", "says"),
    [
        ("model:\n\twidth: 3\n", ":3:1", "is not YAML"),
        ("seed: 1\n  epochs: 3\n", ":3:9", "is not YAML: mapping values are not allowed"),
        ("metrics: [1, 2\nseed: 1\n", ":3:5", "is not YAML: while parsing a flow sequence"),
        ("seed: 1\x00\n", "", "is not YAML: unacceptable character"),
        ("seed: *x\n", ":2:7", "is not YAML: found undefined alias"),
        ("seed: 1\nepochs: 2\nseed: 3\n", ":4:1", "'seed' is given twice, first in line 2"),
        ("model:\n  width: 1\n  width: 2\n", ":4:3", "'model.width' is given twice, first in line 3"),
        ("defaults:\n  model: mlp\n", ":3:3", "defaults is not a list of options"),
        ("defaults: mlp\n", ":2:11", "defaults is not a list of options"),
        ("defaults:\n  - 3\n", ":3:3", "defaults is not a list of options"),
    ],
)
def test_a_mistake_in_a_file_is_located_and_explained(content, where, says, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD + content)
    try:
        found = mistakes_in(path)
    except ConfigError as error:
        found = list(error.problems)
    text = "\n".join(found[0].lines())
    assert text.startswith(f"{path}{where}: {says}"), text
    assert found[0].allowed


@pytest.mark.parametrize(
    ("content", "key", "line", "says"),
    [
        ("name: run_${modle.width}\n", "name", 2, "Interpolation key 'modle.width' not found"),
        ("name: ${output_root}\noutput_root: ${name}\n", "name", 2, "Recursive interpolation detected"),
        ("name: ${oc.envv:HOME}\n", "name", 2, "Unsupported interpolation type oc.envv"),
        ("name: ${oc.env:NOT_THERE}\n", "name", 2, "Environment variable 'NOT_THERE' not found"),
        ("seed: 1\nsede: 2\n", "sede", 3, "did you mean 'seed'"),
        ("optimizer:\n  learning_rate: 1\n", "optimizer.learning_rate", 3, "did you mean 'lr'"),
        ("seed: 1\nepochs: ten\n", "epochs", 3, "cannot be ten"),
        ("model: mlp\n", "model", 2, "a mapping with _target_"),
        ("evaluate: never\n", "evaluate", 2, "cannot be never"),
    ],
)
def test_a_mistake_in_a_value_is_located_too(content, key, line, says, workdir, rejected):
    path = workdir / "mine" / "experiment" / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(HEAD + content)
    result = rejected("train", "--config-dir", "mine", "experiment=own")
    assert result.err.startswith(f"error: 1 problem in the configuration\n  {key}: ")
    assert says in result.err
    assert f"from: {path}:{line}\n" in result.err
    assert [each.name for each in workdir.iterdir()] == ["mine"]


def test_a_file_that_cannot_be_read_does_not_hide_other_mistakes(workdir: Path, rejected):
    path = workdir / "mine" / "experiment" / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(HEAD + "seed:1\nepochs: 2\n")
    result = rejected("train", "--config-dir", "mine", "experiment=own", "optimizer=adma")
    assert "error: 2 problems" in result.err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("seed: !!python/object/apply:os.getcwd []\n", "own.yaml:2:7: is not YAML: could not determine a constructor"),
        ("model:\n  - width: 3\n", "experiment/own: Cannot merge DictConfig with ListConfig"),
        ("optimizer.lr: 0.1\n", "optimizer.lr: is not a key"),
        ("null: 2\n", "Incompatible key type"),
        ("model:\n  _target: a.Net\n", "model._target: is not supported"),
        ("defaults:\n  - override /modle: mlp\n", "experiment/own: Could not override 'modle'."),
        ("defaults:\n  - override /model: mpl\n", "Could not find 'model/mpl' Available options in 'model': "),
        ("defaults:\n  - /model: mlp\n", "Multiple values for model. To override a value use 'override model: mlp'"),
        ("defaults:\n  - own\n", "maximum recursion depth exceeded"),
        ("name: ${data.name\n", "name: no viable alternative at input"),
    ],
)
def test_other_mistakes_are_what_yaml_and_hydra_say(content, says, workdir, rejected):
    path = workdir / "mine" / "experiment" / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(HEAD + content)
    result = rejected("train", "--config-dir", "mine", "experiment=own")
    assert says in result.err


def test_a_mistake_is_located_by_a_new_process_that_only_shows_the_config(tmp_path):
    # Hydra loads its plugins, and replaces their classes, once in a process.
    path = tmp_path / "mine" / "experiment" / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(HEAD + "seed:1\nepochs: 2\n")
    words = ("train", "--cfg", "job", "--config-dir", "mine", "experiment=own")
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{path}:3:7: is not YAML: mapping values are not allowed" in done.stderr
    assert "Traceback" not in done.stderr
