"""Whole runs on data sets of the user's that do not fit the task, the other splits, or themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SETS = """
import numpy as np
import torch
from torch.utils.data import Dataset


class Listed(Dataset):
    '''Samples from two lists; `show` says whether the targets are an attribute too.'''

    def __init__(self, images, labels, show=True, classes=("a", "b", "c")):
        self.images, self.labels = images, labels
        if show:
            self.targets = labels
        if classes:
            self.classes = list(classes)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Raises(Listed):
    def __init__(self, *args, at=0, **options):
        super().__init__(*args, **options)
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            raise KeyError("lost.png")
        return super().__getitem__(index)


class Longer(Listed):
    def __len__(self):
        return len(self.images) + 6


class Triples(Listed):
    def __getitem__(self, index):
        return self.images[index], self.labels[index], *(index > 20) * [index]


class BadLength(Listed):
    length = 0

    def __len__(self):
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


def images(count=42, channels=1, size=4, dtype=torch.uint8):
    pixels = torch.randint(0, 256, (count, channels, size, size), generator=torch.Generator().manual_seed(count))
    return pixels.to(dtype)


def labels(count=42, classes=3):
    return [index % classes for index in range(count)]


def changed(values, place, value):
    values = list(values)
    values[place] = value
    return values


def pair(val, train=None, **options):
    return {"train": train or Listed(images(), labels(), **options), "val": val}


def at(place, value, split="train", **options):
    broken = Listed(images(), changed(labels(), place, value), **options)
    return {"train": broken} if split == "train" else pair(broken, **options)


def fractions(shown=True):
    return Listed(images(), [index % 3 + 0.7 for index in range(42)], show=shown)


def multihot(shown=True, split="train", factor=1):
    rows = torch.nn.functional.one_hot(torch.tensor(labels()), 3).float()
    rows[:, 0] = 1
    broken, fine = Listed(images(), rows * factor, show=shown), Listed(images(), labels())
    if factor != 1:
        fine = Listed(images(), rows)
        return {"train": fine, "val": broken} if split == "val" else broken
    return {"train": broken, "val": fine} if split == "train" else pair(broken)


def onehot(dtype="float32", train=False):
    rows = torch.nn.functional.one_hot(torch.tensor(labels()), 3).to(getattr(torch, dtype))
    return Listed(images(), rows) if train else pair(Listed(images(), rows))


def wide(width=3):
    return Listed(images(), torch.ones(42, width).triu()[:, :width])


def masks():
    return Listed(images(), torch.zeros(42, 4, 4, dtype=torch.int64), show=False)


def other_order():
    return pair(Listed(images(), labels(), classes=("b", "a", "c")))


def float_val(factor=1.0, low=0.0, train="uint8"):
    floats = images(dtype=torch.float32) / 255 * factor + low
    uint8, other = Listed(images(), labels()), Listed(floats, labels())
    return {"train": uint8, "val": other} if train == "uint8" else {"train": other, "val": uint8}


def nan_pixels(place=0):
    broken = images(dtype=torch.float32) / 255
    sets = {"train": Listed(broken.clone(), labels()), "val": Listed(broken, labels())}
    broken[place, 0, 1, 1] = float("nan")
    return sets


def nan_train(place):
    broken = images(dtype=torch.float32) / 255
    broken[place] = float("nan")
    return Listed(broken, labels())


def val_images(channels=1, size=4):
    return pair(Listed(images(channels=channels, size=size), labels()))


def numbers(place=None, value=None, split="train", width=0):
    values = torch.linspace(-1, 1, 42)[:, None].expand(42, width) if width else torch.linspace(-1, 1, 42)
    values = values.clone()
    if place is not None:
        values[place] = value
    broken = Listed(images(), values, classes=())
    return {"train": broken} if split == "train" else pair(broken, classes=())


def twins():
    return Listed(images(), labels(), classes=("a", "crane", "crane"))


def wrong_length(split="train"):
    broken = Listed(images(), labels())
    broken.targets = broken.targets[:-2]
    return {"train": broken} if split == "train" else pair(broken)


def liar():
    lying = Listed(images(), labels())
    lying.targets = [(label + 1) % 3 for label in labels()]
    return lying


