"""Whole runs on data that are damaged, lost on the way, or others than before."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extended import some
from PIL import Image

from runner.checkpoint.file import read

# A data set that is read through workers, in one of which something goes wrong in the second epoch.
WRECKS = """
import os, signal, time
from pathlib import Path

from runner.base.errors import UserError
from runner.data.sources.arrays import ImageArrays
from runner.data.sources.synthetic import synthetic
from torch.utils.data import Dataset, get_worker_info

READS = []


class Wreck(Dataset):
    def __init__(self, arrays):
        vars(self).update(vars(arrays))

    __len__ = ImageArrays.__len__

    def __getitem__(self, index):
        READS.append(get_worker_info() is not None)
        if sum(READS) > 200 and Path("wrong").exists():
            exec(Path("wrong").read_text())
        return self.images[index], self.targets[index]


def wrecked(**settings):
    return {name: Wreck(arrays) for name, arrays in synthetic(**settings).items()}
"""
WORDS = (
    "data=synthetic", "data.dataset._target_=wrecks.wrecked", "data.dataset.samples=160", "data.image_size=8",
    "data.batch_size=8", "epochs=3", "model=mlp", "model.hidden=[16]", "model.dropout=0.2", "transform=standard",
    "evaluate.test=false", "data.num_workers=1", "data.timeout_s=2", "trust=[wrecks]",
)  # fmt: skip


@pytest.fixture
def wrong(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that says what goes wrong."""
    (workdir / "wrecks.py").write_text(WRECKS)
    monkeypatch.syspath_prepend(str(workdir))
    return workdir / "wrong"


@pytest.mark.parametrize(
    ("does", "status", "words"),
    some(
        [
            ("os.kill(os.getpid(), signal.SIGKILL)", 1, ("worker process 0", "was killed by SIGKILL", "to resume: ckpt_path=")),
            ("time.sleep(1000)", 1, ("data.timeout_s: no batch came from the workers for 2 s", "to resume: ckpt_path=")),
            ("raise UserError('cannot read the image lost.png')", 2, ("cannot read the image lost.png",)),
        ],
        0,
        2,
        several=True,
    ),
)  # fmt: skip
def test_a_run_whose_reading_breaks_down_says_so_and_loses_no_step(
    does: str, status: int, words: tuple[str, ...], wrong: Path, run: Any, train: Any, train_once: Any
) -> None:
    expected = train_once(*WORDS).summary["weights_sha256"]
    wrong.write_text(does)
    broken = run("train", *WORDS, "threads=1", "logger=none", "log.progress=false", "log.curves=false")
    assert broken.status == status
    assert all(word in broken.err for word in words), broken.err
    assert "Traceback" not in broken.err
    assert broken.summary["status"] == "failed"
    saved = read(broken.directory / "checkpoints" / "last.safetensors")["position"]
    assert saved["global_step"] > 18, "the steps of the second epoch are saved too"
    wrong.unlink()
    assert train(f"ckpt_path={broken.directory}", "trust=[wrecks]").summary["weights_sha256"] == expected


def images(folder: Path, count: int = 40, seed: int = 0) -> Path:
    for number in range(count):
        path = folder / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng([seed, number]).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    return folder


@pytest.fixture
def folder(workdir: Path) -> Path:
    return images(workdir / "images")


ON_FOLDER = (
    "data=image_folder", "data.root=images", "data.image_size=6", "data.batch_size=4", "epochs=2", "model=mlp",
    "model.hidden=[8]", "transform=standard", "data.num_workers=0", "checkpoint.min_seconds=0",
)  # fmt: skip


def test_a_run_that_skips_damaged_images_counts_them_and_is_the_same_run_however_they_are_read(
    folder: Path, train: Any, rejected: Any
) -> None:
    assert "skipped" not in train(*ON_FOLDER, "data.on_error=skip", "max_steps=1").summary
    for name in ("a/04.png", "b/11.png"):
        (folder / name).write_bytes((folder / name).read_bytes()[:50])
    refused = rejected("train", *ON_FOLDER)
    assert "cannot read the image images/" in refused.err

    first = train(*ON_FOLDER, "data.on_error=skip")
    assert first.summary["skipped"] == 2
    log = (first.directory / "run.log").read_text()
    assert re.search(r"cannot be read and is replaced by another: .*images/(a/04|b/11).png", log)
    assert "samples could not be read and were replaced by others: " in log
    cached = train(*ON_FOLDER, "data.on_error=skip", "data.cache=disk")
    assert cached.summary["weights_sha256"] == first.summary["weights_sha256"]
    assert cached.summary["skipped"] == 2

    steps = f"scheduler.total_steps={first.summary['global_step']}"
    stopped = train(*ON_FOLDER, "data.on_error=skip", "max_steps=9", steps)
    resumed = train(f"ckpt_path={stopped.directory}", "max_steps=null", "data.num_workers=2")
    assert resumed.summary["weights_sha256"] == first.summary["weights_sha256"]


LARGE = ("images/a/04.png", "9 x 4 = 36 pixels", "data.max_pixels=35", "allowed: a larger data.max_pixels")


@pytest.fixture
def large(folder: Path) -> Path:
    """A folder in which one image has 36 pixels as well, but another shape, and all others are smaller."""
    for path in folder.rglob("*.png"):
        with Image.open(path) as image:
            image.crop((0, 0, 5, 5)).save(path)
    Image.new("RGB", (9, 4)).save(folder / "a" / "04.png")
    return folder


