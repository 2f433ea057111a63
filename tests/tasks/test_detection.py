"""Object detection through the composed config: scores, workers, resumes and ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drawn_objects
import numpy as np
import pytest
import torch
from extras import needs
from PIL import Image
from read_splits import read_words

from runner import load
from runner.base.errors import UserError
from runner.data.sampler import sample_of
from runner.tasks.detection import Detection

pytestmark = needs("detection")
WORDS = (
    "experiment=detection_torchvision", "data.root=drawn", *drawn_objects.COCO, "model=small_cnn", "~model.width",
    "~model.dropout", "epochs=2", "data.batch_size=2", "evaluate.batch_size=3", "data.num_workers=0",
    "scheduler=constant",
)  # fmt: skip
TINY = (*WORDS, "model._target_=tiny_detector.TinyDetector", "log.every_steps=1")
MASKS = (*WORDS, "model._target_=tiny_detector.Scripted", "data.dataset.masks=true", "epochs=1")


@pytest.fixture(autouse=True)
def drawn(workdir: Path, own_module: Callable[..., Path]) -> Path:
    drawn_objects.draw(workdir / "drawn", "train", 6, 0)
    drawn_objects.draw(workdir / "drawn", "val", 5, 1)
    own_module("tiny_detector", "import torch\n" + drawn_objects.DETECTOR)
    return workdir / "drawn"


def scenes(masks: bool, images: int = 12) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Random targets, and what is found: some of them displaced, some that are not there."""
    rng = np.random.default_rng(0)
    for number in range(images):
        corners, sides = rng.uniform(0, 60, (number % 5, 2)), rng.uniform(8, 30, (number % 5, 2))
        boxes, labels = np.concatenate([corners, corners + sides], 1), rng.integers(1, 4, number % 5)
        found = np.repeat(boxes, 2, 0) + rng.normal(0, 2, (2 * len(boxes), 4))
        found = np.concatenate([found, [[1, 2, 30, 40], [5, 5, 9, 9]]])
        guesses = np.concatenate([np.repeat(labels, 2), [1, 2]])
        target = {"boxes": boxes, "labels": labels, "iscrowd": (rng.random(len(labels)) < 0.2).astype(np.int64)}
        output = {"boxes": found, "labels": guesses, "scores": rng.random(len(found)).round(1).astype(np.float32)}
        for each in (target, output):
            each["boxes"] = each["boxes"].astype(np.float32)
            if masks:
                each["masks"] = np.zeros((len(each["boxes"]), 96, 96), dtype=bool)
                for plane, (left, top, right, bottom) in zip(each["masks"], each["boxes"].astype(int), strict=True):
                    plane[max(top, 0) : bottom, max(left, 0) : right] = True
        yield ({name: torch.from_numpy(each) for name, each in one.items()} for one in (target, output))


