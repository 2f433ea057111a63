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

    def __init__(self, images=None, labels=None, show=True, classes=("a", "b", "c"), length=None, at=None, triples=False):
        self.images = PIXELS if images is None else images
        self.labels = CLASSES if labels is None else labels
        self.length, self.at, self.triples = length, at, triples
        if show:
            self.targets = self.labels
        if classes:
            self.classes = list(classes)

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


def changed(values, place, value):
    values = values.clone() if isinstance(values, torch.Tensor) else list(values)
    if place is not None:
        values[place] = value
    return values


def nan_at(*place):
    return changed(PIXELS / 255, place, float("nan"))


def with_attributes(listed, **attributes):
    vars(listed).update(attributes)
    return listed


PIXELS, CLASSES = images(), [index % 3 for index in range(42)]
HOT = one_hot(torch.tensor(CLASSES), 3).float()
SEVERAL = torch.maximum(HOT, torch.tensor([1.0, 0.0, 0.0]))
NUMBERS = torch.linspace(-1, 1, 42)
MIXED = [torch.zeros(1, 4 + (index == 30), 4, dtype=torch.uint8) for index in range(42)]
UNFIT = {
    "fine": Listed,
    "at": lambda place, value, **given: Listed(None, changed(CLASSES, place, value), **given),
    "huge": lambda: Listed(None, changed(CLASSES, 3, 10**9), classes=()),
    "fractions": lambda **given: Listed(None, [label + 0.7 for label in CLASSES], **given),
    "multihot": lambda factor=1, **given: Listed(None, SEVERAL * factor, **given),
    "onehot": lambda dtype="float32": Listed(None, HOT.to(getattr(torch, dtype))),
    "wide": lambda width=3: Listed(None, torch.ones(42, width).triu()),
    "masks": lambda: Listed(None, torch.zeros(42, 4, 4, dtype=torch.int64), show=False),
    "other_order": lambda: Listed(classes=("b", "a", "c")),
    "floats": lambda factor=1.0, low=0.0: Listed(PIXELS / 255 * factor + low),
    "nan_pixel": lambda place=0: Listed(nan_at(place, 0, 1, 1)),
    "nan_image": lambda place: Listed(nan_at(place)),
    "images": lambda **given: Listed(images(**given)),
    "numbers": lambda width=0, place=None, value=None: Listed(
        None, changed(NUMBERS[:, None].expand(42, width) if width else NUMBERS, place, value), classes=()
    ),
    "twins": lambda: Listed(classes=("a", "crane", "crane")),
    "short": lambda: with_attributes(Listed(), targets=CLASSES[:-2]),
    "liar": lambda: with_attributes(Listed(), targets=[(label + 1) % 3 for label in CLASSES]),
    "moved": lambda: with_attributes(
        Listed(None, [label + 1 for label in CLASSES]), target_transform=lambda label: label - 1, labels=CLASSES
    ),
    "ragged": lambda: Listed(None, changed(CLASSES, 30, torch.tensor([1, 2])), show=False),
    "word": lambda: Listed(None, changed(CLASSES, 30, "cat"), show=False),
    "sizes": lambda: Listed(MIXED),
}
FINE = {"numbers": {"classes": ()}, "labels": {"labels": SEVERAL}, "nan_pixel": {"images": PIXELS / 255}}


def sets(what, split="train", fine=None, **given):
    '''A set that does not fit as a split, and beside it a fine one, alone unless `split` or `fine` asks for another.'''
    unfit, others = UNFIT[what](**given), Listed(**FINE.get(fine or what, {}))
    if split == "val":
        return {"train": others, "val": unfit}
    return {"train": unfit, "val": others} if fine else {"train": unfit}


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


