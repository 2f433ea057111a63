"""Pictures of the first training batch and of predictions in the run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawn_masks
import drawn_objects
import numpy as np
import pytest
import torch
from extras import needs
from PIL import Image

import runner
from runner.tasks.detection import Detection
from runner.tasks.segmentation import Segmentation
from runner.tasks.task import colour

SEGMENTATION = (
    "experiment=segmentation", "data.root=shapes", "data.image_size=24", "model=small_cnn", "~model.width",
    "~model.dropout", "model._target_=drawn_nets.Tiny", "data.batch_size=8", "epochs=1", "data.num_workers=0",
)  # fmt: skip
DETECTION = (
    "experiment=detection_torchvision", "data.root=drawn", *drawn_objects.COCO, "model=small_cnn", "~model.width", "~model.dropout",
    "model._target_=tiny_detector.Scripted", "epochs=1", "data.batch_size=2", "data.num_workers=0",
)  # fmt: skip
OWN = """
import torch
from runner.tasks.segmentation import Segmentation

class Odd(Segmentation):
    def draw(self, sample, outputs):
        raise ValueError("there is no such colour")

class Colourless(Segmentation):
    def legend(self, classes):
        return {"tall": "no such colour"}

class Plain:
    def outputs(self, classes):
        return 3
    def training_step(self, modules, batch):
        return torch.nn.functional.dropout(modules["model"](batch[0])).square().mean()
    def evaluation_step(self, modules, batch):
        logits = modules["model"](batch[0])
        return {"loss": logits.square().mean(), "outputs": logits.mean((1, 2, 3)), "targets": torch.zeros(len(logits))}
    def shown(self, values):
        return {"corner": 255 if values.ndim == 0 else 0}
    def draw(self, sample, outputs):
        torch.rand(1)
        picture = sample[0][0].clone()
        picture[:, :3, :3] = outputs["corner"]
        return picture
"""
VECTORS = """
import torch
from torch.utils.data import TensorDataset

class Vectors(TensorDataset):
    def __init__(self):
        super().__init__(torch.arange(80.0).view(20, 4) / 80, torch.arange(20) % 2)

class Step:
    def training_step(self, modules, batch):
        return torch.nn.functional.cross_entropy(modules["model"](batch[0]), batch[1])
    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}