def official(masks: bool) -> np.ndarray:
    """The precision (10, 101, C) of COCO's own tool."""
    pytest.importorskip("pycocotools")
    from pycocotools import mask
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    sides: list[list[dict[str, Any]]] = [[], []]
    for number, (target, output) in enumerate(scenes(masks)):
        for entries, one in zip(sides, (target, output), strict=True):
            for place in range(len(one["boxes"])):
                left, top, right, bottom = one["boxes"][place].double().tolist()
                entry: dict[str, Any] = {"image_id": number, "id": len(entries) + 1}
                entry |= {"category_id": int(one["labels"][place]), "iscrowd": 0}
                entry |= {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
                entry |= {name: one[f"{name}s"][place].item() for name in ("score",) if "scores" in one}
                entry |= {name: one[name][place].item() for name in ("iscrowd",) if name in one}
                if masks:
                    entry["segmentation"] = mask.encode(np.asfortranarray(one["masks"][place].numpy().astype(np.uint8)))
                entries.append(entry)
    known = COCO()
    categories = [{"id": number} for number in (1, 2, 3)]
    images = [{"id": number, "height": 96, "width": 96} for number in range(12)]
    known.dataset = {"images": images, "annotations": sides[0], "categories": categories}
    known.createIndex()
    evaluator = COCOeval(known, known.loadRes(sides[1]), "segm" if masks else "bbox")
    evaluator.evaluate()
    evaluator.accumulate()
    precision: np.ndarray = evaluator.eval["precision"][:, :, :, 0, -1]
    return precision


@pytest.mark.parametrize("masks", [False, True], ids=["boxes", "masks"])
@pytest.mark.parametrize("batch", [1, 5, 12])
def test_scores_are_those_of_cocos_own_tool_for_any_batch_size(
    masks: bool, batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    task, expected = Detection(3, masks), official(masks)
    metrics = {**task.metrics(torch.device("cpu")), **task.tables(torch.device("cpu"))}
    known = [tuple(each) for each in scenes(masks)]
    for metric in metrics.values():  # those of another evaluation do not count
        metric.update([known[0][1]], [known[0][0]])
        metric.reset()
    for begin in range(0, len(known), batch):
        some = known[begin : begin + batch]
        for metric in metrics.values():
            metric.update([output for _, output in some], [target for target, _ in some])
    start = "segm_" if masks else ""
    for name, rows in (("map", slice(None)), ("map_50", slice(0, 1)), ("map_75", slice(5, 6))):
        values = expected[rows]
        assert float(metrics[start + name].compute()) == pytest.approx(values[values > -1].mean(), abs=1e-12)
        each = [values[:, :, label].mean() for label in range(3)]
        assert metrics[f"label_{start}{name}"].compute().tolist() == pytest.approx(each, abs=1e-12)
    assert 0.05 < float(metrics[f"{start}map"].compute()) < 0.95
    assert list(task.metrics(torch.device("cpu"))) == task.metric_names()
    capsys.readouterr()


def test_boxes_around_crowds_are_not_trained_on() -> None:
    seen = []

    def model(images: Any, targets: Any) -> dict[str, torch.Tensor]:
        seen.extend(targets)
        return {"one": torch.tensor(1.0), "two": torch.tensor(2.0)}

    target = {"boxes": torch.rand(3, 4), "labels": torch.tensor([1, 2, 2]), "iscrowd": torch.tensor([0, 1, 0])}
    target["image_id"] = 7
    plain = {"boxes": torch.rand(2, 4), "labels": torch.tensor([1, 2])}
    modules: Any = {"model": model}
    found = Detection(2).training_step(modules, ([], [target, plain]))
    assert {name: float(value) for name, value in found.items()} == {"loss": 3, "one": 1, "two": 2}
    total: Any = {"model": lambda images, targets: {"loss": torch.tensor(9.0), "one": torch.tensor(1.0)}}
    assert float(Detection(2).training_step(total, ([], [plain]))["loss"]) == 10
    assert [each["labels"].tolist() for each in seen] == [[1, 2], [1, 2]]
    assert seen[0]["boxes"].equal(target["boxes"][[0, 2]])


def test_a_detector_trains_logs_its_losses_and_is_evaluated_for_each_class(
    train: Callable[..., Any], printed: Any
) -> None:
    result = train(*TINY, "ema=0.5", "epochs=1")
    steps = result.logged("train")
    for record in steps:
        parts = [record[name] for name in ("classification", "bbox_regression", "bbox_ctrness")]
        assert record["loss"] == pytest.approx(sum(parts), rel=1e-5)
    assert result.summary["best"]["metric"] == "val/ema_map"
    record = printed("eval", f"ckpt_path={result.directory}", "split=val")
    assert set(record["metrics"]) == {"map", "map_50", "map_75"}
    assert set(record["per_label"]) == set(drawn_objects.NAMES)
    assert set(record["per_label"]["tall"]) == {"map", "map_50", "map_75"}


def test_images_with_rare_boxes_are_drawn_more_often(compose: Any, drawn: Path) -> None:
    file = drawn / "train.json"
    said = json.loads(file.read_text())
    first = said["images"][1]["id"]
    kept = [each for each in said["annotations"] if each["image_id"] == first or each["category_id"] != 7]
    file.write_text(json.dumps(said | {"annotations": kept}))
    assert {each["category_id"] for each in kept if each["image_id"] == first} == {3, 7}
    loader = read_words(compose, *TINY, "data.sampler=balanced").train.loader
    order = torch.cat([sample_of(loader.draws(epoch).slice(0, 6)) for epoch in range(2000)])
    # 7 is in one image of six, and 3 in this and in two others
    weights = torch.tensor([1, 6**0.5, 2**0.5, 1, 2**0.5, 1])
    torch.testing.assert_close(torch.bincount(order) / 12_000, weights / weights.sum(), rtol=0, atol=0.02)


def test_two_ranks_find_what_one_process_finds(train: Callable[..., Any]) -> None:
    one = train(*MASKS)
    two = train(*MASKS, "devices=2", "evaluate.batch_size=1")
    names = {"map", "map_50", "map_75", "segm_map", "segm_map_50", "segm_map_75"}
    assert set(one.summary["last"]) >= names
    assert {name: two.summary["last"][name] for name in names} == {name: one.summary["last"][name] for name in names}
    assert one.summary["last"]["map_50"] > 0


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ((*TINY, "data.dataset.masks=true"), "task", "masks"),
        ((*TINY, "task.num_classes=3"), "task.num_classes", "the data says 2"),
        ((*TINY, "+model.num_classes=2"), "model.num_classes", "the data says 3: 2 and the background"),
        ((*TINY, "task=classification"), "task", "samples have boxes\n      allowed: experiment=detection"),
        (("data=shards", "data.root=drawn", "data.dataset.target=boxes"), "task", "experiment=detection"),
        ((*TINY, "transform=standard"), "transform.train", "(image, target)"),
        ((*TINY, "data.dataset.train_annotations=x.json"), "data.dataset.train_annotations", "train.json, val.json"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    refused: Callable[..., None], words: tuple[str, ...], key: str, reason: str
) -> None:
    refused(words, key, reason)


def test_a_data_set_of_ones_own_needs_no_further_key_and_no_label_of_the_background(
    train: Callable[..., Any], refused: Callable[..., None], workdir: Path
) -> None:
    file = workdir / "tiny_detector.py"
    file.write_text(file.read_text() + drawn_objects.OWN)
    own = ("data=own", "data.dataset._target_=tiny_detector.Own", "data.split.test=0", "epochs=1")
    words = [word for word in TINY if not word.startswith(("data.root", "data.dataset"))]
    assert "map" in train(*words, *own).summary["last"]
    refused((*words, *own, "data.dataset.label=0"), "data.collate", "a label below 1; labels begin at 1")


def test_bad_annotations_end_a_run_or_are_replaced_and_listed(
    train: Callable[..., Any], refused: Callable[..., None], drawn: Path
) -> None:
    contents = json.loads((drawn / "train.json").read_text())
    contents["annotations"][0]["bbox"] = [0, 0, 99, 5]
    (drawn / "train.json").write_text(json.dumps(contents))
    refused(TINY, "", "annotations[0]")
    contents["annotations"][1]["bbox"] = [3, 3, 0, 5]
    contents["annotations"][2]["bbox"] = [3, 3, 5, 0]
    (drawn / "train.json").write_text(json.dumps(contents))
    result = train(*TINY, "data.on_error=skip", "data.max_skipped=0.5", "epochs=1")
    assert result.out.count("train.json: 2 boxes of zero width or height are dropped") == 1
    said = " ".join(result.out.split())
    assert re.search(r"cannot be read and is replaced by another: .*000\.png.*annotations\[0\]", said)


def test_a_validation_split_without_any_object_is_warned_of_once(train: Callable[..., Any], drawn: Path) -> None:
    contents = json.loads((drawn / "val.json").read_text())
    (drawn / "val.json").write_text(json.dumps(contents | {"annotations": []}))
    result = train(*TINY)
    assert " ".join(result.out.split()).count("warning: val/map is nan: it cannot be computed") == 1
    assert result.summary["best"] is None


def test_without_the_evaluation_tool_the_error_says_what_to_install(
    refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    refused(TINY, "", "pip install 'runner[detection]'")


def test_image_files_are_predicted_and_errors_without_a_loss_are_refused(
    train: Callable[..., Any], accepted: Any, refused: Callable[..., None], workdir: Path
) -> None:
    checkpoint = f"ckpt_path={train(*MASKS).directory}"
    accepted("predict", checkpoint, "input=drawn/images/val", "output=found.jsonl", "pictures=true")
    rows = [json.loads(line) for line in (workdir / "found.jsonl").read_text().splitlines()]
    assert [Path(row["path"]).name for row in rows] == [f"00{number}.png" for number in range(5)]
    assert all(len(row["boxes"]) == len(row["scores"]) == 2 and Path(row["picture"]).is_file() for row in rows)
    refused((checkpoint, "split=val", "what=errors"), "what", verb="inspect")


def test_a_loaded_detector_finds_what_predict_writes_also_in_images_in_memory(
    train: Callable[..., Any], accepted: Any, workdir: Path
) -> None:
    from faster_coco_eval.core.mask import area

    checkpoint = train(*MASKS).directory
    accepted("predict", f"ckpt_path={checkpoint}", "input=drawn/images/val", "output=found.jsonl")
    rows = [json.loads(line) for line in (workdir / "found.jsonl").read_text().splitlines()]
    trained = load(checkpoint)
    found = trained.predict("drawn/images/val")
    tensors = [{name: value for name, value in row.items() if name != "path"} for row in found]
    assert [row["path"] for row in found] == [row["path"] for row in rows]
    for row, written in zip(tensors, rows, strict=True):  # where masks are run lengths
        sizes, areas = zip(*((each["size"], area(each)) for each in written["masks"]), strict=True)
        masks = row.pop("masks")
        assert masks.sum((1, 2)).tolist() == [*areas]
        assert [list(mask.shape) for mask in masks] == [*sizes]
        del written["masks"]
    assert [{name: value.tolist() for name, value in row.items()} for row in tensors] == [
        {name: value for name, value in row.items() if name != "path"} for row in rows
    ]
    assert trained.classes == (*drawn_objects.NAMES,)
    image = Image.open(rows[0]["path"])
    (one,) = trained.predict(image)
    assert len(one["boxes"]) == len(rows[0]["boxes"]) > 0
    torch.testing.assert_close(one["boxes"], trained.predict(rows[0]["path"])[0]["boxes"], rtol=0, atol=0)
    pictures, _ = trained.preprocess([image, rows[1]["path"]])
    assert [picture.shape for picture in pictures] == [(3, 32, 40)] * 2
    with pytest.raises(UserError, match="top_k"):
        trained.predict(image, top_k=2)
    with pytest.raises(UserError, match=r"val\.json: its content is not an image"):
        trained.predict("drawn/val.json")


def test_a_run_without_a_test_names_its_best_evaluation_which_eval_repeats(
    train: Callable[..., Any], accepted: Any
) -> None:
    run = train(*MASKS)
    best = run.summary["best"]
    said = (Path(run.directory) / "run.log").read_text()
    assert f"best evaluation: step {best['global_step']}  val/map {best['value']:.4g}\n" in said
    evaluated = json.loads(accepted("eval", f"ckpt_path={run.directory}", "split=val", "--json").out)
    assert evaluated["metrics"]["map"] == best["value"]


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (("data.image_size=96",), "data.image_size=96 is the edge of mosaics alone"),
        (("scheduler.warmup=7",), "scheduler.warmup=7 is longer than the run of 6 steps"),
        (("scheduler.warmup=6",), ""),
    ],
)
def test_settings_that_do_not_reach_the_model_are_warned_of(accepted: Any, words: Any, warned: str) -> None:
    said = accepted("train", *TINY, *words, "dry_run=true").out
    assert warned in said
    assert ("warmup" in said, "image_size" in said) == ("warmup" in warned, "image_size" in warned)