def transformed():
    moved = Listed(images(), [label + 1 for label in labels()])
    moved.target_transform = lambda label: label - 1
    moved.labels = labels()
    return moved


def huge():
    return Listed(images(), changed(labels(), 3, 10**9), classes=())


def ragged():
    return Listed(images(), changed(labels(), 30, torch.tensor([1, 2])), show=False)


def words():
    return Listed(images(), changed(labels(), 30, "cat"), show=False)


def raises(at=30, split="train"):
    broken = Raises(images(), labels(), at=at)
    return {"train": broken} if split == "train" else pair(broken)


def longer():
    return Longer(images(), labels(), show=False)


def triples():
    return Triples(images(), labels())


def bad_length(length=None, raised=False):
    broken = BadLength(images(), labels())
    broken.length = ZeroDivisionError("no samples") if raised else length
    return broken


def sizes():
    mixed = [torch.zeros(1, 4 + (index == 30), 4, dtype=torch.uint8) for index in range(42)]
    return Listed(mixed, labels())


def halve_third(image):
    if torch.equal(image, images()[3]):
        raise RuntimeError("not this one")
    return image
"""
WORDS = (
    "threads=1", "logger=none", "log.progress=false", "log.curves=false", "device=cpu", "model=mlp", "model.hidden=[4]",
    "data=digits", "data.normalize.mean=null", "data.normalize.std=null", "data.num_workers=0", "data.batch_size=8",
    "epochs=1", "transform=none",
    "evaluate.test=false", "data.split.test=0", "trust=[unfit_sets]",
)  # fmt: skip
REGRESSION = ("task=regression", "loss=mse")
MULTILABEL = ("task=multilabel", "loss=bce")


@pytest.fixture(autouse=True)
def sets(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "unfit_sets.py").write_text(SETS)
    monkeypatch.syspath_prepend(str(workdir))


def on(name: str, *words: str, **arguments: Any) -> tuple[str, ...]:
    """The words that train on one of the sets."""
    given = [f"+data.dataset.{key}={value}" for key, value in arguments.items()]
    return (*WORDS, f"data.dataset._target_=unfit_sets.{name}", *given, *words)


HALVE = "{_target_: unfit_sets.halve_third, _partial_: true}"
REFUSED = {
    # labels
    "label too large": (on("at", place=7, value=3), "sample 7 of 'train' is 3, and there are 3 classes, 0 to 2"),
    "label below zero": (on("at", place=7, value=-1), "the target of sample 7 of 'train' is -1"),
    "label too large in val": (on("at", place=41, value=9, split="val"), "the target of sample 41 of 'val' is 9"),
    "label that is read only, first": (on("at", place=0, value=3, split="val", show="false"), "sample 0 of 'val' is 3"),
    "label that is read only": (on("at", place=41, value=5, show="false"), "sample 41 of 'train' is 5"),
    "label that is read only in val": (on("at", place=41, value=5, split="val", show="false"), "sample 41 of 'val' is 5"),
    "label of a worker": (on("at", "data.num_workers=1", place=41, value=5, show="false"), "sample 41 of 'train' is 5"),
    "huge label": (on("huge"), "sample 3 of 'train' is 1000000000"),
    "fractions": (on("fractions"), "sample 0 of 'train' is 0.7, which is not a whole number"),
    "fractions that are read only": (on("fractions", shown="false"), "sample 0 of 'train' is 0.7, which is not a whole number"),
    "multi-hot": (on("multihot"), "sample 1 of 'train' is [1, 1, 0], which are not probabilities"),
    "multi-hot that is read only": (on("multihot", shown="false"), "of 'train' is [1, 1, 0], which are not probabilities"),
    "multi-hot in val": (on("multihot", split="val"), "of 'val' is [1, 1, 0], which are not probabilities"),
    "multi-hot, what to do": (on("multihot"), "task=multilabel loss=bce for several labels per sample"),
    "masks": (on("masks"), "the target of a sample has shape (4, 4), as the mask of a segmentation"),
    "masks of labels": (on("masks", *MULTILABEL), "task=segmentation with pairs"),
    "masks of numbers": (on("masks", *REGRESSION), "task=segmentation with pairs"),
    "vectors of another length": (on("wide", width=4), "of 'train' has 4 values, and a class number is expected"),
    "labels of another length": (on("wide", *MULTILABEL, width=4), "has 4 values, and a vector for 3 labels is expected"),
    "class numbers as labels": (on("at", *MULTILABEL, place=7, value=1), "has 1 value, and a vector for 3 labels is expected"),
    "fractions of labels in val": (on("multihot", *MULTILABEL, split="val", factor=0.5), "of 'val' is [0.5, 0, 0], which are not"),
    "labels above 1": (on("multihot", *MULTILABEL, factor=2), "of 'train' is [2, 0, 0], which are not all from 0 to 1"),
    "labels and one choice": (on("wide", "task=multilabel"), "loss: CrossEntropy is for one class per sample"),
    "numbers and one choice": (on("numbers", "task=regression", width=3), "loss: CrossEntropy is for one class per sample"),
    "classes as numbers": (on("at", *REGRESSION, place=7, value=1), "class numbers with names such as 'a'"),
    "nan to regress": (on("numbers", *REGRESSION, place=9, value="nan"), "sample 9 of 'train' is nan, which is not finite"),
    "inf to regress in val": (on("numbers", *REGRESSION, place=9, value="inf", split="val"), "sample 9 of 'val' is inf"),
    "several numbers to regress": (on("numbers", *REGRESSION, "task.num_outputs=2", width=3), "is 2, but the data says 3"),
    "nan of several numbers": (on("numbers", *REGRESSION, place=9, value="nan", width=3), "sample 9 of 'train' is [nan, nan, nan]"),
    "targets too short": (on("wrong_length"), "data.dataset: its attribute targets has 40 entries for 42 samples of 'train'"),
    "targets too short, plain": (on("wrong_length", "data.split.stratified=false"), "has 40 entries for 42 samples of 'train'"),
    "targets too short in val": (on("wrong_length", split="val"), "targets has 40 entries for 42 samples of 'val'"),
    "ragged targets": (on("ragged"), "targets of one batch have different shapes, such as () and (2,)"),
    "word as target": (on("words"), "data.dataset: a target is 'cat', which is not a number"),
    # classes
    "classes in another order": (on("other_order"), "data.dataset: class 0 is 'b' in 'val' and 'a' in 'train'"),
    # images
    "channels of val": (on("val_images", channels=3), "data.dataset: images of 'val' have 3 channels, and those of 'train' 1"),
    "size of val": (on("val_images", size=5), "model: cannot take images of shape (1, 1, 5, 5) of 'val': "),
    "size inside a batch": (on("sizes"), "images of one batch have different shapes, such as (1, 4, 4) and (1, 5, 4)"),
    "0 to 255 beside uint8": (on("float_val", factor=255), "data.dataset: images of 'val' are torch.float32 with values from"),
    "normalised beside uint8": (on("float_val", low=-0.5), "images of 'val' are torch.float32 with values from -0.4"),
    "uint8 beside 0 to 255": (on("float_val", factor=255, train="float"), "of 'train' are torch.float32 with values from 14"),
    "nan in train while measuring": (on("nan_train", place=30), "sample 30 of 'train' has values that are not finite"),
    "nan in train while measuring, transformed": (on("nan_train", f"transform.sample_eval=[{HALVE}]", place=30), "sample 30 of"),
    # reading
    "raises": (on("raises"), "data.dataset: sample 30 of 'train' cannot be read: KeyError: 'lost.png' (unfit_sets.py:"),
    "raises at once": (on("raises", at=0), "data.dataset: sample 0 of 'train' cannot be read: KeyError: 'lost.png'"),
    "raises in val": (on("raises", split="val"), "data.dataset: sample 30 of 'val' cannot be read: KeyError: 'lost.png'"),
    "raises in a worker": (on("raises", "data.num_workers=1"), "sample 30 of 'train' cannot be read: KeyError: 'lost.png'"),
    "longer than it is": (on("longer"), "of 'train' cannot be read: IndexError: "),
    "triples": (on("triples"), "data.dataset: sample 21 of 'train' is not a pair (image, target)"),
    "empty": (on("bad_length", length=0), "data.dataset: its 'train' split is empty"),
    "negative length": (on("bad_length", length=-1), "data.dataset: the length of its 'train' split is not known: ValueError"),
    "length that raises": (on("bad_length", raised="true"), "its 'train' split is not known: ZeroDivisionError: no samples"),
    "transform that raises": (on("val_images", f"transform.sample_train=[{HALVE}]"), "cannot take sample 3 of 'train': Runtime"),
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
    "nan in the first image of val": (on("nan_pixels"), "the loss on 'val' is nan: sample 0 of 'val' has pixels that are not"),
    "nan later in val": (on("nan_pixels", place=3), "the loss on 'val' is nan: sample 3 of 'val' has pixels that are not finite"),
    "an attribute that says otherwise": (on("liar"), "targets has 1 for sample 0 of 'train', and the sample itself 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_data_that_are_suspicious_are_a_warning(name: str, train: Any) -> None:
    words, message = WARNED[name]
    result = train(*words)
    assert message in (result.directory / "run.log").read_text(), result.out
    assert result.out.count(message) <= 1


@pytest.mark.parametrize(
    "words",
    [
        on("float_val"),
        on("float_val", train="float"),
        on("transformed"),
        on("at", place=3, value=2.0),
        on("val_images"),
        on("numbers", *REGRESSION),
        on("numbers", *REGRESSION, width=3),
        on("onehot"),
        on("onehot", dtype="int64", train="true"),
    ],
    ids=lambda words: " ".join(words[len(WORDS) :]),
)
def test_data_that_fit_raise_no_warning(words: tuple[str, ...], train: Any) -> None:
    assert "warning:" not in train(*words).out


NO_VAL = (*on("twins"), "data.split.val=0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("callbacks=early_stopping",), "callbacks.early_stopping: waits for evaluations, but there is no validation split"),
        (("scheduler=plateau",), "scheduler: waits for evaluations, but there is no validation split"),
    ],
)  # fmt: skip
def test_what_follows_evaluations_needs_a_validation_split(words: tuple[str, ...], message: str, rejected: Any) -> None:
    result = rejected("train", *NO_VAL, *words)
    assert message in result.err
    assert "data.split.val" in result.err


NORMS = """
from torch import nn

