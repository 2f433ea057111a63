"""Masks and boxes in tar files: the samples of the packed files, what is refused, and that the bytes are those indexed."""

from __future__ import annotations

import json
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawn_masks
import drawn_objects
import fsspec
import numpy as np
import pytest
import torch
from drawn_objects import changed, read_coco
from extended import some
from extras import needs
from PIL import Image
from read_splits import read_words
from tar_files import Members, cls, encoded, in_memory, members, packed_order, picture, samples, write_tar

from runner.base.errors import DataFailed, UserError
from runner.data.sources import shards as module
from runner.data.sources.detection import yolo
from runner.data.sources.masks import segmentation_folder
from runner.data.sources.shards import shards

MASKS = ("experiment=segmentation", "data.root=shapes", "data.image_size=24")
BOXES = ("experiment=detection_torchvision", "data.root=drawn", *drawn_objects.COCO)


@pytest.fixture
def shapes(workdir: Path) -> Path:
    """Images with masks; one is a JPEG that lies on its side, and its mask has 16 bits."""
    root = drawn_masks.draw(workdir / "shapes", 7, 3, void=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    (root / "train/images/000.png").unlink()
    pixels = np.random.default_rng(0).integers(256, size=(20, 30, 3), dtype=np.uint8)
    (root / "train/images/000.jpg").write_bytes(picture(pixels, "JPEG", exif=exif))
    (root / "train/masks/000.png").write_bytes(picture((np.arange(600) % 3).astype(np.uint16).reshape(30, 20)))
    return root


@pytest.fixture
def drawn(workdir: Path) -> Path:
    """Images with objects, one of which is a crowd with a run-length encoding."""
    drawn_objects.draw(workdir / "drawn", "train", 7, 0)
    drawn_objects.draw(workdir / "drawn", "val", 5, 1)
    encoding = {"counts": [64, 320, 896], "size": [32, 40]}
    crowd = {"iscrowd": 1, "segmentation": encoding, "bbox": [2.25, 0, 9.5, 32]}
    changed(workdir / "drawn/train.json", lambda it: it["annotations"][1].update(crowd))
    return workdir / "drawn"


def check_same(one: Any, other: Any) -> None:
    """Two samples have the same types and values."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, allow_subclasses=False)


def check_samples(packed: Any, source: Any, folder: Path) -> None:
    assert packed.keys() == source.keys()
    for split in source:
        order = packed_order(folder / split)
        assert sorted(order) == list(range(len(source[split])))
        assert packed[split].classes == source[split].classes
        for place, index in enumerate(order):
            check_same(packed[split][place], source[split][index])
        with pytest.raises(IndexError):
            packed[split][len(order)]


def test_masks_are_those_of_the_folder_also_in_a_store(shapes: Path, accepted: Any, workdir: Path) -> None:
    accepted("pack", *MASKS, "data.dataset.values=[0,2,1]", "output=out", "shard_samples=4")
    source = segmentation_folder("shapes", values=[0, 2, 1])
    check_samples(shards("out", 8, target="mask"), source, Path("out"))
    names = dict(members(*Path("out/train").glob("*.tar")))
    assert names["000000000.jpg"] == (shapes / "train/images/000.jpg").read_bytes()
    assert {"000000000.mask.png", "000000001.png", "000000001.mask.png"} < names.keys()
    store = shards(in_memory(workdir / "out"), target="mask")
    check_samples(store, source, Path("out"))
    local = shards("out", target="mask")["train"]
    assert store["train"].fingerprint() == local.fingerprint()
    path = next(Path("out/train").glob("*.tar"))
    content = bytearray(path.read_bytes())
    content[content.index(b".mask.png") + 600] ^= 1
    fsspec.filesystem("memory").pipe(f"{workdir}/{path}", bytes(content))
    with pytest.raises(DataFailed, match="has another CRC-32"):
        [store["train"][index] for index in range(7)]
    path.write_bytes(content)
    with pytest.raises(UserError, match="was changed or damaged after it was indexed"):
        [local[index] for index in range(7)]


@needs("detection")
@pytest.mark.parametrize("masks", some([True, False], 0))
def test_boxes_and_instance_masks_are_those_of_the_annotations(
    drawn: Path, accepted: Any, masks: bool, workdir: Path
) -> None:
    accepted("pack", *BOXES, f"data.dataset.masks={masks}", "output=out", "shard_samples=4")
    source = read_coco("drawn", masks=masks)
    for root in ("out", in_memory(workdir / "out")):
        check_samples(shards(root, target="boxes"), source, Path("out"))
    assert ("masks" in shards("out", target="boxes")["train"][0][1]) == masks


@needs("detection")
def test_shards_are_balanced_as_what_was_packed(compose: Any, drawn: Path, shapes: Path, accepted: Any) -> None:
    for words, experiment, target in ((BOXES, "detection_torchvision", "boxes"), (MASKS, "segmentation", "mask")):
        accepted("pack", *words, f"output={target}")
        packed = (f"experiment={experiment}", "data=shards", f"data.root={target}", f"data.dataset.target={target}")
        order = packed_order(Path(target) / "train")
        loaders = [
            read_words(compose, *each, "data.sampler=balanced", "data.num_workers=0").train.loader
            for each in (words, packed)
        ]
        source, shard = (each.draws.args[0].factors for each in loaders)
        assert np.array_equal(shard, source[order])
        assert len({*source}) > 1


@needs("detection")
def test_yolo_is_packed_in_shares_of_the_sides(drawn: Path, accepted: Any) -> None:
    (drawn / "classes.txt").write_text("tall\nwide\n")
    accepted("pack", "experiment=detection_torchvision", "data=yolo", "data.root=drawn", "output=out", "max_side=20")
    packed, source = shards("out", target="boxes")["val"], yolo("drawn")["val"]
    for place, index in enumerate(packed_order("out/val")):
        (image, found), (_, expected) = packed[place], source[index]
        assert image.shape == (3, 16, 20)
        assert torch.allclose(found["boxes"] * 2, expected["boxes"], atol=1e-4)


def test_larger_images_are_resized_with_their_masks(shapes: Path, accepted: Any) -> None:
    accepted("pack", *MASKS, "max_side=24", "output=out")
    packed, source = shards("out", target="mask")["train"], segmentation_folder("shapes")["train"]
    for place, index in enumerate(packed_order("out/train")):
        (image, mask), (_, before) = packed[place], source[index]
        if index == 0:  # 20 x 30 pixels, upright
            assert image.shape == (3, 24, 16)
            nearest = Image.fromarray(before.numpy()).resize((16, 24), Image.Resampling.NEAREST)
            assert np.array_equal(mask, nearest)
        else:
            check_same(packed[place], source[index])


@needs("detection")
def test_larger_images_are_resized_with_their_polygons_and_run_lengths_are_refused(
    drawn: Path, accepted: Any, rejected: Any
) -> None:
    words = ("pack", *BOXES, "data.dataset.masks=true", "max_side=20")
    assert "max_side: is set, and an outline is a run-length encoding" in rejected(*words, "output=none").err
    assert not [*Path("none").glob("[!.]*")]
    outline = {"segmentation": [[4, 2, 8, 2, 8, 10, 4, 10]], "bbox": [4, 2, 4, 8]}
    changed(drawn / "train.json", lambda it: it["annotations"][1].update(outline))
    accepted(*words, "output=out")
    packed, source = shards("out", target="boxes")["train"], read_coco("drawn", masks=True)["train"]
    for place, index in enumerate(packed_order("out/train")):
        (image, found), (_, expected) = packed[place], source[index]
        assert image.shape == (3, 16, 20)
        assert torch.allclose(found["boxes"] * 2, expected["boxes"], atol=1e-4)
        assert found["masks"].shape == (len(expected["boxes"]), 16, 20)
        for small, box in zip(found["masks"], found["boxes"].round().int().tolist(), strict=True):
            inside = small[box[1] : box[3], box[0] : box[2]]
            assert inside.float().mean() > 0.7
            assert int(small.sum()) - int(inside.sum()) <= 12, "only the border may be outside"
        for name in ("labels", "iscrowd", "image_id"):
            check_same(found[name], expected[name])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("max_side=20",), "002.png has 12 x 12 pixels, and its image"),  # before it is resized
        (("data.dataset.classes=[a,b,b]",), "data.dataset.classes: the list has two classes of one name"),
    ],
)
def test_masks_that_do_not_fit_are_not_packed(shapes: Path, rejected: Any, words: tuple[str, ...], reason: str) -> None:
    (shapes / "train/masks/002.png").write_bytes(picture(np.zeros((12, 12), np.uint8)))
    assert reason in rejected("pack", *MASKS, *words, "output=out").err


def boxes(**changes: Any) -> Members:
    """A sample; a change to None removes a key."""
    said = {"boxes": [[1, 2, 9, 9]], "labels": [2], "size": [16, 16], **changes}
    yield "a.png", encoded(0)
    yield "a.json", json.dumps({name: value for name, value in said.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("target", "files", "reason"),
    [
        ("mask", samples([1], cls), r"0\.tar: sample 000001 has no mask"),
        ("mask", [("a.mask.png", encoded(0))], "has no images"),
        ("mask", [("a.v2.png", b""), ("a.v2.mask.png", b"")], r"a\.v2\.png is the image of no sample.*first dot"),
        ("boxes", [("a.v2.png", b""), ("a.v2.json", b"{}")], r"a\.v2\.png is the image of no sample.*first dot"),
        ("mask", [("a.jpg", b""), ("a.png", b""), ("a.mask.png", b"")], "two images"),
        ("mask", [("a.jpg", picture(np.zeros((1, 2, 3), np.uint8), "JPEG")), ("a.png", picture(np.array([[0, 255]], np.uint8)))],
         "have only the values 0 and 255"),
        ("boxes", samples([1], cls), "sample 000001 has no boxes"),
        ("boxes", [("a.png", b""), ("a.json", b"{")], "cannot read the objects of sample a: it is not JSON"),
        ("boxes", [("a.png", b""), ("a.json", b"[1]")], ": list indices"),
        ("boxes", boxes(size=None), ": there is no 'size'"),
        ("boxes", boxes(labels=[1, 2]), ": zip"),
        ("boxes", boxes(labels=[0]), "has no label from 1 on"),
        ("boxes", boxes(labels=[1.5]), "has no label from 1 on"),
        ("boxes", boxes(labels=[3]), "a sample is of class 3, and .* has only 2 lines"),
        ("boxes", boxes(boxes=[[1, 2, 3]]), ": zip"),
        ("boxes", boxes(boxes=[[1, 2, 20, 4]]), "sample a: the box in object 0 is empty, or outside"),
        ("boxes", boxes(boxes=[[0, 0.25, 0.5, 1]]), "fractions of width and height"),
        ("boxes", boxes(outlines=[None]), "no outline"),
        ("boxes", boxes(crowd="0"), "no crowd of true or false"),
        ("boxes", [*boxes(), ("b.png", b""), ("b.json", b'{"boxes": [], "labels": [], "size": null, "outlines": []}')],
         "sample b has outlines, or has none, as others"),
        ("boxes", boxes(outlines=[[[1e9, 0, 1, 1, 2, 2]]]), "the polygon of object 0 is more than"),
        ("class", boxes(), "sample a has no class number"),
    ],
)  # fmt: skip
def test_samples_without_a_mask_or_with_other_objects_are_refused(
    tmp_path: Path, target: Any, files: Members, reason: str
) -> None:
    write_tar(tmp_path / "0.tar", files)
    (tmp_path / "classes.txt").write_text("tall\nwide\n")
    with pytest.raises(UserError, match=reason) as raised:
        shards(str(tmp_path), target=target)
    assert raised.value.problems[0].key == "data.root"


def test_a_forgotten_key_is_named_and_packed_indexes_are_of_their_target_alone(
    shapes: Path, accepted: Any, rejected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted("pack", *MASKS, "output=out")
    said = rejected("train", "task=segmentation", "data=shards", "data.root=out", "data.dataset.target=mask").err
    assert "data.images: is null, and data.dataset.target=mask" in said
    with pytest.raises(UserError, match="has no class number"):
        shards("out")
    monkeypatch.setattr(module, "index_of", None)
    assert len(shards("out", target="mask")["train"]) == 7


def test_masks_need_names_of_classes_and_the_sizes_of_their_images(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("a.jpg", encoded(0)), ("a.png", picture(np.zeros((9, 16), np.uint8)))])
    with pytest.raises(UserError, match=r"there is no .*classes\.txt"):
        shards(str(tmp_path), target="mask")
    (tmp_path / "classes.txt").write_text("tall\nwide\n")
    with pytest.raises(UserError, match=r"the mask .*0\.tar byte 0 has 9 x 16 pixels, and its image"):
        shards(str(tmp_path), target="mask")["train"][0]


@pytest.mark.parametrize("layout", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tar_files_of_others_are_read(tmp_path: Path, layout: int) -> None:
    def files() -> Members:
        for number in range(3):
            name = "long" * 60 + f"/{number}"  # with a header before the header
            yield f"{name}.txt", b"a caption"
            yield f"{name}.png", picture(np.full((16, 16), number, np.uint8))
            yield "._hidden.png", b"x"
            yield f"{name}.jpg", picture(np.zeros((16, 16, 3), np.uint8), "JPEG")
            yield f"{name}.json", json.dumps({"boxes": [[0, 0, 0.5, 1]], "labels": [1], "size": None}).encode()
            yield f"{name}.cls", b"2"

    path = write_tar(tmp_path / "0.tar", files(), layout)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    found = shards(str(tmp_path), target="mask", cache_folder=str(tmp_path / "cache"))["train"]
    assert found.keep_indexes() == []
    for number in range(3):
        image, mask = found[number]
        assert image.shape == (3, 16, 16)
        assert mask.tolist() == [[number] * 16] * 16
    with pytest.raises(UserError, match="two images"):
        shards(str(tmp_path), cache_folder=str(tmp_path / "cache"))
    write_tar(path, ((name, file) for name, file in files() if not name.endswith(".png")), layout)
    found = shards(str(tmp_path), target="boxes", cache_folder=str(tmp_path / "cache"))["train"]
    assert found.keep_indexes() == []
    image, target = found[1]
    assert target["boxes"].tolist() == [[0, 0, 8, 16]]
    assert (target["labels"].tolist(), target["image_id"], target.keys() >= {"masks"}) == ([1], 1, False)
    assert shards(str(tmp_path), cache_folder=str(tmp_path / "cache"))["train"].targets.tolist() == [2, 2, 2]


@pytest.mark.parametrize("kind", ["masks", pytest.param("boxes", marks=needs("detection"))])
def test_a_pack_goes_on_only_with_the_same_targets(
    kind: str, shapes: Path, drawn: Path, accepted: Any, rejected: Any
) -> None:
    words = ("pack", *(MASKS if kind == "masks" else BOXES), "output=out", "shard_samples=4")
    accepted(*words)
    assert "shards are finished already" in accepted(*words).out
    path, old, new = shapes / "train/masks/003.png", b"IEND\xaeB`\x82", b"IEND\xaeB`\x82x"
    if kind == "boxes":
        path, old, new = drawn / "train.json", b'"category_id": 3', b'"category_id": 7'
    path.write_bytes(path.read_bytes().replace(old, new))
    assert "out was begun with other data" in rejected(*words).err


@pytest.fixture
def trained(accepted: Any, own_module: Any) -> Callable[..., Any]:
    """Train with the words that `pack` printed, and others."""
    own_module("drawn_nets", "import torch\n" + drawn_masks.MODEL + drawn_objects.DETECTOR)

    def call(printed: str, *words: str) -> Any:
        found = shlex.split(printed.splitlines()[-2].partition("; ")[2])
        assert found[:4] == ["python", "-m", "runner", "train"]
        tiny = ("model=small_cnn", "~model.width", "~model.dropout", "scheduler=constant", "logger=none")
        return accepted("train", *found[4:], *tiny, "data.num_workers=0", "data.batch_size=2", *words)

    return call


def test_the_printed_command_trains_on_masks(shapes: Path, accepted: Any, trained: Callable[..., Any]) -> None:
    said = accepted("pack", *MASKS, "output=out", "data.batch_size=3").out
    assert "data.batch_size=3 " in said
    assert "data.normalize.mean=[0.485, 0.456, 0.406]" in said
    words = ("task=segmentation", "transform=segmentation", "model._target_=drawn_nets.Tiny", "epochs=1")
    assert trained(said, *words).summary["best"]["metric"] == "val/miou"


@needs("detection")
def test_the_printed_command_trains_on_boxes_and_keeps_indexes(
    drawn: Path, accepted: Any, trained: Callable[..., Any], workdir: Path
) -> None:
    said = accepted("pack", *BOXES, "output=out").out
    for path in Path("out").rglob("*.index"):
        path.unlink()
    words = ("task=detection", "transform=detection", "loss=none", "model._target_=drawn_nets.TinyDetector", "epochs=1")
    result = trained(said, *words, "evaluate.batch_size=3", f"data.cache_dir={workdir / 'kept'}")
    assert "data.normalize.mean=null" in said
    assert result.summary["best"]["metric"] == "val/map"
    kept = list((workdir / "kept").glob("*.index"))
    assert len(kept) == 2
    kept[0].unlink()
    accepted("eval", f"ckpt_path={result.directory}", "split=val")
    assert len(list((workdir / "kept").glob("*.index"))) == 1, "an evaluation keeps none"
