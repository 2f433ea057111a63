"""`predict`, `inspect` and `export` of tasks that say themselves what they make of a sample, through the program."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

MODULE = '''
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import tv_tensors
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks


class Squares(torch.utils.data.Dataset):
    """Images uint8 (3, 16, 16) with a bright square, and its mask (16, 16) of 0 and 1."""

    def __init__(self, samples=40):
        self.samples = samples

    def __len__(self):
        return self.samples

    def path(self, index):
        return f"squares/{index}.png"

    def corners(self, index):
        left, top = index % 7, index * 5 % 8
        return left, top, left + 8, top + 6

    def __getitem__(self, index):
        left, top, right, bottom = self.corners(index)
        image = torch.full((3, 16, 16), 40, dtype=torch.uint8)
        mask = torch.zeros(16, 16, dtype=torch.uint8)
        image[:, top:bottom, left:right] = 220
        mask[top:bottom, left:right] = 1
        return tv_tensors.Image(image), tv_tensors.Mask(mask)


class Boxes(Squares):
    """The same with as many boxes as the index says, 1 to 3, and images of two sizes."""

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        size = (16, 16 + 4 * (index % 2))
        boxes = torch.tensor([self.corners(index)] * (1 + index % 3), dtype=torch.float32)
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)
        return tv_tensors.Image(F.pad(image, (0, size[1] - 16))), {"boxes": boxes, "labels": torch.ones(len(boxes)).long()}


class Pixelwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, images):
        return self.layer(images)


class Segment:
    def outputs(self, classes):
        return 2

    def evaluation_step(self, modules, batch):
        return {"loss": F.cross_entropy(modules["model"](batch[0]), batch[1].long())}

    def training_step(self, modules, batch):
        return self.evaluation_step(modules, batch)["loss"]


class Shown(Segment):
    def predict_step(self, modules, batch):
        logits = modules["model"](batch[0])
        mask = logits.argmax(1)
        return {"mask": mask.to(torch.uint8), "share": mask.float().mean((1, 2)), "drawn": torch.rand(len(mask))}

    def draw(self, sample, outputs):
        return draw_segmentation_masks(sample[0][0], outputs["mask"].bool(), alpha=0.5, colors="red")


class Rows:
    """A supervised task in all but its rows."""

    def predict_step(self, modules, batch):
        return {"mean": modules["model"](batch[0]).mean((1, 2, 3))}


class Gap(nn.Module):
    def forward(self, outputs, masks):
        return (outputs.mean(1) - masks.float()).square().mean()


class Count(nn.Module):
    """The mean of each image, whatever its size."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, images):
        return self.layer(torch.stack([image.mean() for image in images])[:, None])[:, 0]


class Detect:
    monitor = "val/loss"

    @staticmethod
    def collate(samples):
        images, targets = zip(*samples)
        return list(images), list(targets)

    def outputs(self, classes):
        return 1

    def evaluation_step(self, modules, batch):
        counts = torch.tensor([float(len(target["boxes"])) for target in batch[1]])
        return {"loss": (modules["model"](batch[0]) - counts).square().mean()}

    def training_step(self, modules, batch):
        return self.evaluation_step(modules, batch)["loss"]

    def predict_step(self, modules, batch):
        scores = modules["model"](batch[0])
        boxes = [torch.tensor([[1.0, 2.0, 9.0, 8.0]] * (1 + number % 2)) for number in range(len(scores))]
        return {"boxes": boxes, "scores": [[float(score)] for score in scores], "best": scores}

    def draw(self, sample, outputs):
        return draw_bounding_boxes(sample[0][0], outputs["boxes"], colors="yellow")


class WrongRows(Shown):
    def predict_step(self, modules, batch):
        return {"mask": torch.zeros(1, 16, 16)}


class WrongPicture(Shown):
    def draw(self, sample, outputs):
        return torch.zeros(16, 16)


class Grey(Squares):
    def __init__(self, samples=40, channels=1):
        super().__init__(samples)

    def __getitem__(self, index):
        return {"image": super().__getitem__(index)[0][:1]}