"""
PLAIN = (
    "epochs=2",
    "log.every_steps=1",
    "task._target_=own_tasks.Plain",
    "~task.ignore_index",
    "~task.aux_weight",
    "loss=none",
)
SIDE, GAP, LINE = 202, 10, 22  # pixels of a tile, between tiles, and of a line of text


@pytest.fixture
def shapes(workdir: Path, own_module: Callable[..., Path]) -> None:
    own_module("drawn_nets", drawn_masks.MODEL)
    own_module("own_tasks", OWN)
    drawn_masks.draw(workdir / "shapes", void=True)


def pixels(directory: Path, name: str) -> np.ndarray:
    with Image.open(directory / "pictures" / f"{name}.png") as image:
        return np.asarray(image).astype(int)


def tile(picture: np.ndarray, column: int, top: int, size: int) -> np.ndarray:
    """The image in a column of the first row, below `top` pixels, reduced to its own pixels."""
    centres = ((np.arange(size) + 0.5) * SIDE / size).astype(int)
    return picture[top + centres][:, GAP + column * (SIDE + GAP) + centres]


def columns(picture: np.ndarray) -> int:
    return (picture.shape[1] - GAP) // (SIDE + GAP)


def count(picture: np.ndarray, wanted: tuple[int, int, int]) -> int:
    return int((np.abs(picture - wanted) <= 2).all(2).sum())


def test_digits_are_drawn_with_their_classes_and_no_bit_of_the_run_changes(train: Callable[..., Any]) -> None:
    found, without = (train("data=digits", "epochs=2", f"log.pictures={each}") for each in ("true", "false"))
    for name in ("best", "last", "test", "weights_sha256"):
        assert found.summary[name] == without.summary[name]
    assert not (without.directory / "pictures").exists()
    runner.report(found.directory, html=Path("page.html"))
    assert Path("page.html").read_text().count("data:image/png;base64,") == 2
    batch, predictions = (pixels(found.directory, name) for name in ("train_batch", "predictions"))
    assert columns(batch) == columns(predictions) == 4
    rows = [round(each.shape[0] / (SIDE + 2 * GAP + LINE * lines)) for each, lines in ((batch, 1), (predictions, 3))]
    assert rows == [4, 3], "16 images of training, 9 of validation"
    assert count(predictions, (0x22, 0x88, 0x33)) + count(predictions, (0xBB, 0x33, 0x44)) > 50
    assert count(batch, (0x22, 0x88, 0x33)) == 0, "nothing is right or wrong in a training batch"


def test_masks_are_drawn_over_the_image_with_a_legend_and_leave_the_background(
    train: Callable[..., Any], shapes: None, workdir: Path
) -> None:
    directory = train(*SEGMENTATION).directory
    assert columns(pixels(directory, "train_batch")) == 4
    picture = pixels(directory, "predictions")
    assert columns(picture) == 6, "three pairs of truth and prediction"
    first = [min((workdir / "shapes/val" / kind).iterdir()) for kind in ("images", "masks")]
    image, mask = (np.asarray(Image.open(path)).astype(int) for path in first)
    truth = tile(picture, 0, 2 * GAP + 2 * LINE, 24)
    unmarked = (mask == 0) | (mask == 255)
    assert np.abs(truth - image)[unmarked].max() <= 1
    blended = (image + np.array(colour(1))) / 2
    assert np.abs(truth - blended)[mask == 1].max() <= 2
    assert all(count(picture[: GAP + 2 * LINE + GAP], colour(number)) > 100 for number in (1, 2)), "the legend"


@pytest.mark.parametrize(
    ("classes", "drawn"),
    [
        ((), False),
        (("background", "disc"), False),
        (("__Background__", "disc"), False),
        (("0", "1"), False),
        (("road", "car"), True),
    ],
    ids=str,
)
def test_class_0_is_drawn_unless_it_is_the_background(classes: tuple[str, ...], drawn: bool) -> None:
    task, sample = Segmentation(2), (torch.zeros(1, 3, 1, 2, dtype=torch.uint8), torch.zeros(1, 1, 2))
    picture = task.draw(sample, task.shown(torch.tensor([[0, 255]])), classes)
    assert picture[:, 0, 0].tolist() == [each // 2 * drawn for each in colour(0)]
    assert picture[:, 0, 1].tolist() == [0, 0, 0]
    assert list(task.legend(classes).values()) == [colour(number) for number in range(1 - drawn, len(classes))]


def test_a_run_and_predict_draw_class_0_of_a_street(
    train: Callable[..., Any], accepted: Callable[..., Any], shapes: None, workdir: Path
) -> None:
    (workdir / "shapes/classes.txt").write_text("road\ndisc\nsquare")
    directory = train(*SEGMENTATION).directory
    picture = pixels(directory, "predictions")
    assert all(count(picture[: GAP + 2 * LINE + GAP], colour(number)) > 100 for number in range(3)), "the legend"
    words = ("input=val", "output=found.csv", "pictures=true")
    accepted("predict", f"ckpt_path={directory}", *words)
    with Image.open(workdir / "shapes/val/images/000.png") as image:
        given = np.asarray(image).astype(int)
    mask, shown = (
        np.asarray(Image.open(next(Path("found_images").glob(f"*0_{each}.png")))) for each in ("mask", "picture")
    )
    assert np.abs(shown - (given + np.array([colour(0), colour(1), colour(2)])[mask]) / 2).max() <= 2


@pytest.mark.parametrize("number", [1, 2])
def test_a_mask_of_one_class_or_none_is_drawn(number: int) -> None:
    sample = torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1, 2, 2)
    task = Segmentation(3)
    mask = torch.tensor([[0, 255], [0, number]])
    picture = task.draw(sample, task.shown(mask))
    assert picture[:, 1, 1].tolist() == [each // 2 for each in colour(number)]
    assert int(picture.sum()) == sum(each // 2 for each in colour(number))
    assert torch.equal(task.draw(sample, task.shown(torch.zeros(2, 2))), sample[0][0])


@needs("detection")
def test_boxes_are_drawn_with_names_and_scores(
    train: Callable[..., Any], own_module: Callable[..., Path], workdir: Path
) -> None:
    drawn_objects.draw(workdir / "drawn", "train", 6, 0)
    drawn_objects.draw(workdir / "drawn", "val", 5, 1)
    own_module("tiny_detector", "import torch\n" + drawn_objects.DETECTOR)
    directory = train(*DETECTION).directory
    batch, picture = (pixels(directory, name) for name in ("train_batch", "predictions"))
    assert columns(batch) == 2
    assert columns(picture) == 6
    assert count(batch, colour(1)) + count(batch, colour(2)) > 100
    assert count(picture, colour(1)) + count(picture, colour(2)) > 100
    task, image = Detection(2), torch.full((1, 3, 40, 40), 9, dtype=torch.uint8)
    objects = {"boxes": torch.tensor([[2.0, 3, 20, 30], [25, 25, 35, 35]]), "labels": torch.tensor([2, 1])}
    found = task.draw((image, None), objects | {"scores": torch.tensor([0.9, 0.4])}, ["tall", "wide"])
    assert tuple(found[:, 3, 2].tolist()) == colour(2)
    assert (found[:, 25:36, 30:36] == 9).all(), "an object with a low score is not drawn"
    assert not torch.equal(found, task.draw((image, None), objects, ["tall", "wide"]))


@pytest.mark.parametrize("task", ["Odd", "Colourless"])
def test_a_drawing_that_fails_in_the_task_or_in_the_thread_warns_once(
    train: Callable[..., Any], shapes: None, task: str
) -> None:
    failed = train(*SEGMENTATION, "epochs=2", "log.every_steps=1", f"task._target_=own_tasks.{task}")
    assert failed.summary["status"] == "finished"
    log = (failed.directory / "run.log").read_text()
    assert log.count("log.pictures") == 1
    assert "no such colour" in log
    assert not list((failed.directory / "pictures").glob("*"))


def test_a_custom_task_draws_and_its_random_numbers_change_no_bit(train: Callable[..., Any], shapes: None) -> None:
    words = (*SEGMENTATION, *PLAIN)
    found, without = (train(*words, f"log.pictures={each}") for each in ("auto", "false"))
    assert found.summary["weights_sha256"] == without.summary["weights_sha256"]
    marked = tile(pixels(found.directory, "predictions"), 1, 2 * GAP + LINE, 24)
    assert (marked[:3, :3] == 255).all()
    assert not (marked == 255).all()


def test_a_resumed_run_draws_predictions_and_not_the_first_batch_again(
    train: Callable[..., Any], stopped: Callable[..., Any]
) -> None:
    words = ("data=digits", "epochs=2", "data.batch_size=128")
    expected = train(*words).summary["weights_sha256"]
    directory = stopped(3, *words).directory
    assert [path.name for path in (directory / "pictures").iterdir()] == ["train_batch.png"]
    resumed = train(f"ckpt_path={directory}", "callbacks=none")
    assert resumed.summary["weights_sha256"] == expected
    assert [path.name for path in (resumed.directory / "pictures").iterdir()] == ["predictions.png"]


def test_vectors_are_not_drawn(train: Callable[..., Any], own_module: Callable[..., Path]) -> None:
    own_module("own_vectors", VECTORS)
    words = (
        "data=own", "data.dataset._target_=own_vectors.Vectors", "data.images=[]", "transform=none", "epochs=1", "loss=none",
        "model._target_=torch.nn.Linear", "~model.width", "~model.dropout", "+model.in_features=4", "+model.out_features=2",
        "task={_target_: own_vectors.Step}",
    )  # fmt: skip
    for value in ("auto", "true"):
        directory = train(*words, f"log.pictures={value}").directory
        assert not (directory / "pictures").exists()
        assert ("log.pictures" in (directory / "run.log").read_text()) == (value == "true")
