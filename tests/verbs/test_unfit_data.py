"""Whole runs on data sets of the user's that do not fit the task, the other splits, or themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SETS = """
import torch
from torch.nn.functional import one_hot
from torch.utils.data import Dataset


class Listed(Dataset):
    '''Samples from two lists; `show` says whether the targets are an attribute too, `at` which sample cannot be read.'''

    def __init__(self, images=None, labels=None, numbers=None, show=True, classes=("a", "b", "c"), **others):
        self.images = PIXELS if images is None else images
        self.labels = CLASSES if labels is None else labels
        if numbers is not None:
            self.labels, classes = numbers, ()
        self.length = self.at = self.triples = None
        if show:
            self.targets = self.labels
        if classes:
            self.classes = list(classes)
        vars(self).update(others)

    def __len__(self):
        if self.length == "unknown":
            raise ZeroDivisionError("no samples")
        return len(self.images) if self.length is None else self.length

    def __getitem__(self, index):
        if index == self.at:
            raise KeyError("lost.png")
        return self.images[index], self.labels[index], *([index] if self.triples and index > 20 else [])


def images(channels=1, size=4):
    return torch.randint(0, 256, (42, channels, size, size), generator=torch.Generator().manual_seed(42), dtype=torch.uint8)


def put(values, place, value):
    values = values.clone() if isinstance(values, torch.Tensor) else list(values)
    values[place] = value
    return values


def nan_at(*place):
    return put(PIXELS / 255, place, NAN)


NAN, INF = float("nan"), float("inf")
PIXELS, CLASSES = images(), [index % 3 for index in range(42)]
FRACTIONS, NEXT = [label + 0.7 for label in CLASSES], [label + 1 for label in CLASSES]
FOUR, MASKS = torch.ones(42, 4).triu(), torch.zeros(42, 4, 4, dtype=torch.int64)
HOT = one_hot(torch.tensor(CLASSES), 3).float()
SEVERAL = torch.maximum(HOT, torch.tensor([1.0, 0.0, 0.0]))
NUMBERS = torch.linspace(-1, 1, 42)
THREE = NUMBERS.expand(3, 42).T
MIXED = [torch.zeros(1, 4 + (index == 30), 4, dtype=torch.uint8) for index in range(42)]


def sets(train, val=None):
    # Each split from the text of its arguments
    return {split: eval(f"Listed({code})") for split, code in (("train", train), ("val", val)) if code is not None}


def halve_third(image):
    if torch.equal(image, PIXELS[3]):
        raise RuntimeError("not this one")
    return image
