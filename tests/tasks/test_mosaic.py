"""Mosaics of four images through the composed config: what they show, in which epochs, and that bits follow the sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawn_objects
import numpy as np
import pytest
import torch
from extras import needs
from PIL import Image
from read_splits import read_words
from torchvision import tv_tensors

from runner.config.load import resolve_config
from runner.config.schema.train import Train
from runner.data.transforms.detection import Mosaic
from runner.distributed.world import World
from runner.train import build_run

pytestmark = needs("detection")
READ = (
    "experiment=detection_torchvision", "data.root=drawn", *drawn_objects.COCO, "data.batch_size=2", "data.num_workers=0",
    "transform.sample_train.1.p=1",
)  # fmt: skip
TINY = (
    *READ, "model=small_cnn", "~model.width", "~model.dropout", "model._target_=tiny_detector.TinyDetector", "threads=1",
    "evaluate.batch_size=3", "scheduler=constant", "epochs=3", "transform.close_epochs=1", "evaluate.test=false",
)  # fmt: skip
SIZE = 100


@pytest.fixture(autouse=True)
def drawn(workdir: Path, own_module: Callable[..., Path]) -> Path:
    """Six images of different shapes; each has a rectangle of each class, and no two of all these have the same colour."""
    root = workdir / "drawn"
    for split in ("train", "val"):
        contents = drawn_objects.draw(root, split, 6, 0)
        contents["annotations"] = []
        for number, image in enumerate(contents["images"]):
            image["width"], image["height"] = width, height = (80, 64) if number % 2 else (64, 96)
            pixels = np.zeros((height, width, 3), dtype=np.uint8)
            for label, (x, y, w, h) in enumerate([(4, 6, 20, 40), (30, 16, 32, 20)]):
                pixels[y : y + h, x : x + w] = colour(number, label + 1)
                contents["annotations"].append({
                    "id": 2 * number + label + 1, "image_id": image["id"], "category_id": (3, 7)[label], "iscrowd": 0,
                    "bbox": [x, y, w, h], "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
                })  # fmt: skip
            Image.fromarray(pixels).save(root / "images" / split / image["file_name"])
        (root / f"{split}.json").write_text(json.dumps(contents))
    own_module("tiny_detector", "import torch\n" + drawn_objects.DETECTOR)
    return root


def colour(number: int, label: int) -> list[int]:
    """That of an object: the image in red, the class in green."""
    return [30 + 40 * number, 100 * label, 90]


def samples(made: Any, epoch: int = 0) -> list[tuple[Any, dict[str, Any]]]:
    """The training samples of an epoch, by their index."""
    found = dict[int, Any]()
    for batch in made.train.loader.batches(epoch, 0, 3):
        images, targets = batch.data
        found |= {index: [*zip(images, targets, strict=True)][row] for row, index in enumerate(batch.indices.tolist())}
    return [found[index] for index in sorted(found)]


FIXED = ("transform.sample_train.2.scale=[1,1]", "transform.sample_train.2.translate=[0,0]", f"data.image_size={SIZE}")


@pytest.mark.parametrize(("words", "margin"), [((), 3), (FIXED, 1)], ids=["size of the sample", "square, not scaled"])
def test_boxes_masks_and_labels_are_on_the_pixels_of_their_objects(
    compose: Any, words: tuple[str, ...], margin: int
) -> None:
    made = read_words(compose, *READ, "data.dataset.masks=true", "transform.sample_train.3.p=0", *words)
    seen = []
    for epoch in range(3):
        for index, (image, target) in enumerate(samples(made, epoch)):
            size = (SIZE, SIZE) if words else ((64, 80) if index % 2 else (96, 64))
            assert image.shape[1:] == target["masks"].shape[1:] == size
            assert target["image_id"] == 100 + index
            assert len({len(target[name]) for name in ("boxes", "masks", "labels", "iscrowd")}) == 1
            pixels = image * 255 if image.is_floating_point() else image
            for box, mask, label in zip(target["boxes"], target["masks"], target["labels"].tolist(), strict=True):
                left, top, right, bottom = box.round().int().tolist()
                # Edges are blurred, and rounded by each transform
                inside = slice(top + margin, bottom - margin), slice(left + margin, right - margin)
                around = mask[max(top - margin, 0) : bottom + margin, max(left - margin, 0) : right + margin]
                assert int(around.sum()) == int(mask.sum()) > 0
                if not mask[inside].numel():
                    continue
                assert bool(mask[inside].all())
                low, high = (
                    part(pixels[:, *inside].flatten(1).float(), 1).tolist() for part in (torch.amin, torch.amax)
                )
                number = round((low[0] - 30) / 40)
                assert low == pytest.approx(colour(number, label), abs=3)
                assert high == pytest.approx(low, abs=3)
                seen.append((index, number, label))
    assert {number for _, number, _ in seen} == set(range(6))
    assert {label for _, _, label in seen} == {1, 2}
    assert sum(index != number for index, number, _ in seen) > len(seen) / 2  # objects of other images


def test_the_parts_tile_the_canvas_and_objects_that_are_mostly_cut_off_are_removed() -> None:
    def sample(value: int) -> tuple[Any, dict[str, Any]]:
        boxes = tv_tensors.BoundingBoxes([[0, 0, 20, 10]], format="XYXY", canvas_size=(10, 20))  # type: ignore[call-overload]
        target = {"boxes": boxes, "labels": torch.tensor([value]), "area": torch.tensor([2.0 * value]), "name": value}
        return tv_tensors.Image(torch.full((3, 10, 20), value, dtype=torch.uint8)), target

    def made(keep: float) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(3)
        others = iter([2, 3, 4])
        return Mosaic(p=1, scale=(1.0, 1.0), keep=keep)(sample(1), lambda: sample(next(others)))

    image, target = made(0)
    assert target["labels"].tolist() == [1, 2, 3, 4]
    assert target["name"] == 1
    assert type(image) is tv_tensors.Image
    assert (type(target["boxes"]), target["boxes"].canvas_size) == (tv_tensors.BoundingBoxes, (10, 20))
    covered = torch.zeros(10, 20, dtype=torch.int64)
    for label, (left, top, right, bottom) in enumerate(target["boxes"].int().tolist(), 1):
        covered[top:bottom, left:right] += label
    assert covered.equal(image[0].long())
    assert image.equal(image[:1].expand(3, -1, -1))
    shares = (target["boxes"][:, 2:] - target["boxes"][:, :2]).prod(1) / 200
    assert shares.sum() == 1
    torch.testing.assert_close(target["area"], torch.tensor([2.0, 4, 6, 8]) * shares.as_subclass(torch.Tensor))
    kept = made(0.25)[1]["labels"].tolist()
    assert kept == [label for label, share in enumerate(shares.tolist(), 1) if share > 0.25]
    assert 0 < len(kept) < 4


def test_others_pass_the_transforms_before_the_mosaic_with_draws_of_their_own(compose: Any) -> None:
    lists = [
        f"[{{_target_: torchvision.transforms.v2.{first}}}, {{_target_: runner.data.transforms.detection.Mosaic, p: 1}}]"
        for first in ("RandomInvert, p: 1", "RandomInvert, p: 0.5")
    ]
    always, half = (samples(read_words(compose, *READ, f"transform.sample_train={each}")) for each in lists)

    def inverted(found: Any) -> set[tuple[int, bool]]:
        """The image of each object, and whether it is inverted."""
        seen = set()
        for image, target in found:
            pixels = image * 255 if image.is_floating_point() else image
            for x, y in ((target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2).int().tolist():
                red, _, blue = pixels[:, y, x].tolist()
                seen.add((round(((255 - red if blue > 125 else red) - 30) / 40), blue > 125))
        return seen

    assert {each for _, each in inverted(always)} == {True}
    images = [number for number, _ in inverted(half)]
    assert len(images) > len(set(images)), "an image is augmented in another way each time that it is read"


@pytest.mark.parametrize(
    ("words", "mosaics", "warning"),
    [
        ((), [True, True, False], None),
        (("transform.close_epochs=0",), [True, True, True], None),
        (("transform.close_epochs=2",), [True, False, False], None),
        (("max_steps=4", "epochs=null"), [True, False], None),  # an epoch is 3 steps
        (("max_steps=6", "accumulate=3", "epochs=9"), [True] * 5 + [False], None),
        (("transform.close_epochs=3",), [False] * 3, "leaves no epoch with mosaics: the run has 3"),
        (("transform.sample_train=[]",), [False] * 3, "has no effect: no transform"),
    ],
)
def test_the_last_epochs_of_a_run_have_no_mosaic(
    compose: Any, words: tuple[str, ...], mosaics: list[bool], warning: str | None
) -> None:
    # Mosaics are square, and the images are not
    run = build_run(resolve_config(compose(*TINY, f"data.image_size={SIZE}", *words), Train))
    for epoch, expected in enumerate(mosaics):
        sizes = {tuple(image.shape[1:]) for image, _ in samples(run.data, epoch)}
        assert sizes == ({(SIZE, SIZE)} if expected else {(96, 64), (64, 80)}), epoch
    found = [each for each in run.warnings if "close_epochs" in each]
    assert [warning in each for each in found] == ([True] if warning else [])  # type: ignore[operator]


def test_the_share_of_mosaics_is_the_probability_and_changes_with_the_epoch(compose: Any) -> None:
    made = read_words(compose, *READ, f"data.image_size={SIZE}", "transform.sample_train.1.p=0.5")
    drawn = [[image.shape[1:] == (SIZE, SIZE) for image, _ in samples(made, epoch)] for epoch in range(20)]
    assert 40 < sum(map(sum, drawn)) < 80
    assert len(set(map(tuple, drawn))) > 10


def test_two_ranks_batch_sizes_and_orders_see_the_same_samples(compose: Any) -> None:
    one = samples(read_words(compose, *READ), 1)
    halves: dict[int, Any] = {}
    for rank in (0, 1):
        made = read_words(compose, *READ)
        made.train.loader.world = World(rank, 2)
        for batch in made.train.loader.batches(1, 0, 3):
            halves |= dict(zip(batch.indices.tolist(), zip(*batch.data, strict=True), strict=True))
    others = [[halves[index] for index in range(6)]]
    others += [samples(read_words(compose, *READ, word), 1) for word in ("data.batch_size=3", "data.shuffle=false")]
    for other in others:
        for (image, target), (same, expected) in zip(other, one, strict=False):
            assert image.equal(same)
            assert all(torch.equal(target[name], expected[name]) for name in ("boxes", "labels", "iscrowd"))


@pytest.mark.extended
def test_workers_and_kills_inside_an_epoch_and_before_the_last_one_give_the_same_weights(
    train: Callable[..., Any], killed: Callable[..., Path]
) -> None:
    expected = train(*TINY).summary["weights_sha256"]
    assert train(*TINY, "transform.close_epochs=0").summary["weights_sha256"] != expected
    assert train(*TINY, "data.num_workers=2").summary["weights_sha256"] == expected
    directory = killed(2, *TINY, "checkpoint.every_steps=1", "checkpoint.min_seconds=0")
    resumed = train(f"ckpt_path={directory}", "callbacks=none", "data.num_workers=2")
    assert resumed.summary["weights_sha256"] == expected
    directory.rename("earlier")
    again = killed(5, *TINY, "checkpoint.every_steps=1", "checkpoint.min_seconds=0")
    assert train(f"ckpt_path={again}", "callbacks=none").summary["weights_sha256"] == expected


def test_damaged_images_among_the_others_are_named_or_replaced(
    compose: Any, train: Callable[..., Any], refused: Callable[..., None], drawn: Path
) -> None:
    (drawn / "images/train/003.png").write_bytes(b"no image")
    refused(TINY, "", "003.png", "data.on_error=skip")
    whole = train(*TINY, "data.on_error=skip", "data.max_skipped=0.5")
    assert "003.png" in " ".join(whole.out.split())
    assert whole.summary["skipped"] == 1
    made = read_words(compose, *READ, "data.on_error=skip", "transform.sample_train.3.p=0")
    assert len(samples(made)) == 6


OWN = """
import torch

