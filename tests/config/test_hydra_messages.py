"""What Hydra refuses is reported in the form of all other mistakes: with what is meant, and where it stands."""

from __future__ import annotations

import pytest

GLOBAL = "# @package _global_\n"
SWEEP = GLOBAL + "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"

# The option of a group as a file, the words of the command line, and what the error says.
ROWS = [
    ("", "", ["hydra.run.dirr=x"], "hydra.run.dirr: is not a key"),
    ("", "", ["hydra.mode=MULTI"], "hydra.mode: Invalid value 'MULTI', expected one of [RUN, MULTIRUN]"),
    ("sweep/mine.yaml", f"{SWEEP}      seeed: 0,1\n", ["sweep=mine"], "seeed: is not a key; did you mean 'seed'?"),
    (
        "sweep/mine.yaml",
        f"{GLOBAL}hydra:\n  sweeper:\n    param:\n      seed: 0,1\n",
        ["sweep=mine", "--multirun"],
        "hydra.sweeper.param: is not a key",
    ),
    (
        "experiment/mine.yaml",
        f"{GLOBAL}optimizer:\n  lr: high\n",
        ["experiment=mine"],
        "from: {workdir}/experiment/mine.yaml:3",
    ),
    ("", "", ["data.split.val=0.6", "data.split.test=0.6"], "from: the override data.split.test=0.6"),
]


@pytest.mark.parametrize(("file", "text", "words", "says"), ROWS, ids=[row[-1][:30] for row in ROWS])
def test_what_is_meant_and_where_it_stands_are_reported(rejected, workdir, file, text, words, says):
    if file:
        path = workdir / file
        path.parent.mkdir()
        path.write_text(text)
        words = ["--config-dir", str(workdir), *words]
    result = rejected("train", *words)
    assert says.format(workdir=workdir) in result.err
    assert not (workdir / "outputs").exists()
