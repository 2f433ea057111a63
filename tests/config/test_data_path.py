"""`data=PATH`: what a file or folder is found to be, and what that selects."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import zlib
from pathlib import Path
from typing import Any

import drawn_masks
import drawn_objects
import numpy as np
import pytest
import yaml
from docs_pages import DOCS
from PIL import Image

from runner.base.errors import ConfigError, UserError
from runner.config import data_path
from runner.config.keys import at
from runner.config.load import opened
from runner.config.sources import shipped
from runner.data.sources.masks import segmentation_folder
from runner.sweeps.plan import plan_of
from runner.verbs.options import show

QUICK = ("data.image_size=32", "data.batch_size=4", "data.num_workers=0", "evaluate.batch_size=4")
BOXES = {"task": "detection", "model": "torchvision_detection", "transform": "detection"}
MASKS = {"task": "segmentation", "model": "torchvision_segmentation", "transform": "segmentation"}
CLASSES = {"task": "classification", "model": "small_cnn", "transform": "standard"}


def picture(path: Path, values: Any = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.resize(np.array(values, dtype=np.uint8), (8, 8))).save(path)


def coco_json(path: Path, first: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"annotations": [], "images": [{"id": 1, "file_name": first}], "categories": []}))


def described(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("train: images/train\nnames: {0: tall, 1: wide}\n")


def lay_out(root: Path) -> None:
    """A folder of each kind."""
    described(root / "boxes/data.yaml")
    described(root / "boxes2/other.yml")
    picture(root / "plain/images/train/a.png")
    (root / "plain/labels").mkdir()
    for split in ("train", "val"):
        coco_json(root / f"coco/annotations/instances_{split}2017.json", "a.png")
        picture(root / f"coco/{split}2017/a.png")
    coco_json(root / "one/annotations.json", "a.png")
    picture(root / "one/images/a.png")
    for split in ("train", "valid"):
        coco_json(root / f"export/{split}/_annotations.coco.json", "a.png")
        picture(root / f"export/{split}/a.png")
    coco_json(root / "far/annotations.json", "a.png")
    for folder in ("flat", "parts/train"):
        picture(root / folder / "images/a.png")
        picture(root / folder / "masks/a.png", [0, 1])
    (root / "flat/classes.txt").write_text("no\nyes\n")
    for name in ("cat", "dog"):
        picture(root / "photos" / name / "a.png")
        picture(root / "splits/train" / name / "a.jpg")
    (root / "photos/.cache").mkdir()


FOUND = [
    ("boxes/data.yaml", "yolo", BOXES, {"data.root": "boxes/data.yaml"}),
    ("boxes2/other.yml", "yolo", BOXES, {"data.root": "boxes2/other.yml"}),
    ("boxes", "yolo", BOXES, {"data.root": "boxes"}),
    ("plain/", "yolo", BOXES, {"data.root": "plain"}),
    (
        "coco/annotations/instances_train2017.json",
        "coco",
        BOXES,
        {
            "data.root": "coco",
            "data.dataset.train_annotations": "annotations/instances_train2017.json",
            "data.dataset.train_images": "train2017",
            "data.dataset.val_annotations": "annotations/instances_val2017.json",
            "data.dataset.val_images": "val2017",
        },
    ),
    (
        "one/annotations.json",
        "coco",
        BOXES,
        {"data.root": "one", "data.dataset.train_images": "images", "data.dataset.val_annotations": None},
    ),
    (
        "export/train/_annotations.coco.json",
        "coco",
        BOXES,
        {
            "data.root": "export",
            "data.dataset.train_images": "train",
            "data.dataset.val_annotations": "valid/_annotations.coco.json",
            "data.dataset.val_images": "valid",
        },
    ),
    ("coco/", "coco", BOXES, {"data.root": "coco", "data.dataset.val_images": "val2017"}),
    ("export", "coco", BOXES, {"data.root": "export", "data.dataset.val_images": "valid"}),
    ("far/annotations.json", "coco", BOXES, {"data.dataset.train_images": "images"}),
    ("flat", "segmentation_folder", MASKS, {"data.dataset.classes": None, "name": "segmentation"}),
    ("parts", "segmentation_folder", MASKS, {"data.dataset.classes": ["0", "1"], "data.dataset.values": None}),
    ("photos", "image_folder", CLASSES, {"data.root": "photos"}),
    ("splits", "image_folder", CLASSES, {"data.root": "splits"}),
]


@pytest.mark.parametrize(("path", "data", "others", "values"), FOUND, ids=[row[0] for row in FOUND])
def test_a_path_selects_data_task_model_and_transform(path, data, others, values, compose, workdir):
    lay_out(workdir)
    composition = compose(f"data={path}")
    assert {group: composition.group_choices[group] for group in ("data", *others)} == {"data": data, **others}
    assert {key: at(composition.values, key) for key in values} == values
    assert f"{path} is " in composition.data_found
    for group, name in {"data": data, **others}.items():
        assert f" {group}={name}" in composition.data_found


MASK_VALUES = [
    ([0, 1, 2, 255], ["0", "1", "2"], None),
    ([0, 255], ["0", "255"], [0, 255]),
    ([0, 128, 255], ["0", "128", "255"], [0, 128, 255]),
    ([*range(100)], None, None),  # such as shades at edges
]


@pytest.mark.parametrize(("shown", "classes", "values"), MASK_VALUES, ids=["void", "black-white", "greys", "shades"])
def test_masks_without_names_have_a_class_for_each_value(shown, classes, values, compose, workdir):
    folder = workdir / "-".join(map(str, shown[:4]))
    for number in range(2):
        picture(folder / f"images/{number}.png")
        mask = Image.fromarray(np.resize(np.array(shown, dtype=np.uint8), (16, 16)))
        (folder / "masks").mkdir(exist_ok=True)
        mask.save(folder / f"masks/{number}.png")
    dataset = at(compose(f"data={folder}").values, "data.dataset")
    assert (dataset["classes"], dataset["values"]) == (classes, values)
    if classes:
        numbers = segmentation_folder(str(folder), classes, values=values)["train"].mask(0).unique().tolist()
        assert numbers == [*range(len(classes)), *[255] * (255 in shown and values is None)]


def test_masks_of_few_bits_have_the_values_that_are_read(compose, workdir):
    picture(workdir / "bits/images/0.png")
    (workdir / "bits/masks").mkdir()

    # A PNG file of two bits a pixel, as Pillow does not write it: grey values 0, 1, 2, 0
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 4, 1, 2, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0\x18")),
        (b"IEND", b""),
    ]
    (workdir / "bits/masks/0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))
    dataset = at(compose(f"data={workdir / 'bits'}").values, "data.dataset")
    assert (dataset["classes"], dataset["values"]) == (["0", "1", "2"], None)


def test_images_beside_masks_of_another_name_are_no_class(compose, workdir):
    for folder in ("images", "annotations"):
        picture(workdir / "parts" / folder / "a.png")
        picture(workdir / "splits/train" / folder / "a.png")
    for name in ("parts", "splits"):
        with pytest.raises(ConfigError, match=f"cannot tell what is in .*{name}"):
            compose(f"data={workdir / name}")


def test_typed_words_win_wherever_they_stand(compose, workdir):
    lay_out(workdir)
    own = ("model=mlp", "data=boxes/data.yaml", "epochs=2", "data.root=elsewhere", "transform=detection_ssd")
    composition = compose(*own)
    assert composition.group_choices["model"] == "mlp"
    assert composition.group_choices["transform"] == "detection_ssd"
    assert (composition.values["epochs"], composition.values["data"]["root"]) == (2, "elsewhere")
    assert "task=null" in compose("data=flat", "task=null", "task._target_=my.Task").data_found
    assert compose("data=boxes", "experiment=voc_faster_rcnn").group_choices["experiment"] == "voc_faster_rcnn"
    # A model that another recipe trains brings it
    for model, recipe in (("rtdetr_r18", "detection"), ("torchvision_detection", "detection_torchvision")):
        choices = compose("data=boxes", f"model={model}").group_choices
        assert (choices["model"], choices["experiment"]) == (model, recipe)


def test_the_name_of_an_option_wins_over_a_path(compose, workdir):
    lay_out(workdir)
    shutil.copytree("photos", "digits")
    assert compose("data=digits").data_found == ""
    assert compose("data=digits").group_choices["data"] == "digits"
    assert compose("data=./digits").values["data"]["root"] == "digits"


NAMES = [
    ("Ann's photos, 2026", '"Ann\'s photos, 2026"'),
    ("a=b [1] {2}", "'a=b [1] {2}'"),
    ("my photos", r"my\ photos"),
    ("Ann's", r"'Ann\'s'"),
    ("2026", "2026"),
]


@pytest.mark.parametrize(("name", "typed"), NAMES, ids=[row[0] for row in NAMES])
def test_special_characters_in_a_path_stay(name, typed, compose, capsys, workdir):
    lay_out(workdir)
    Path("photos").rename(name)
    assert compose(f"data={typed}").values["data"]["root"] == name
    assert compose("--multirun", f"data={typed},digits").values["data"]["root"] == name
    show([f"data={typed}"])
    assert f"# {name} is a folder of images for each class: data=image_folder data.root=" in capsys.readouterr().out


def test_words_that_name_options_keep_their_meaning(compose, workdir):
    lay_out(workdir)
    own = workdir / "mine/data"
    own.mkdir(parents=True)
    shutil.copy(shipped() / "data/digits.yaml", own / "pictures.yaml")
    for name in ("pictures", "_base", "null"):
        shutil.copytree("photos", name)
        composition = compose("--config-dir", "mine", f"data={name}", "data.dataset._target_=my.Data")
        assert composition.data_found == ""
        assert composition.group_choices.get("data", "null") == name
    with pytest.raises(UserError) as caught:
        compose("--config-dir", "mine", "data=mine/data/pictures.yaml")
    assert [problem.nearest for problem in caught.value.problems] == ["pictures"]


@pytest.mark.parametrize("name", ["annotations.json", "data.yaml"])
def test_a_pipe_and_a_large_file_are_not_read(name, compose, workdir, monkeypatch):
    monkeypatch.setattr("runner.config.data_path.LARGEST_DATA", 2**20)
    os.mkfifo(f"pipe-{name}")
    with Path(f"large-{name}").open("wb") as file:
        file.write(b'{"file_name": "a.png", "names": ')
        file.truncate(2**21)
    for kind in ("pipe", "large"):
        with pytest.raises(UserError) as caught:
            compose(f"data={kind}-{name}")
        assert [problem.key for problem in caught.value.problems] == ["data"]


def test_masks_that_cannot_be_read_are_left_to_the_data_set(compose, workdir):
    picture(workdir / "damaged/images/a.png")
    picture(workdir / "damaged/masks/a.png", [0, 1])
    os.mkfifo("damaged/masks/b.png")
    (workdir / "damaged/masks/c.png").write_bytes(b"none")
    # A header of 65,535 x 65,535 pixels, and numbers for which a count of each would take gigabytes
    (workdir / "damaged/masks/d.bmp").write_bytes(
        struct.pack("<2sIIIIIIHH24x", b"BM", 54, 0, 54, 40, 65535, 65535, 1, 8)
    )
    Image.fromarray(np.array([[0, 2**31 - 1]], dtype=np.int32)).save("damaged/masks/e.tif")
    assert at(compose("data=damaged").values, "data.dataset")["values"] == [0, 1, 2**31 - 1]


def test_jobs_of_a_sweep_look_at_a_path_once(workdir, monkeypatch):
    lay_out(workdir)
    looked, found_in = [], data_path._found_in
    monkeypatch.setattr(data_path, "_found_in", lambda value, names: looked.append(value) or found_in(value, names))
    with opened("train", ["--multirun", "data=flat,photos", "epochs=1,2,3"]) as command:
        assert command is not None
        assert len(plan_of(command).jobs) == 6
    assert looked == ["flat", "photos"]


def test_a_checkpoint_keeps_its_model_and_task(compose, workdir):
    lay_out(workdir)
    words = compose("data=flat", "ckpt_path=last", "split=val", verb="eval").overrides
    assert [word for word in words if word.startswith(("experiment", "model", "task"))] == []
    assert {"data=segmentation_folder", "data.root='flat'"} <= set(words)
    assert compose("data=flat", "ckpt_path=last", verb="eval").values["name"] == "segmentation"
    assert "experiment=segmentation" in compose("data=flat", "ckpt_path=null").overrides


WRONG = [
    ("data=empty", "b.txt"),
    ("data=alone", "cat/"),
    ("data=list.json", "list.json"),
    ("data=bad.yaml", "bad.yaml"),
    ("data=void.yaml", "void.yaml"),
    ("data=my.yaml", "other_key"),
    ("data=nowhere/data.yaml", "no such file"),
]


@pytest.mark.parametrize(("word", "says"), WRONG, ids=[row[0] for row in WRONG])
def test_what_is_none_of_the_kinds_is_told_with_what_was_looked_for(word, says, compose, workdir):
    (workdir / "empty").mkdir()
    (workdir / "empty/b.txt").touch()
    picture(workdir / "alone/cat/a.png")
    (workdir / "list.json").write_text("[]")
    (workdir / "bad.yaml").write_text("[")
    (workdir / "void.yaml").touch()
    (workdir / "my.yaml").write_text("other_key: 1\n")
    for words in ((word,), ("--multirun", f"{word},digits"), ("--cfg", "job", word)):
        with pytest.raises(UserError) as caught:
            compose(*words, "epochs=2")
        [problem] = caught.value.problems
        assert problem.key == "data"
        assert says in problem.message
        assert ("classes.txt" in problem.allowed or "COCO" in problem.allowed) != ("nowhere" in word)


def test_a_wrong_path_hides_no_other_mistake(compose, workdir):
    (workdir / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        compose("data=empty", "epoch=2")
    assert {problem.key for problem in caught.value.problems} == {"data", "epoch"}


def test_show_says_what_a_path_stands_for_and_copy_refuses_it(workdir, capsys, rejected):
    lay_out(workdir)
    assert show(["data=one/annotations.json"]) == 0
    out = capsys.readouterr().out
    assert "experiment=detection_torchvision data=coco data.root='one'" in out
    assert "conf/data/coco.yaml" in out
    assert (
        "copy: data has no option 'one/annotations.json'" in rejected("copy", "data=one/annotations.json", "mine").err
    )


@pytest.mark.extended
def test_an_interrupted_run_continues_to_the_bits_of_a_whole_one(train, stopped, bomb, workdir, monkeypatch):
    drawn_masks.draw(workdir / "scenes", train=12, val=4)
    words = ("data=scenes", *QUICK, "epochs=2")
    whole = train(*words)
    assert "  found  " in whole.out
    assert "scenes is a folder of images and masks: experiment=segmentation data=segmentation_folder" in whole.out
    assert yaml.safe_load((whole.directory / "config.yaml").read_text())["data"]["root"] == "scenes"
    half = stopped(4, *words, "name=again")
    copied = shutil.copytree(half.directory, workdir / "copied")
    again = train(*words, "name=again", "resume=auto", *bomb(4, signal.SIGTERM))
    assert again.directory == half.directory
    assert again.summary["weights_sha256"] == (bits := whole.summary["weights_sha256"])
    # A relative path of another folder
    (workdir / "elsewhere").mkdir()
    monkeypatch.chdir(workdir / "elsewhere")
    resumed = train("data=../scenes", *QUICK, "epochs=2", f"ckpt_path={copied}")
    assert resumed.summary["weights_sha256"] == bits


@pytest.mark.extended
def test_a_sweep_takes_paths_of_several_formats_and_continues(accepted, workdir):
    drawn_masks.draw(workdir / "scenes", train=8, val=4)
    for name in ("cat", "dog"):
        for number in range(10):
            picture(workdir / "photos" / name / f"{number}.png", number)
    words = (*QUICK, "max_steps=1", "threads=1", "log.curves=false", "logger=none", "evaluate.test=false")
    sweep = Path(accepted("train", "--multirun", "data=scenes,photos", *words).out.splitlines()[-1])
    tasks = [yaml.safe_load((sweep / f"{job}/config.yaml").read_text())["task"]["_target_"] for job in (0, 1)]
    assert [task.rpartition(".")[2] for task in tasks] == ["Segmentation", "Classification"]
    again = accepted("train", "--multirun", "data=scenes,photos", *words)
    assert again.out.splitlines()[-1] == str(sweep)
    assert "started" not in again.out


def commands(page: str) -> list[list[str]]:
    """The commands of the section that begins with an empty folder."""
    text = (DOCS / "howto" / page).read_text(encoding="utf-8")
    [section] = re.findall(r"^## From an empty folder to a picture.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    lines = [
        line
        for body in re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        for line in body.splitlines()
    ]
    assert 1 < len(lines) <= 10
    return [line.removeprefix("python -m runner ").split() for line in lines]


def run_all(accepted: Any, lines: list[list[str]], small: tuple[str, ...]) -> None:
    """Run commands; those that build a model get other words, as nothing is downloaded."""
    for verb, *words in lines:
        more = {"train": ("log.curves=false", "max_steps=2", *small), "check": small}.get(verb, ())
        accepted(verb, *words, *more, *(["threads=1"] * (verb != "show")))


@pytest.mark.extended
@pytest.mark.extra(name="detection")
def test_own_boxes_from_an_empty_folder_to_a_picture(accepted, workdir):
    drawn_objects.draw(workdir / "my_boxes", "train", 8, seed=0)
    drawn_objects.draw(workdir / "my_boxes", "val", 4, seed=1)
    (workdir / "my_boxes/data.yaml").write_text("train: images/train\nval: images/val\nnames: [cup, plate]\n")
    small = (
        "model.weights=null",
        "model.name=ssdlite320_mobilenet_v3_large",
        "data.batch_size=2",
        "evaluate.batch_size=2",
    )
    run_all(accepted, commands("detection.md"), small)
    with Image.open(next((workdir / "boxes_images").glob("*.png"))) as found:
        assert found.size[0] >= drawn_objects.SIZE[0]
    assert len((workdir / "boxes.jsonl").read_text().splitlines()) == 4


def test_own_masks_from_an_empty_folder_to_a_picture(accepted, workdir):
    drawn_masks.draw(workdir / "drawn", train=20, val=0)
    for kind in ("images", "masks"):
        shutil.copytree(workdir / "drawn/train" / kind, workdir / "my_masks" / kind)
    run_all(accepted, commands("segmentation.md"), ("model.weights_backbone=null", *QUICK[:2]))
    assert len([*(workdir / "masks_images").glob("*_mask.png")]) == 20
    assert len([*(workdir / "masks_images").glob("*_picture.png")]) == 20
