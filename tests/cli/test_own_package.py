"""A user's own model, data, transform and callback: a package and a folder of YAML, and no change to the program."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import pytest

FILES = {
    "my_package/__init__.py": "",
    "my_package/parts.py": '''
import torch
from PIL import Image
from torch import nn


class Net(nn.Sequential):
    """Uses two of the facts that the program offers, and an argument of its own."""

    def __init__(self, in_channels, num_classes, width=3):
        pooled = nn.Conv2d(in_channels, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        super().__init__(*pooled, nn.Linear(width, num_classes))


class Shades:
    """Grey squares, told apart by their brightness; plain Pillow images and whole numbers, and nothing else."""

    def __init__(self, count, image_size):
        self.targets, self.side = [index % 3 for index in range(count)], image_size

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return Image.new("RGB", (self.side, self.side), (index % 3 * 100 + index % 7,) * 3), index % 3


def negative(images, rng):
    """A batch transform: some images turned into their negatives; images uint8 (B, C, H, W)."""
    assert images.dtype == torch.uint8
    return torch.where((rng.uniform() < 0.1)[:, None, None, None], 255 - images, images)


class Counter:
    """Counts evaluations, over all the runs that continue one another."""

    def __init__(self, file):
        self.file, self.seen = file, 0

    def on_evaluation(self, loop, metrics):
        self.seen += 1

    def on_end(self, loop):
        with open(self.file, "w") as out:
            out.write(str(self.seen))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
''',
    "mine/model/mynet.yaml": "_target_: my_package.parts.Net\nin_channels: null\nnum_classes: null\nwidth: 3\n",
    "mine/data/mydata.yaml": "defaults: [_base, _self_]\nname: shades\nimage_size: 6\nnum_workers: 0\n"
    "dataset: {_target_: my_package.parts.Shades, count: 60}\n",
    "mine/transform/negative.yaml": "defaults: [none, _self_]\n"
    "train: [{_target_: my_package.parts.negative, _partial_: true}]\n",
    "mine/callbacks/mine.yaml": "counter: {_target_: my_package.parts.Counter, file: counted.txt}\n",
}
TRAIN = ("train", "--config-dir", "mine", "model=mynet", "data=mydata", "transform=negative", "callbacks=mine")
TRAIN += ("threads=1", "device=cpu", "logger=none", "log.progress=false", "log.curves=false", "optimizer.lr=0.1")


def program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    with contextlib.chdir(folder):
        return forked.run(words)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a user's project, and in it the run directory of a training."""
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.lstrip())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RUNNER_TRUST", "HYDRA_FULL_ERROR", "PYTHONPATH"):
            patch.delenv(name, raising=False)
        done = program(folder, *TRAIN, "epochs=2")
    assert done.returncode == 0, done.stderr
    return folder, folder / done.stdout.strip().splitlines()[-1]


@pytest.fixture
def copied(project: tuple[Path, Path], workdir: Path) -> Path:
    """A copy of the project to work in; the run is in the folder `run`."""
    folder, run = project
    shutil.copytree(folder, workdir, dirs_exist_ok=True)
    shutil.copytree(run, workdir / "run")
    return workdir


@pytest.fixture
def importable(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder on the path, as `python -m runner` has it."""
    monkeypatch.syspath_prepend(copied)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, name)


EVAL = ("eval", "ckpt_path=run", "threads=1", "device=cpu")


def test_a_package_of_ones_own_is_trained_with_no_change_to_the_program(project):
    folder, run = project
    assert run.parent == folder / "outputs" / "shades"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["test"]["accuracy"] >= 0
    assert (folder / "counted.txt").read_text() == "2"
    config = (run / "config.yaml").read_text()
    assert "my_package.parts.Net" in config
    assert "in_channels: 3" in config
    assert "num_classes: 3" in config


def test_a_callback_of_ones_own_goes_on_counting_in_a_resumed_run(copied, importable, accepted):
    accepted(*TRAIN, "ckpt_path=run", "epochs=3")
    assert Path("counted.txt").read_text() == "3"


@pytest.mark.usefixtures("importable")
def test_a_checkpoint_of_a_package_that_is_not_trusted_is_refused_and_says_what_to_do(copied, rejected):
    rejected(*EVAL, "trust=[my_pack,package]")
    result = rejected(*EVAL)
    for key, name in {"model": "Net", "data.dataset": "Shades"}.items():
        assert (
            f"{key}._target_: 'my_package.parts.{name}' comes from a file and its package is not trusted" in result.err
        )
    assert "Counter" not in result.err, "eval builds no callback"
    assert "trust=[my_package] if you trust it (on the command line, in conf/local, or in RUNNER_TRUST)" in result.err
    assert str(Path("run") / "checkpoints" / "best.safetensors") in result.err
    assert "my_package" not in sys.modules


@pytest.mark.parametrize(
    ("words", "environment", "local"),
    [
        (("trust=[my_package]",), "", ""),
        ((), "another_package,my_package", ""),
        (("--config-dir", "mine"), "", "# @package _global_\ntrust: [my_package]\n"),
    ],
)
@pytest.mark.usefixtures("importable")
def test_a_checkpoint_of_a_trusted_package_is_evaluated(words, environment, local, copied, accepted, monkeypatch):
    monkeypatch.setenv("RUNNER_TRUST", environment)
    Path("mine/local").mkdir()
    Path("mine/local/default.yaml").write_text(local)
    accepted(*EVAL, *words)
    found = json.loads(Path("run/eval_test.json").read_text())
    summary = json.loads(Path("run/summary.json").read_text())
    assert found["metrics"] == summary["test"]
