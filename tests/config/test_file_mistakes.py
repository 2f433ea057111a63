"""A mistake in a user's YAML file, or one that Hydra finds, is a sentence with the key, the file and the line."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAD = "# @package _global_\n"
SWEEP = "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"


# The content of an option, other words of the command, what is said, and the line of the file that is named.
ROWS = [
    ("name: run_${modle.width}\n", "", "name: Interpolation key 'modle.width' not found", 2),
    ("name: ${output_root}\noutput_root: ${name}\n", "", "name: Recursive interpolation detected", 2),
    ("name: ${oc.envv:HOME}\n", "", "name: Unsupported interpolation type oc.envv", 2),
    ("name: ${oc.env:NOT_THERE}\n", "", "Environment variable 'NOT_THERE' not found", 2),
    ("seed: 1\nsede: 2\n", "", "sede: is not a key; did you mean 'seed'", 3),
    ("optimizer:\n  learning_rate: 1\n", "", "optimizer.learning_rate: is not an argument of torch.optim.", 3),
    ("optimizer:\n  lr: high\n", "", "optimizer.lr: cannot be high", 3),
    ("seed: 1\nepochs: ten\n", "", "epochs: cannot be ten", 3),
    ("model: mlp\n", "", "model: cannot be mlp", 2),
    ("evaluate: never\n", "", "evaluate: cannot be never", 2),
    ("model:\n\twidth: 3\n", "", "own.yaml:3:1: is not YAML: while scanning for the next token, found character", None),
    ("seed: 1\n  epochs: 3\n", "", "own.yaml:3:9: is not YAML: mapping values are not allowed", None),
    ("metrics: [1, 2\nseed: 1\n", "", "own.yaml:3:5: is not YAML: while parsing a flow sequence", None),
    ("seed: 1\x00\n", "", "own.yaml: is not YAML: unacceptable character", None),
    ("seed: *x\n", "", "own.yaml:2:7: is not YAML: found undefined alias", None),
    ("seed: 1\nepochs: 2\nseed: 3\n", "", "own.yaml:4:1: is not YAML: while constructing a mapping, found dup", None),
    ("model:\n  width: 1\n  width: 2\n", "", "4:3: is not YAML: while constructing a mapping, found dup", None),
    ("defaults:\n  model: mlp\n", "", "own.yaml:3:3: defaults is not a list of options", None),
    ("defaults: mlp\n", "", "own.yaml:2:11: defaults is not a list of options", None),
    ("defaults:\n  - 3\n", "", "own.yaml:3:3: defaults is not a list of options", None),
    ("seed: !!python/object/apply:os.getcwd []\n", "", "own.yaml:2:7: is not YAML: could not determine", None),
    ("model:\n  - width: 3\n", "", "experiment/own: Cannot merge DictConfig with ListConfig", None),
    ("optimizer.lr: 0.1\n", "", "optimizer.lr: is not a key", None),
    ("null: 2\n", "", "Incompatible key type", None),
    ("model:\n  _target: a.Net\n", "", "model._target: is not supported", 3),
    ("defaults:\n  - override /modle: mlp\n", "", "experiment/own: Could not override 'modle'.", None),
    ("defaults:\n  - override /model: mpl\n", "", "Could not find 'model/mpl' Available options in 'model': ", None),
    ("defaults:\n  - /model: mlp\n", "", "Multiple values for model. To override a value use 'override model", None),
    ("defaults:\n  - own\n", "", "maximum recursion depth exceeded", None),
    ("name: ${data.name\n", "", "name: no viable alternative at input", None),
    (f"{SWEEP}      seeed: 0,1\n", "", "seeed: is not a key; did you mean 'seed'?", None),
    ("hydra:\n  sweeper:\n    param:\n      seed: 0,1\n", "--multirun", "hydra.sweeper.param: is not a key", None),
    ("seed: 1\n", "hydra.run.dirr=x", "hydra.run.dirr: is not a key", None),
    ("seed: 1\n", "hydra.mode=MULTI", "hydra.mode: Invalid value 'MULTI', expected one of [RUN, MULTIRUN]", None),
    ("seed: 1\n", "data.split.val=0.6 data.split.test=0.6", "from: the override data.split.test=0.6", None),
    ("seed:1\nepochs: 2\n", "optimizer=adma", "error: 2 problems", None),  # one hides no other
]


@pytest.mark.parametrize(("content", "words", "says", "line"), ROWS, ids=[row[2][:40] for row in ROWS])
def test_a_mistake_that_is_found_while_composing_is_located_too(content, words, says, line, workdir, rejected):
    path = workdir / "mine" / "experiment" / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(HEAD + content)
    result = rejected("train", "--config-dir", "mine", "experiment=own", *words.split())
    assert says in result.err
    assert line is None or f"from: {path}:{line}\n" in result.err
    assert [each.name for each in workdir.iterdir()] == ["mine"]


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