def test_an_image_with_more_pixels_than_allowed_is_refused_skipped_or_listed(
    large: Path, train: Any, run: Any, rejected: Any
) -> None:
    for words in ("data.num_workers=1", "data.cache=disk"):
        refused = rejected("train", *ON_FOLDER, "threads=1", "data.max_pixels=35", words).err
        assert [part for part in LARGE if part not in refused] == []
    result = train(*ON_FOLDER, "data.max_pixels=35", "data.on_error=skip")
    assert result.summary["skipped"] == 1
    assert all(part in " ".join(result.out.split()) for part in LARGE[:3])
    words = ("input=images", f"ckpt_path={result.directory}", "output=rows.jsonl")
    assert run("predict", *words).status == 0
    assert "04.png" in Path("rows_unreadable.txt").read_text()
    Path("rows.jsonl").unlink()
    Path("rows_unreadable.txt").unlink()
    assert run("predict", *words, "data.max_pixels=36").status == 0
    assert len(Path("rows.jsonl").read_text().splitlines()) == 40


def test_resuming_on_other_data_is_refused_unless_it_is_meant(workdir: Path, train: Any, rejected: Any) -> None:
    root = images(workdir / "images", count=80)
    again = (f"ckpt_path={train(*ON_FOLDER, 'epochs=1').directory}", "epochs=2")
    (root / "a" / "30.png").rename(root / "b" / "30.png")  # two images are exchanged between classes
    (root / "b" / "31.png").rename(root / "a" / "31.png")
    told = "data: these are not what the checkpoint was trained on: "
    refused = rejected("train", *again).err
    assert told in refused
    assert "data.identity=ignore" in refused
    knowingly = train(*again, "data.identity=ignore")
    assert told in (knowingly.directory / "run.log").read_text()


NET = """
from torch import nn
from net_package.blocks import width

class Net(nn.Sequential):
    def __init__(self, in_channels, image_size, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(in_channels * image_size[0] * image_size[1], num_classes))
"""


def test_a_change_of_the_users_own_source_is_reported_on_resume(
    workdir: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = workdir / "net_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text(NET)
    (package / "blocks.py").write_text("width = 3\n")
    monkeypatch.syspath_prepend(str(workdir))
    words = ("data.split.test=0", "model=mlp", "model._target_=net_package.net.Net", "~model.hidden", "~model.dropout")
    first = train(*words, "max_steps=1")
    stored = read(first.directory / "checkpoints" / "last.safetensors")["metrics"]["sources"]
    assert set(stored) == {"net_package", "net_package.blocks", "net_package.net"}

    again = (f"ckpt_path={first.directory}", "max_steps=2", "trust=[net_package]")
    assert "the source of" not in train(*again).out
    for name in ("blocks", "net"):  # the file of the model, and one that it imports
        (package / f"{name}.py").write_text((package / f"{name}.py").read_text() + "\n# another line\n")
    warning = "the source of net_package.blocks, net_package.net has changed since the checkpoint was written"
    assert warning in train(*again).out


def test_inside_an_epoch_another_number_of_samples_cannot_be_gone_on_with(
    folder: Path, workdir: Path, train: Any, rejected: Any
) -> None:
    directory = train(*ON_FOLDER, "max_steps=5").directory
    images(workdir / "fewer", count=20)
    words = (f"ckpt_path={directory}", "data.root=fewer", "max_steps=null", "data.identity=ignore")
    result = rejected("train", *words)
    assert "a checkpoint from the end of an epoch" in result.err


def test_what_is_changed_is_shown_with_whether_it_matters(train: Any) -> None:
    small = ("data=synthetic", "data.dataset.samples=48", "data.image_size=8", "model=mlp", "epochs=1")
    directory = train(*small).directory
    out = train(f"ckpt_path={directory}", "epochs=2", "log.every_steps=3").out
    table = out[out.index("changed on the command line") :].splitlines()
    assert table[1].split() == ["key", "before", "now", "changes", "the", "result"]
    rows = {line.split()[0]: line.split()[-1] for line in table[3:5]}
    assert rows == {"epochs": "yes", "log.every_steps": "no"}


BREAKING_PARTS = """
from pathlib import Path


class Opened:
    def open(self, directory, resumed_step): Path("diary").write_text("opened ")
    def log(self, *args): pass
    def flush(self): pass
    def close(self): Path("diary").write_text(Path("diary").read_text() + "closed ")


class Breaking:
    def on_start(self, loop): raise RuntimeError("this callback cannot start")
"""


def test_workers_and_loggers_are_closed_if_something_fails_before_training_starts(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("breaking_parts.py").write_text(BREAKING_PARTS)
    monkeypatch.syspath_prepend(".")
    parts = ("+logger.opened._target_=breaking_parts.Opened", "+callbacks.breaking._target_=breaking_parts.Breaking")
    before = multiprocessing.active_children()
    result = run(
        "train", *ON_FOLDER, "logger=none", "data.num_workers=1", "threads=1", "trust=[breaking_parts]", *parts
    )
    assert result.status == 1
    assert "this callback cannot start" in result.err
    assert Path("diary").read_text().split() == ["opened", "closed"]
    assert multiprocessing.active_children() == before
