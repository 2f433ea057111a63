"""Numbers that images are normalised with belong to the data that are read, and the header shows them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

SETS = """
import torch


class Grey(torch.utils.data.Dataset):
    def __init__(self, inner=None):
        self.targets = torch.arange(60) % 3

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((1, 8, 8), 60 * (index % 3) + index, dtype=torch.uint8), index % 3


class Fields(Grey):
    def __getitem__(self, index):
        return {"image": super().__getitem__(index)[0], "target": index % 3}


class Count:
    def training_step(self, modules, batch):
        return modules["model"](batch["image"].float()).mean()
"""
GREY, DIGITS = "data.dataset._target_=own_sets.Grey", "runner.data.sources.digits.digits"
GIVEN = ("data.normalize.mean=[0.3053]", "data.normalize.std=[0.3761]")
QUICK = ("threads=1", "logger=none", "epochs=1", "data.num_workers=0")
FIELDS = (
    "data=own", "data.dataset._target_=own_sets.Fields", "data.images=[image]", "task._target_=own_sets.Count", "loss=none",
    "transform=none", "evaluate.every_epochs=null", "evaluate.test=false", "model.in_channels=1", "model.num_classes=2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def sets(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "own_sets.py").write_text(SETS)
    monkeypatch.syspath_prepend(str(workdir))
    files = {
        "data/alike": "# Like the digits.\ndefaults: [digits, _self_]\ndataset: {_target_: own_sets.Grey}\n",
        "data/own_numbers": "# Numbers.\ndefaults: [_base, _self_]\nnormalize: {mean: [0.5], std: [0.2]}\n"
        "dataset: {_target_: own_sets.Grey}\n",
        "experiment/without": "# @package _global_\n# No numbers.\ndata: {dataset: {_target_: own_sets.Grey}}\n",
        "experiment/with": "# @package _global_\n# Numbers.\ndata: {dataset: {_target_: own_sets.Grey}, "
        "normalize: {mean: [0.3053], std: [0.3761]}}\n",
    }
    for name, text in files.items():
        path = workdir / f"conf/{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ((GREY,), "data=digits"),
        ((GREY, "data.images=['0']", "transform=none"), "data=digits"),
        (("data=cifar10", GREY), "data=cifar10"),
        ((f"data.dataset._target_={DIGITS}", "data=mnist"), "data=mnist"),
        (("data=alike",), "data=digits"),
        (("experiment=without",), "data=digits"),
        (("data=own_numbers", "data.dataset._target_=own_sets.Fields"), "data=own_numbers"),
        (("experiment=with", "data.dataset._target_=own_sets.Fields"), "experiment=with"),
    ],
)
def test_numbers_of_other_data_are_refused(rejected: Any, words: tuple[str, ...], option: str) -> None:
    for more in ((), ("resume=auto",)):
        said = rejected("train", "--config-dir=conf", *QUICK, *words, *more).err
        assert f"data.normalize: has the numbers of {option}, and 'own_sets." in said.replace(DIGITS, "own_sets.")
        assert "allowed: data=own" in said
        assert ".yaml:" in said


@pytest.mark.parametrize(
    "words",
    [
        ("data=own", GREY),
        (GREY, *GIVEN),
        (GREY, "data.normalize={mean: null, std: null}"),
        (GREY, "data.images=[]", "transform=none"),
        ("+data.dataset.classes=[0,1,2]",),
        (GREY, f"+data.dataset.inner._target_={DIGITS}"),
        ("experiment=with",),
        ("data=own_numbers",),
        ("data=image_folder", GREY),  # has ImageNet's numbers, for any photographs
        ("data=svhn", GREY, "data.image_size=32", "model=torchvision", "model.name=resnet18", "model.weights=DEFAULT"),
    ],
)
def test_numbers_of_the_data_themselves_are_not_refused(compose: Any, problems: Any, words: tuple[str, ...]) -> None:
    assert "data.normalize" not in problems("--config-dir=conf", *words)


def test_a_run_of_an_earlier_version_with_such_numbers_is_continued_and_evaluated(accepted: Any) -> None:
    accepted("train", *QUICK, GREY, *GIVEN, "epochs=4", "max_steps=2", "hydra.run.dir=run", "data.batch_size=20")
    assert "resumed from" in accepted("train", "ckpt_path=run", "threads=1", "max_steps=3", "trust=[own_sets]").out
    accepted("eval", "ckpt_path=run", "threads=1", "trust=[own_sets]")
    # The command that began it, which had no numbers
    Path("run/summary.json").write_text(Path("run/summary.json").read_text().replace('"finished"', '"killed"'))
    words = "epochs=4 max_steps=2 data.batch_size=20 hydra.run.dir=run resume=auto trust=[own_sets]"
    assert "resumed from" in accepted("train", *QUICK, GREY, *words.split()).out


@pytest.mark.parametrize(
    ("words", "data", "normalize"),
    [
        ((), "digits, 1x8x8", "mean 0.3053, std 0.3761"),
        ((GREY, *GIVEN), "Grey (digits), 1x8x8", "mean 0.3053, std 0.3761"),
        (("data=own", GREY), "Grey (own), 1x8x8", "mean 0.3457, std 0.2045"),
        (FIELDS, "Fields (own), ", "none"),
        ((*FIELDS, *GIVEN), "Fields (own), ", "mean 0.3053, std 0.3761"),
        ((*FIELDS, "data.images=[]"), "Fields (own), ", None),
    ],
)
def test_the_header_shows_what_is_read_and_how_it_is_normalised(
    accepted: Any, words: tuple[str, ...], data: str, normalize: str | None
) -> None:
    said = accepted("train", *QUICK, *words, "max_steps=1").out
    rows = {name: value.strip() for name, value in re.findall(r"^  (data|normalize)  +(.+?)(?:  |$)", said, re.M)}
    assert (rows["data"].startswith(data), rows.get("normalize")) == (True, normalize), said