"""
WORDS = (
    "threads=1", "logger=none", "log.progress=false", "log.curves=false", "device=cpu", "model=mlp", "model.hidden=[4]",
    "data=digits", "data.normalize.mean=null", "data.normalize.std=null", "data.num_workers=0", "data.batch_size=8",
    "epochs=1", "transform=none", "evaluate.test=false", "data.split.test=0", "trust=[unfit_sets]",
)  # fmt: skip
REGRESSION = ("task=regression", "loss=mse")
MULTILABEL = ("task=multilabel", "loss=bce")


@pytest.fixture(autouse=True)
def sets(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "unfit_sets.py").write_text(SETS)
    monkeypatch.syspath_prepend(str(workdir))


def on(train: str, *words: str, val: str | None = None) -> tuple[str, ...]:
    """The words that train on sets with these arguments of `Listed`; without `val`, a part of `train` validates."""
    sets = [f"+data.dataset.train='{train}'", *([f"+data.dataset.val='{val}'"] if val is not None else [])]
    return (*WORDS, "data.dataset._target_=unfit_sets.sets", *sets, *words)


HALVE = "{_target_: unfit_sets.halve_third, _partial_: true}"
REFUSED = {
    # labels
    "label too large": (on("labels=put(CLASSES, 7, 3)"), "sample 7 of 'train' is 3, and there are 3 classes, 0 to 2"),
    "label below zero": (on("labels=put(CLASSES, 7, -1)"), "the target of sample 7 of 'train' is -1"),
    "label too large in val": (on("", val="labels=put(CLASSES, 41, 9)"), "the target of sample 41 of 'val' is 9"),
    "label that is read only, first": (on("", val="labels=put(CLASSES, 0, 3), show=False"), "sample 0 of 'val' is 3"),
    "label that is read only": (on("labels=put(CLASSES, 41, 5), show=False"), "sample 41 of 'train' is 5"),
    "label that is read only in val": (on("", val="labels=put(CLASSES, 41, 5), show=False"), "sample 41 of 'val' is 5"),
    "label of a worker": (on("labels=put(CLASSES, 41, 5), show=False", "data.num_workers=1"), "sample 41 of 'train' is 5"),
    "huge label": (on("numbers=put(CLASSES, 3, 10**9)"), "sample 3 of 'train' is 1000000000"),
    "fractions": (on("labels=FRACTIONS"), "sample 0 of 'train' is 0.7, which is not a whole number"),
    "fractions that are read only": (on("labels=FRACTIONS, show=False"), "sample 0 of 'train' is 0.7, which is not a whole number"),
    "multi-hot": (on("labels=SEVERAL", val=""), "sample 1 of 'train' is [1, 1, 0], which are not probabilities"),
    "multi-hot that is read only": (on("labels=SEVERAL, show=False", val=""), "of 'train' is [1, 1, 0], which are not prob"),
    "multi-hot in val": (on("", val="labels=SEVERAL"), "of 'val' is [1, 1, 0], which are not probabilities"),
    "multi-hot, what to do": (on("labels=SEVERAL", val=""), "task=multilabel loss=bce for several labels per sample"),
    "masks": (on("labels=MASKS, show=False"), "the target of a sample has shape (4, 4), as the mask of a segmentation"),
    "masks of labels": (on("labels=MASKS, show=False", *MULTILABEL), "task=segmentation with pairs"),
    "masks of numbers": (on("labels=MASKS, show=False", *REGRESSION), "task=segmentation with pairs"),
    "vectors of another length": (on("labels=FOUR"), "of 'train' has 4 values, and a class number is expected"),
    "labels of another length": (on("labels=FOUR", *MULTILABEL), "has 4 values, and a vector for 3 labels is expected"),
    "class numbers as labels": (on("labels=put(CLASSES, 7, 1)", *MULTILABEL), "has 1 value, and a vector for 3 labels is expected"),
    "fractions of labels in val": (on("labels=SEVERAL", *MULTILABEL, val="labels=SEVERAL * 0.5"), "of 'val' is [0.5, 0, 0]"),
    "labels above 1": (on("labels=SEVERAL * 2", *MULTILABEL), "of 'train' is [2, 0, 0], which are not all from 0 to 1"),
    "labels and one choice": (on("labels=FOUR[:, :3]", "task=multilabel"), "loss: CrossEntropy is for one class per sample"),
    "numbers and one choice": (on("numbers=THREE", "task=regression"), "loss: CrossEntropy is for one class per sample"),
    "classes as numbers": (on("labels=put(CLASSES, 7, 1)", *REGRESSION), "class numbers with names such as 'a'"),
    "nan to regress": (on("numbers=put(NUMBERS, 9, NAN)", *REGRESSION), "sample 9 of 'train' is nan, which is not finite"),
    "inf to regress in val": (on("numbers=NUMBERS", *REGRESSION, val="numbers=put(NUMBERS, 9, INF)"), "sample 9 of 'val' is inf"),
    "several numbers to regress": (on("numbers=THREE", *REGRESSION, "task.num_outputs=2"), "is 2, but the data says 3"),
    "nan of several numbers": (on("numbers=put(THREE, 9, NAN)", *REGRESSION), "sample 9 of 'train' is [nan, nan, nan]"),
    "targets too short": (on("targets=CLASSES[:-2]"), "its attribute targets has 40 entries for 42 samples of 'train'"),
    "targets too short, plain": (on("targets=CLASSES[:-2]", "data.split.stratified=false"), "40 entries for 42 samples of 'train'"),
    "targets too short in val": (on("", val="targets=CLASSES[:-2]"), "targets has 40 entries for 42 samples of 'val'"),
    "ragged targets": (on("labels=put(CLASSES, 30, HOT[0]), show=False"), "batch have different shapes, such as () and (3,)"),
    "word as target": (on('labels=put(CLASSES, 30, "cat"), show=False'), "data.dataset: a target is 'cat', which is not a number"),
    # classes
    "classes in another order": (on("", val='classes=("b", "a", "c")'), "data.dataset: class 0 is 'b' in 'val' and 'a' in 'train'"),
    # images
    "channels of val": (on("", val="images(channels=3)"), "images of 'val' have 3 channels, and those of 'train' 1"),
    "size of val": (on("", val="images(size=5)"), "model: cannot take images of shape (1, 1, 5, 5) of 'val': "),
    "size inside a batch": (on("MIXED"), "images of one batch have different shapes, such as (1, 4, 4) and (1, 5, 4)"),
    "0 to 255 beside uint8": (on("", val="PIXELS / 255 * 255"), "images of 'val' are torch.float32 with values from"),
    "normalised beside uint8": (on("", val="PIXELS / 255 - 0.5"), "images of 'val' are torch.float32 with values from -0.4"),
    "uint8 beside 0 to 255": (on("PIXELS / 255 * 255", val=""), "of 'train' are torch.float32 with values from 14"),
    "nan in train while measuring": (on("nan_at(30)"), "sample 30 of 'train' has values that are not finite"),
    "nan in train while measuring, transformed": (on("nan_at(30)", f"transform.sample_eval=[{HALVE}]"), "sample 30 of"),
    # reading
    "raises": (on("at=30"), "data.dataset: sample 30 of 'train' cannot be read: KeyError: 'lost.png' (unfit_sets.py:"),
    "raises at once": (on("at=0"), "data.dataset: sample 0 of 'train' cannot be read: KeyError: 'lost.png'"),
    "raises in val": (on("", val="at=30"), "data.dataset: sample 30 of 'val' cannot be read: KeyError: 'lost.png'"),
    "raises in a worker": (on("at=30", "data.num_workers=1"), "sample 30 of 'train' cannot be read: KeyError: 'lost.png'"),
    "longer than it is": (on("show=False, length=48"), "of 'train' cannot be read: IndexError: "),
    "triples": (on("triples=True"), "data.dataset: sample 21 of 'train' is not a pair (image, target)"),
    "empty": (on("length=0"), "data.dataset: its 'train' split is empty"),
    "negative length": (on("length=-1"), "data.dataset: the length of its 'train' split is not known: ValueError"),
    "length that raises": (on('length="unknown"'), "its 'train' split is not known: ZeroDivisionError: no samples"),
    "transform that raises": (on("", f"transform.sample_train=[{HALVE}]"), "cannot take sample 3 of 'train': Runtime"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_do_not_fit_are_refused_with_split_and_sample(name: str, run: Any) -> None:
    words, message = REFUSED[name]
    result = run("train", *words)
    assert message in result.err, result.err[-3000:] + result.out
    assert result.status == 2
    assert "Traceback" not in result.err
    assert any(way in result.err for way in ("    allowed: ", "; set ", "; give ", "is empty"))


WARNED = {
    "nan in the first of val": (on("PIXELS / 255", val="nan_at(0, 0, 1, 1)"), "on 'val' is nan: sample 0 of 'val' has pixels"),
    "nan later in val": (on("PIXELS / 255", val="nan_at(3, 0, 1, 1)"), "sample 3 of 'val' has pixels that are not finite"),
    "another attribute": (on("targets=[n % 3 for n in NEXT]"), "has 1 for sample 0 of 'train', and the sample itself 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_data_that_are_suspicious_are_a_warning(name: str, train: Any) -> None:
    words, message = WARNED[name]
    result = train(*words)
    assert message in (result.directory / "run.log").read_text(), result.out
    assert result.out.count(message) <= 1


FINE = (
    on("", val="PIXELS / 255"), on("PIXELS / 255", val=""), on("", val=""), on("labels=put(CLASSES, 3, 2.0)"),
    on("targets=NEXT, target_transform=lambda label: label - 1"), on("", val="labels=HOT"), on("labels=HOT.long()"),
    on("numbers=NUMBERS", *REGRESSION), on("numbers=THREE", *REGRESSION),
)  # fmt: skip


@pytest.mark.parametrize("words", FINE, ids=lambda words: " ".join(words[len(WORDS) :]))
def test_data_that_fit_raise_no_warning(words: tuple[str, ...], train: Any) -> None:
    assert "warning:" not in train(*words).out


@pytest.mark.parametrize("key", ["callbacks.early_stopping", "scheduler"])
def test_what_follows_evaluations_needs_a_validation_split(key: str, rejected: Any) -> None:
    chosen = "scheduler=plateau" if key == "scheduler" else "callbacks=early_stopping"
    error = rejected("train", *on('classes=("a", "crane", "crane")'), "data.split.val=0", chosen).err
    assert f"{key}: waits for evaluations, but there is no validation split" in error
    assert "data.split.val" in error


FLAT = "[{_target_: torch.nn.Flatten}, {_target_: torch.nn.Linear, in_features: 16, out_features: 3}, {_target_: NORM}]"
ONE = FLAT.replace("NORM", "torch.nn.BatchNorm1d, num_features: 3")
SPATIAL = f"[{{_target_: torch.nn.BatchNorm2d, num_features: 1}}, {FLAT[1:].replace('NORM', 'torch.nn.Identity')}"


@pytest.mark.parametrize(
    ("layers", "more"), [(ONE, ()), (ONE, ("data.drop_last=true",)), (SPATIAL, ()), (ONE, ("freeze=['2']",))]
)
def test_a_batch_of_one_sample_is_refused_where_batchnorm_cannot_take_it(
    layers: str, more: tuple[str, ...], run: Any
) -> None:
    net = (
        "model=mlp",
        "model._target_=torch.nn.Sequential",
        f"model._args_={layers}",
        "~model.hidden",
        "~model.dropout",
    )
    found = run("train", *on("", val=""), *net, "data.batch_size=41", *more)
    refused = layers == ONE and not more
    assert found.status == (2 if refused else 0), found.err
    assert "Traceback" not in found.err
    wanted = ("data.batch_size: ", "has 1 sample", "data.drop_last=true") if refused else ()
    assert all(part in found.err for part in wanted)


def test_eval_names_a_sample_that_is_not_finite_too(train: Any, accepted: Any) -> None:
    directory = train(*on("PIXELS / 255", val="nan_at(3, 0, 1, 1)")).directory
    result = accepted("eval", f"ckpt_path={directory}", "split=val", "trust=[unfit_sets]")
    assert "sample 3 of 'val' has pixels that are not finite" in result.out + result.err