def on(name: str, *words: str, **arguments: Any) -> tuple[str, ...]:
    """The words that train on one of the sets."""
    given = [f"+data.dataset.{key}={value}" for key, value in arguments.items()]
    return (*WORDS, "data.dataset._target_=unfit_sets.sets", f"+data.dataset.what={name}", *given, *words)


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
    "fractions that are read only": (on("fractions", show="false"), "sample 0 of 'train' is 0.7, which is not a whole number"),
    "multi-hot": (on("multihot", fine="classes"), "sample 1 of 'train' is [1, 1, 0], which are not probabilities"),
    "multi-hot that is read only": (on("multihot", show="false", fine="classes"), "of 'train' is [1, 1, 0], which are not prob"),
    "multi-hot in val": (on("multihot", split="val"), "of 'val' is [1, 1, 0], which are not probabilities"),
    "multi-hot, what to do": (on("multihot", fine="classes"), "task=multilabel loss=bce for several labels per sample"),
    "masks": (on("masks"), "the target of a sample has shape (4, 4), as the mask of a segmentation"),
    "masks of labels": (on("masks", *MULTILABEL), "task=segmentation with pairs"),
    "masks of numbers": (on("masks", *REGRESSION), "task=segmentation with pairs"),
    "vectors of another length": (on("wide", width=4), "of 'train' has 4 values, and a class number is expected"),
    "labels of another length": (on("wide", *MULTILABEL, width=4), "has 4 values, and a vector for 3 labels is expected"),
    "class numbers as labels": (on("at", *MULTILABEL, place=7, value=1), "has 1 value, and a vector for 3 labels is expected"),
    "fractions of labels in val": (on("multihot", *MULTILABEL, split="val", fine="labels", factor=0.5), "of 'val' is [0.5, 0, 0]"),
    "labels above 1": (on("multihot", *MULTILABEL, factor=2), "of 'train' is [2, 0, 0], which are not all from 0 to 1"),
    "labels and one choice": (on("wide", "task=multilabel"), "loss: CrossEntropy is for one class per sample"),
    "numbers and one choice": (on("numbers", "task=regression", width=3), "loss: CrossEntropy is for one class per sample"),
    "classes as numbers": (on("at", *REGRESSION, place=7, value=1), "class numbers with names such as 'a'"),
    "nan to regress": (on("numbers", *REGRESSION, place=9, value="nan"), "sample 9 of 'train' is nan, which is not finite"),
    "inf to regress in val": (on("numbers", *REGRESSION, place=9, value="inf", split="val"), "sample 9 of 'val' is inf"),
    "several numbers to regress": (on("numbers", *REGRESSION, "task.num_outputs=2", width=3), "is 2, but the data says 3"),
    "nan of several numbers": (on("numbers", *REGRESSION, place=9, value="nan", width=3), "sample 9 of 'train' is [nan, nan, nan]"),
    "targets too short": (on("short"), "data.dataset: its attribute targets has 40 entries for 42 samples of 'train'"),
    "targets too short, plain": (on("short", "data.split.stratified=false"), "has 40 entries for 42 samples of 'train'"),
    "targets too short in val": (on("short", split="val"), "targets has 40 entries for 42 samples of 'val'"),
    "ragged targets": (on("ragged"), "targets of one batch have different shapes, such as () and (2,)"),
    "word as target": (on("word"), "data.dataset: a target is 'cat', which is not a number"),
    # classes
    "classes in another order": (on("other_order", split="val"), "data.dataset: class 0 is 'b' in 'val' and 'a' in 'train'"),
    # images
    "channels of val": (on("images", split="val", channels=3), "images of 'val' have 3 channels, and those of 'train' 1"),
    "size of val": (on("images", split="val", size=5), "model: cannot take images of shape (1, 1, 5, 5) of 'val': "),
    "size inside a batch": (on("sizes"), "images of one batch have different shapes, such as (1, 4, 4) and (1, 5, 4)"),
    "0 to 255 beside uint8": (on("floats", split="val", factor=255), "images of 'val' are torch.float32 with values from"),
    "normalised beside uint8": (on("floats", split="val", low=-0.5), "images of 'val' are torch.float32 with values from -0.4"),
    "uint8 beside 0 to 255": (on("floats", factor=255, fine="uint8"), "of 'train' are torch.float32 with values from 14"),
    "nan in train while measuring": (on("nan_image", place=30), "sample 30 of 'train' has values that are not finite"),
    "nan in train while measuring, transformed": (on("nan_image", f"transform.sample_eval=[{HALVE}]", place=30), "sample 30 of"),
    # reading
    "raises": (on("fine", at=30), "data.dataset: sample 30 of 'train' cannot be read: KeyError: 'lost.png' (unfit_sets.py:"),
    "raises at once": (on("fine", at=0), "data.dataset: sample 0 of 'train' cannot be read: KeyError: 'lost.png'"),
    "raises in val": (on("fine", split="val", at=30), "data.dataset: sample 30 of 'val' cannot be read: KeyError: 'lost.png'"),
    "raises in a worker": (on("fine", "data.num_workers=1", at=30), "sample 30 of 'train' cannot be read: KeyError: 'lost.png'"),
    "longer than it is": (on("fine", show="false", length=48), "of 'train' cannot be read: IndexError: "),
    "triples": (on("fine", triples="true"), "data.dataset: sample 21 of 'train' is not a pair (image, target)"),
    "empty": (on("fine", length=0), "data.dataset: its 'train' split is empty"),
    "negative length": (on("fine", length=-1), "data.dataset: the length of its 'train' split is not known: ValueError"),
    "length that raises": (on("fine", length="unknown"), "its 'train' split is not known: ZeroDivisionError: no samples"),
    "transform that raises": (on("fine", f"transform.sample_train=[{HALVE}]"), "cannot take sample 3 of 'train': Runtime"),
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
    "nan in the first image of val": (on("nan_pixel", split="val"), "the loss on 'val' is nan: sample 0 of 'val' has pixels"),
    "nan later in val": (on("nan_pixel", split="val", place=3), "sample 3 of 'val' has pixels that are not finite"),
    "an attribute that says otherwise": (on("liar"), "targets has 1 for sample 0 of 'train', and the sample itself 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_data_that_are_suspicious_are_a_warning(name: str, train: Any) -> None:
    words, message = WARNED[name]
    result = train(*words)
    assert message in (result.directory / "run.log").read_text(), result.out
    assert result.out.count(message) <= 1


FINE = (
    on("floats", split="val"), on("floats", fine="uint8"), on("moved"), on("at", place=3, value=2.0), on("fine", split="val"),
    on("numbers", *REGRESSION), on("numbers", *REGRESSION, width=3), on("onehot", split="val"), on("onehot", dtype="int64"),
)  # fmt: skip


@pytest.mark.parametrize("words", FINE, ids=lambda words: " ".join(words[len(WORDS) :]))
def test_data_that_fit_raise_no_warning(words: tuple[str, ...], train: Any) -> None:
    assert "warning:" not in train(*words).out


@pytest.mark.parametrize("key", ["callbacks.early_stopping", "scheduler"])
def test_what_follows_evaluations_needs_a_validation_split(key: str, rejected: Any) -> None:
    chosen = "scheduler=plateau" if key == "scheduler" else "callbacks=early_stopping"
    error = rejected("train", *on("twins"), "data.split.val=0", chosen).err
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
    found = run("train", *on("fine", split="val"), *net, "data.batch_size=41", *more)
    refused = layers == ONE and not more
    assert found.status == (2 if refused else 0), found.err
    assert "Traceback" not in found.err
    wanted = ("data.batch_size: ", "has 1 sample", "data.drop_last=true") if refused else ()
    assert all(part in found.err for part in wanted)


def test_eval_names_a_sample_that_is_not_finite_too(train: Any, accepted: Any) -> None:
    directory = train(*on("nan_pixel", split="val", place=3)).directory
    result = accepted("eval", f"ckpt_path={directory}", "split=val", "trust=[unfit_sets]")
    assert "sample 3 of 'val' has pixels that are not finite" in result.out + result.err