class Normed(nn.Sequential):
    def __init__(self, in_channels, image_size, num_classes, spatial=False):
        norm = nn.BatchNorm2d(4) if spatial else nn.BatchNorm1d(4)
        first = [nn.Conv2d(in_channels, 4, 1), norm, nn.Flatten(), nn.LazyLinear(num_classes)]
        flat = [nn.Flatten(), nn.Linear(in_channels * image_size[0] * image_size[1], 4), norm, nn.Linear(4, num_classes)]
        super().__init__(*(first[:-1] + [nn.Linear(4 * image_size[0] * image_size[1], num_classes)] if spatial else flat))
"""


@pytest.mark.parametrize(
    ("words", "fine"),
    [
        (("data.batch_size=41",), False),
        (("data.batch_size=41", "data.drop_last=true"), True),
        (("data.batch_size=41", "+model.spatial=true"), True),
        (("data.batch_size=41", "freeze=['2']"), True),
    ],
)
def test_a_batch_of_one_sample_is_refused_where_batchnorm_cannot_take_it(
    words: tuple[str, ...], fine: bool, workdir: Path, run: Any
) -> None:
    (workdir / "normed.py").write_text(NORMS)
    found = run(
        "train",
        *on("val_images"),
        "model=mlp",
        "model._target_=normed.Normed",
        "~model.hidden",
        "~model.dropout",
        "trust=[unfit_sets,normed]",
        *words,
    )
    assert found.status == (0 if fine else 2), found.err
    assert "Traceback" not in found.err
    assert fine or "data.batch_size: " in found.err
    assert fine or "has 1 sample" in found.err
    assert fine or "data.drop_last=true" in found.err


def test_eval_names_a_sample_that_is_not_finite_too(train: Any, accepted: Any) -> None:
    directory = train(*on("nan_pixels", place=3)).directory
    result = accepted("eval", f"ckpt_path={directory}", "split=val", "trust=[unfit_sets]")
    assert "sample 3 of 'val' has pixels that are not finite" in result.out + result.err