class Copy(Segment):
    """Gives the image back."""

    def evaluation_step(self, modules, batch):
        return {"loss": modules["model"](batch["image"]).mean()}

    def predict_step(self, modules, batch):
        return {"grey": (batch["image"] * 255).round().to(torch.uint8)}


class Described(Shown):
    """The rows of pairs of image and target, with a head that the task adds."""

    def modules(self, model, loss):
        return {"head": nn.Linear(10, 2)}

    def training_step(self, modules, batch):
        return F.cross_entropy(modules["head"](modules["model"](batch[0])), batch[1] % 2)

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}

    def outputs(self, classes):
        return 10

    def predict_step(self, modules, batch):
        return {"odd": modules["head"](modules["model"](batch[0])).argmax(1), "text": ["=a,b"] * len(batch[0])}

    def draw(self, sample, outputs):
        return sample[0][0]
'''
COMMON = (
    "transform=none", "~model.dropout", "~model.width", "loss=none", "epochs=2", "optimizer.lr=0.05", "data.batch_size=8",
    "data.num_workers=0", "scheduler=constant", "data.images=['0']", "threads=1",
)  # fmt: skip
MASKS = (
    *COMMON, "data.dataset._target_=own_predictions.Squares", "model._target_=own_predictions.Pixelwise",
    "task._target_=own_predictions.Shown", "data.normalize.mean=[0.4,0.4,0.4]", "data.normalize.std=[0.2,0.2,0.2]",
)  # fmt: skip
BOXES = (
    *COMMON, "data=own", "data.dataset._target_=own_predictions.Boxes", "model._target_=own_predictions.Count",
    "task._target_=own_predictions.Detect",
)  # fmt: skip
GREY = (
    *COMMON, "data.images=[image]", "data.dataset._target_=own_predictions.Grey", "data.normalize.mean=null",
    "data.normalize.std=null", "model._target_=own_predictions.Count", "task._target_=own_predictions.Copy",
)  # fmt: skip
PAIRS = ("task._target_=own_predictions.Described", "loss=none", "transform=none", "epochs=1", "threads=1")


@pytest.fixture(autouse=True)
def module(own_module: Callable[..., Path]) -> None:
    own_module("own_predictions", MODULE)


@pytest.fixture
def predicted(printed: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """The rows of a file that `predict` writes: `predicted(directory, "rows.csv", "input=test")`."""

    def call(directory: Path, output: str, *words: str) -> list[dict[str, Any]]:
        found = printed("predict", f"ckpt_path={directory}", f"output={output}", *words)
        with Path(output).open(newline="") as file:
            rows = list(csv.DictReader(file)) if output.endswith("csv") else list(map(json.loads, file))
        assert len(rows) == found["predicted"] > 0
        return rows

    return call


def _opened(path: str) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


@pytest.mark.extended
def test_masks_are_written_as_index_pictures_with_a_palette(
    train: Callable[..., Any], predicted: Any, accepted: Any
) -> None:
    directory = train(*MASKS, "epochs=10").directory
    words = ("input=test", "pictures=true", "evaluate.batch_size=3")
    rows = predicted(directory, "rows.csv", *words)
    assert {tuple(row) for row in rows} == {("sample", "path", "mask", "share", "drawn", "picture")}
    assert len({row["drawn"] for row in rows}) == len(rows) > 3
    for row in rows:
        image = _opened(row["mask"])
        mask = np.asarray(image)
        assert image.mode == "P"
        assert image.getpalette()[:6] == [0, 0, 0, *(step % 255 for step in (2**25 - 1, 2**15 - 1, 2**21 - 1))]
        left, top = int(row["sample"]) % 7, int(row["sample"]) * 5 % 8
        assert mask[top : top + 6, left : left + 8].all()
        assert mask.sum() == 48, "the square was not learned"
        assert float(row["share"]) == 48 / 256
        picture = np.asarray(_opened(row["picture"]))
        assert (picture[mask == 0] == 40).all(), "the normalisation is not undone"
        assert (picture[mask == 1] == picture[mask == 1][0]).all()
        assert picture[mask == 1][0, 0] > picture[mask == 1][0, 1]
    accepted("predict", f"ckpt_path={directory}", *words, "output=two.csv", "devices=2")
    assert Path("two.csv").read_text().replace("two_", "rows_") == Path("rows.csv").read_text()


def test_boxes_are_nested_lists_and_files_need_no_targets(
    train: Callable[..., Any], printed: Any, predicted: Any
) -> None:
    directory = train(*BOXES).directory
    Path("photos").mkdir()
    for number, size in enumerate([(16, 16), (24, 12)]):
        Image.new("RGB", size, (50 * number, 0, 0)).save(f"photos/{number}.png")
    Path("photos/broken.png").write_bytes(b"no image")
    rows = predicted(directory, "rows.jsonl", "input=photos", "pictures=true")
    assert [row["path"] for row in rows] == ["photos/0.png", "photos/1.png"]
    (unreadable,) = printed("predict", f"ckpt_path={directory}", "input=photos", "output=again.jsonl")["unreadable"]
    assert "photos/broken.png" in unreadable
    assert [row["boxes"] for row in rows] == [[[1, 2, 9, 8]], [[1, 2, 9, 8]] * 2]
    assert rows[0]["scores"] == [rows[0]["best"]]
    assert _opened(rows[1]["picture"]).size == (24, 12)
    cells = predicted(directory, "rows.csv", "input=val")
    assert json.loads(cells[1]["boxes"]) == [[1, 2, 9, 8]] * 2
    assert predicted(directory, "two.csv", "input=val", "data.num_workers=2") == cells


@pytest.mark.extended
def test_rows_of_pairs_come_from_the_modules_that_the_task_adds(train: Callable[..., Any], predicted: Any) -> None:
    directory = train(*PAIRS, "epochs=3").directory
    rows = predicted(directory, "rows.csv", "input=test", "pictures=true")
    assert {row["text"] for row in rows} == {"'=a,b"}
    assert {row["odd"] for row in rows} == {"0", "1"}
    (again,) = predicted(directory, "file.jsonl", f"input={rows[0]['picture']}")
    assert again["odd"] == int(rows[0]["odd"])


def test_long_lists_are_shortened_on_the_screen_alone(
    train_once: Callable[..., Any], accepted: Any, workdir: Path
) -> None:
    directory = train_once(*BOXES, "max_steps=1").directory
    long = workdir / ("folder" * 9)
    long.mkdir()
    Image.new("RGB", (16, 16)).save(long / "one.png")
    words = ("predict", f"ckpt_path={directory}", "output=rows.csv")
    shown = accepted(*words, "input=test").out
    assert "[[1.0, 2.0, 9.0, 8.0]]" in shown
    assert "9.0, 8.0], [1.0, 2.0, 9.0, 8.0]]" not in shown
    assert "9.0, 8.0], [1.0, 2.0, 9.0, 8.0]]" in Path("rows.csv").read_text()
    assert f"{long}/one.png" in accepted(*words, f"input={long}").out


def test_a_task_with_rows_alone_trains_as_a_supervised_one(train: Callable[..., Any], predicted: Any) -> None:
    words = (*MASKS, "task._target_=own_predictions.Rows", "loss._target_=own_predictions.Gap")
    assert set(predicted(train(*words).directory, "rows.jsonl", "input=test")[0]) == {"sample", "path", "mean"}


@pytest.mark.extended
def test_inspect_shows_the_samples_with_the_largest_loss(train: Callable[..., Any], printed: Any) -> None:
    directory = train(*BOXES).directory
    found = printed("inspect", f"ckpt_path={directory}", "split=val", "samples=3")
    worst = found["errors"]["largest"]
    assert [set(each) for each in worst] == [{"index", "loss", "file"}] * 3
    assert worst[0]["file"] == f"squares/{worst[0]['index']}.png"
    assert [each["loss"] for each in worst] == sorted((each["loss"] for each in worst), reverse=True)
    evaluated = printed("eval", f"ckpt_path={directory}", "split=val")["metrics"]["loss"]
    every = printed("inspect", f"ckpt_path={directory}", "split=val", "samples=100", "what=errors")["errors"]["largest"]
    assert sum(each["loss"] for each in every) / len(every) == pytest.approx(evaluated)
    assert worst[0]["index"] % 3 == 2, "most boxes are far from the few that the model counts"
    assert found["files"] == ["errors.png"]
    assert found["gradients"]


@pytest.mark.extended
def test_inspect_looks_into_tasks_that_compute_their_steps(printed: Any, refused: Callable[..., None]) -> None:
    found = printed("inspect", *PAIRS, "what=[gradients,activations]")
    assert {each["name"] for each in found["gradients"]} > {"head.weight", "head.bias"}
    assert "head" in {each["name"] for each in found["activations"]}
    refused((*MASKS, "what=layers"), "what", verb="inspect")


def test_inspect_shows_the_largest_losses_of_numbers(printed: Any) -> None:
    words = ("data=synthetic", "data.dataset.kind=regression", "data.dataset.samples=64", "task=regression", "loss=mse")
    found = printed("inspect", *words, "threads=1", "what=errors", "samples=4")
    losses = [each["loss"] for each in found["errors"]["largest"]]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4
    assert found["files"] == ["errors.png"]


def test_files_become_samples_of_one_field_with_the_channels_of_the_data(
    train: Callable[..., Any], predicted: Any
) -> None:
    image = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(image).save("grey.png")
    directory = train(*GREY, "epochs=1").directory
    (row,) = predicted(directory, "rows.jsonl", "input=grey.png", "data.dataset.channels=1")
    assert list(row) == ["path", "grey"]
    assert (np.asarray(_opened(row["grey"])) == image).all()


def test_files_of_any_size_go_through_the_transforms_of_samples(train: Callable[..., Any], predicted: Any) -> None:
    resize = "transform.sample_eval=[{_target_: torchvision.transforms.v2.Resize, size: [16, 16]}]"
    for number in range(2):
        Image.new("RGB", (20 + number, 31)).save(f"{number}.png")
    rows = predicted(train(*MASKS, resize, "epochs=1").directory, "rows.jsonl", "input=[0.png,1.png]")
    assert [_opened(row["mask"]).size for row in rows] == [(16, 16)] * 2


@pytest.mark.extended
def test_the_model_alone_is_exported(train: Callable[..., Any], printed: Any) -> None:
    directory = train(*MASKS).directory
    found = printed("export", f"ckpt_path={directory}", "output=exported")
    assert found["input"]["shape"] == ["batch", 3, 16, 16]
    assert found["output"]["shape"] == ["batch", 2, 16, 16]
    program = torch.export.load("exported/model.pt2").module()
    assert program(torch.zeros(5, 3, 16, 16)).shape == (5, 2, 16, 16)
    printed("export", f"ckpt_path={directory}", "output=bytes", "include_preprocessing=true")
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    got = torch.export.load("bytes/model.pt2").module()(images)
    torch.testing.assert_close(got, program((images / 255 - 0.4) / 0.2))


@pytest.mark.parametrize(
    ("words", "verb", "key", "reason"),
    [
        ((*MASKS, "task._target_=own_predictions.Segment"), "predict input=test", "task", "predict_step"),
        ((*MASKS, "task._target_=own_predictions.Segment"), "predict input=test pictures=true", "pictures", "predict_step"),
        ((*MASKS, "task._target_=own_predictions.WrongRows"), "predict input=test", "task", "(1, 16, 16)"),
        ((*MASKS, "task._target_=own_predictions.WrongPicture"), "predict input=test pictures=true", "task", "draw"),
        (MASKS, "predict input=test top_k=2", "top_k", "predict_step"),
        (BOXES, "export", "task", "model=rtdetr_r18"),
        (BOXES, "inspect features=[layer]", "features", "pairs"),
        (BOXES, "inspect what=inputs", "what", "inputs"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_sentence(
    train_once: Callable[..., Any],
    refused: Callable[..., None],
    words: tuple[str, ...],
    verb: str,
    key: str,
    reason: str,
) -> None:
    refused((f"ckpt_path={train_once(*words, 'max_steps=1').directory}",), key, reason, verb=verb)