def masks(**_):
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    return [(image, torch.zeros(8, 8, dtype=torch.uint8))] * 8
"""
MOSAIC = "[{_target_: runner.data.transforms.detection.Mosaic, p: 1}]"


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ((*TINY, "transform.close_epochs=-1"), "transform.close_epochs", "cannot be -1"),
        ((*TINY, "transform.sample_train.1.p=2"), "transform.sample_train.1.p", "p must be 0 to 1"),
        ((*TINY, "transform.sample_train.1.keep=1"), "transform.sample_train.1.p", "keep 0 to below 1"),
        ((*TINY, "transform.sample_train.1.scale=[1,0.5]"), "transform.sample_train.1.scale", "scale not fall"),
        ((*TINY, "data.image_size=0"), "data.image_size", "cannot be 0"),
        ((*TINY, f"transform.sample_eval={MOSAIC}"), "transform.sample_eval.0", "an evaluation takes each sample alone"),
        (("data=digits", f"transform.sample_train={MOSAIC}"), "transform.sample_train.0", "transforms take images alone"),
        (
            (
                "experiment=segmentation", "data=own", "data.dataset._target_=own_masks.masks", "data.images=['0']",
                f"transform.sample_train={MOSAIC}",
            ),
            "transform.sample_eval", "with boxes that are tv_tensors.BoundingBoxes",
        ),
    ],
)  # fmt: skip
def test_what_a_mosaic_cannot_take_is_a_sentence(
    refused: Callable[..., None], own_module: Callable[..., Path], words: tuple[str, ...], key: str, reason: str
) -> None:
    own_module("own_masks", OWN)
    refused(words, key, reason)


def test_shards_are_read_anywhere_but_not_where_they_are_read_one_after_another(
    compose: Any, accepted: Callable[..., Any], refused: Callable[..., None]
) -> None:
    accepted("pack", *READ, "output=out")
    shards = (*(word for word in TINY if not word.startswith("data.")), "data=shards", "data.root=out")
    shards = (*shards, "data.dataset.target=boxes", "data.batch_size=2", "data.num_workers=0", "data.images=['0']")
    made = read_words(compose, *shards, f"data.image_size={SIZE}")
    assert {tuple(image.shape[1:]) for image, _ in samples(made)} == {(SIZE, SIZE)}
    refused((*shards, "data.shuffle=blocks"), "transform.sample_train.1", "data.shuffle=blocks reads shards one after")


def test_the_recipe_of_faster_rcnn_flips_only(compose: Any) -> None:
    image = {"_target_": "torchvision.transforms.v2.ToImage"}
    flip = {"_target_": "torchvision.transforms.v2.RandomHorizontalFlip", "p": 0.5}
    values = compose("experiment=voc_faster_rcnn").values["transform"]
    expected = {"sample_train": [image, flip], "sample_eval": [image], "train": [], "eval": [], "mix": None}
    assert values == {**expected, "close_epochs": 0}
