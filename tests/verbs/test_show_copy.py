"""`show` explains keys, and `copy` copies a shipped option to change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.config import keys
from runner.config.schema import VERBS
from runner.config.sources import Sources
from runner.verbs.options import show


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("optimizer.lr", ["optimizer=sgd ", "optimizer.lr: 0.1  # learning rate; the peak"]),
        (
            "grad_clip.norm",
            [
                "grad_clip.norm: null  # maximum norm",
                "experiment=detection  grad_clip.norm: 0.1",
                "values: a number above 0 or null",
            ],
        ),
        ("model.hidden", ["model=mlp  model.hidden: [128]  # width of each hidden layer"]),
        ("transform.train", ["transform.train.0.share: ", "# maximum shift"]),
        ("transform.train.0.share", ["transform=standard ", "# maximum shift"]),
        ("data.split", ["data.split.val: 0.1  # ", "data.split.seed: 0  # "]),
        ("num_steps", ["find-lr  num_steps: 300  # optimizer steps"]),
    ],
)
def test_a_key_is_explained(accepted: Any, key: str, parts: list[str]) -> None:
    result = accepted("show", key)
    assert result.out.splitlines()[0] == key
    lines = result.out.splitlines()
    assert len(lines) == len({*lines})
    for part in parts:
        assert part in result.out


def test_every_key_of_training_has_a_comment(capsys: pytest.CaptureFixture[str]) -> None:
    names = keys.all_keys(VERBS["train"])
    # A name that is a group, too, shows its files.
    single = [name for name in names if name not in Sources().groups()]
    assert show(single) == 0
    shown = capsys.readouterr().out.split("\n\n")
    assert [text.splitlines()[0] for text in shown if "  # " in text] == single


def test_a_copied_option_is_ones_own(accepted: Any, rejected: Any, train: Any, workdir: Path) -> None:
    result = accepted("copy", "model=mlp", "mine")
    assert "exists already" in rejected("copy", "model=mlp", "mine").err
    path = workdir / "mine/model/my_mlp.yaml"
    assert result.out.splitlines()[-1] == "mine/model/my_mlp.yaml"
    path.write_text(path.read_text().replace("hidden: [128]", "hidden: [12]"))
    trained = train("--config-dir", "mine", "model=my_mlp", "epochs=1", "max_steps=1", "tags=[first]", "notes=a try")
    assert "hidden: [12]" in (trained.directory / "config.yaml").read_text()
    assert (trained.summary["tags"], trained.summary["notes"]) == (["first"], "a try")
