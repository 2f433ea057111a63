"""Semantic segmentation: folder of masks, transforms, task, metrics and models, through the program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_masks import CLASSES, MODEL, TINY, draw
from extended import some
from PIL import Image
from read_splits import read_words

from runner.data.sampler import sample_of
from runner.data.sources.masks import MaskFolder

EXACT = (
    *TINY, "dtype=float64", "optimizer=sgd", "data.shuffle=false", "transform.sample_train=${transform.sample_eval}",
)  # fmt: skip


@pytest.fixture(autouse=True)
def shapes(workdir: Path, own_module: Callable[..., Path]) -> Path:
    own_module("drawn_nets", MODEL)
    return draw(workdir / "shapes", void=True)


@pytest.mark.extended
def test_a_small_model_learns_shapes_and_eval_shows_each_class(
    train: Callable[..., Any], accepted: Callable[..., Any], printed: Any, workdir: Path
) -> None:
    draw(workdir / "larger", train=48, val=16, size=64)
    words = ("data.root=larger", "data.image_size=64", "epochs=8", "optimizer.lr=0.02", "scheduler=onecycle")
    result = train(*TINY, *words)
    assert result.summary["best"]["metric"] == "val/miou"
    assert result.summary["best"]["value"] > 0.8
    evaluated = printed("eval", f"ckpt_path={result.directory}", "split=val")
    assert evaluated["metrics"]["miou"] == result.summary["best"]["value"]
    ious = [evaluated["per_label"][name]["iou"] for name in CLASSES]
    assert evaluated["metrics"]["miou"] == pytest.approx(sum(ious) / 3)
    assert list(evaluated["per_class"]) == list(CLASSES)
    assert sum(map(sum, evaluated["confusion"])) == 16 * 64 * 64
    assert "disc" in accepted("eval", f"ckpt_path={result.directory}", "split=val").out


def test_workers_and_kills_give_the_same_weights(train: Callable[..., Any], killed: Callable[..., Path]) -> None:
    expected = train(*TINY).summary
    assert train(*TINY, "data.num_workers=2").summary["weights_sha256"] == expected["weights_sha256"]
    directory = killed(4, *TINY, "checkpoint.every_steps=1")
    once = train(f"ckpt_path={directory}", "callbacks=none", "max_steps=5", "data.num_workers=2").directory
    again = train(f"ckpt_path={once}", "callbacks=none", "max_steps=null", "data.num_workers=0").summary
    assert (again["weights_sha256"], again["best"]) == (expected["weights_sha256"], expected["best"])


_HALVES = ("accumulate=2", "data.batch_size=4")


@pytest.mark.parametrize("words", some([_HALVES, ("devices=2",), ("devices=2", *_HALVES)], 0, 1))
def test_a_batch_that_is_divided_unevenly_trains_the_same_weights(train: Callable[..., Any], words: Any) -> None:
    # Masks have different numbers of pixels that count, and some batches of a rank or a micro-batch few of them
    one, other = train(*EXACT, "+model.aux=true"), train(*EXACT, "+model.aux=true", *words)
    torch.testing.assert_close(other.last["model"], one.last["model"], rtol=0, atol=1e-10)
    before, after = one.summary["last"], other.summary["last"]
    assert (after["miou"], after["pixel_accuracy"]) == (before["miou"], before["pixel_accuracy"])
    assert after["loss"] == pytest.approx(before["loss"], abs=1e-10)


@pytest.mark.extended
def test_the_size_of_batches_does_not_change_an_evaluation(train: Callable[..., Any], printed: Any) -> None:
    words = ("eval", f"ckpt_path={train(*TINY).directory}", "split=val")
    found = [printed(*words, f"evaluate.batch_size={size}")["metrics"] for size in (1, 3, 16)]
    for each in found:
        assert (each["miou"], each["pixel_accuracy"]) == (found[0]["miou"], found[0]["pixel_accuracy"])
        assert each["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)


def test_images_of_different_sizes_are_evaluated_one_at_a_time(train: Callable[..., Any], shapes: Path) -> None:
    for split in ("train", "val"):
        for number, file in enumerate(sorted((shapes / split).glob("*/*.png"))):
            image = Image.open(file)
            image.resize((24, 24 + 8 * (number % 2)), Image.Resampling.NEAREST).save(file)
    found = train(*TINY, "transform.sample_eval=[]", "evaluate.batch_size=1")
    assert found.summary["last"]["miou"] > 0


def test_a_step_in_which_no_pixel_counts_changes_no_weight(train: Callable[..., Any], shapes: Path) -> None:
    for number, file in enumerate(sorted((shapes / "train" / "masks").iterdir())):
        Image.new("L", (24, 24), 255 if number < 19 else 1).save(file)
    words = (*TINY, "optimizer=sgd", "optimizer.weight_decay=0", "epochs=1", "data.shuffle=false")
    one, two = (train(*words, f"max_steps={steps}").last["model"] for steps in (1, 2))
    assert all(two[name].equal(one[name]) for name in one)


def test_a_mask_belongs_to_an_image_whose_name_has_another_unicode_form(shapes: Path) -> None:
    from runner.data.sources.masks import segmentation_folder

    expected = segmentation_folder(str(shapes))["train"][3][1]
    for kind, name in (("images", "003\u00e9.png"), ("masks", "003e\u0301.png")):
        (shapes / "train" / kind / "003.png").rename(shapes / "train" / kind / name)
    assert segmentation_folder(str(shapes))["train"][3][1].equal(expected)


def palette(path: Path, value: int) -> None:
    image = Image.new("P", (24, 24), value)
    image.putpalette([9, 9, 9] * 256)
    image.save(path)


def bits(path: Path, value: int, depth: int) -> None:
    """A grey PNG of 2 or 4 bits, which Pillow cannot write."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    byte = sum(value << shift for shift in range(0, 8, depth))
    rows = zlib.compress((b"\0" + bytes([byte]) * (24 * depth // 8)) * 24)
    header = struct.pack(">IIBBBBB", 24, 24, depth, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


@pytest.mark.parametrize("kind", ["L", "P", "2 bits", "4 bits", "16 bits", "1 bit"])
def test_masks_of_every_kind_have_their_class_numbers(shapes: Path, kind: str) -> None:
    from runner.data.sources.masks import segmentation_folder

    file, value = shapes / "train" / "masks" / "000.png", 1 if kind == "1 bit" else 2
    if kind == "P":
        palette(file, value)
    elif kind in ("2 bits", "4 bits"):
        bits(file, value, int(kind[0]))
    elif kind == "16 bits":
        Image.fromarray(np.full((24, 24), value, np.uint16)).save(file)
    else:
        Image.new("1" if kind == "1 bit" else "L", (24, 24), value).save(file)
    _, mask = segmentation_folder(str(shapes))["train"][0]
    assert mask.shape == (24, 24)
    assert mask.unique().tolist() == [value]


def wide(shapes: Path) -> None:
    for split, kind in (("train", "images"), ("train", "masks"), ("val", "images"), ("val", "masks")):
        for file in sorted((shapes / split / kind).iterdir())[::2]:
            Image.open(file).resize((36, 24), Image.Resampling.NEAREST).save(file)


def white(shapes: Path) -> None:
    for file in shapes.glob("train/masks/*"):
        Image.open(file).point(lambda value: 255 * (value > 0)).save(file)


def ignored(shapes: Path, split: str = "train") -> None:
    for file in shapes.glob(f"{split}/masks/*"):
        Image.new("L", (24, 24), 255).save(file)


def mask(place: str, value: int = 0, kind: str = "L", size: tuple[int, int] = (24, 24)) -> Callable[[Path], None]:
    return lambda root: Image.new(kind, size, value).save(root / place)


def renamed(suffix: str) -> Callable[[Path], None]:
    return lambda root: Image.new("L", (24, 24)).save(
        (root / "train/masks/003.png").rename(root / f"train/masks/003.{suffix}")
    )


def written(place: str, text: str = "no") -> Callable[[Path], object]:
    return lambda root: (root / place).write_text(text)


# What is wrong with the files, words, and the key and parts of the reason in the sentence.
FAULTS: dict[str, tuple[Callable[[Path], object] | None, str, str, tuple[str, ...]]] = {
    "value": (mask("train/masks/013.png", 7), "", "data.dataset", ("sample 13 of 'train'", "images/013.png", "value 7")),
    "value, first": (mask("train/masks/000.png", 7), "", "data.dataset", ("sample 0", "value 7")),
    "value in val, worker": (
        mask("val/masks/009.png", 7), "data.num_workers=1", "data.dataset", ("sample 9 of 'val'", "value 7"),
    ),
    "value in val, first": (
        mask("val/masks/000.png", 7), "", "data.dataset", ("sample 0 of 'val'", "val/images/000.png", "value 7"),
    ),
    "padding without a class": (
        None, "task.ignore_index=254 transform.sample_eval.0.ignore_index=99", "data.dataset", ("value 255",),
    ),
    "no mask": (
        lambda root: (root / "train/masks/003.png").unlink(), "", "data.root", ("1 of 20", "003", "have no mask"),
    ),
    "mask of another name": (
        lambda root: (root / "train/masks/003.png").rename(root / "train/masks/003_mask.png"), "", "data.root",
        ("1 of 20", "003", "have no mask", "1 mask has no image, such as", "003_mask.png"),
    ),
    "size": (mask("train/masks/003.png", size=(20, 24)), "", "", ("003.png has 24 x 20", "24 x 24")),
    "colours": (mask("train/masks/003.png", kind="RGB"), "", "", ("003.png", "(RGB) without a palette")),
    "two masks": (mask("train/masks/003.bmp"), "", "data.root", ("003.bmp", "003.png", "two masks")),
    "PGM": (renamed("pgm"), "", "data.root", ("003.pgm", "PPM", "allowed: PNG")),
    "JPEG": (renamed("jpg"), "", "data.root", ("003.jpg", "JPEG", "allowed: PNG")),
    "damaged": (written("train/images/003.png"), "", "", ("003.png", "not an image")),
    "damaged mask": (written("train/masks/003.png"), "", "", ("mask", "003.png")),
    "class twice": (
        written("classes.txt", "ground\ndisc\ndisc"), "", "data.root", ("classes.txt has two classes", "disc"),
    ),
    "mixed sizes": (
        wide, "transform=none", "data.collate", ("different shapes", "(3, 24, 24)", "(3, 24, 36)", "transform=segmentation"),
    ),
    "no classes": (lambda root: (root / "classes.txt").unlink(), "", "data.dataset.classes", ("classes.txt",)),
    "no images": (None, "data.root=shapes/val/images", "data.dataset.classes", ("classes.txt",)),
    "no folder": (lambda root: (root / "train").rename(root / "old"), "", "data.root", ("shapes/images",)),
    "black and white": (white, "", "data.dataset.values", ("0 and 255",)),
    "values": (white, "data.dataset.values=[0,255]", "data.dataset.values", ("3 classes",)),
    "values twice": (white, "data.dataset.values=[0,255,255]", "data.dataset.values", ("cannot be [0, 255, 255]",)),
    "value of two classes": (white, "data.dataset.values=[0,[255,0],9]", "data.dataset.values", ("cannot be [0, [255, 0], 9]",)),
    "no value": (white, "data.dataset.values=[0,[],9]", "data.dataset.values", ("cannot be [0, [], 9]",)),
    "all ignored": (ignored, "", "data.dataset.values", ("only the values 255",)),
    "val ignored": (lambda root: ignored(root, "val"), "", "", ("the weight of every batch is 0",)),
    "all of no class": (None, "data.dataset.values=[7,8,9]", "data.dataset.values", ("only the values 255",)),
    "ignored value": (None, "task.ignore_index=-100", "transform.sample_train.0.ignore_index", ("0 to 255",)),
    "many classes": (None, "task.num_classes=257", "task.num_classes", ()),
    "classifier": (
        None, "model._target_=runner.models.small_cnn.SmallCNN +model.in_channels=null", "model",
        ("SmallCNN is for pairs", "allowed: model=torchvision_segmentation"),
    ),
    "no size": (None, "data.image_size=null", "transform.sample_train.0", ("size is null", "data.image_size")),
    "logits": (None, "+model.pooled=true", "task", ("(B, C, H, W)", "(2, 3)")),
    "other task": (None, "task=classification", "task", ("samples have masks", "experiment=segmentation")),
    "other transform": (None, "transform=standard", "transform.train", ("(image, target)",)),
    "samples": (None, "data.images=null transform=none", "data.dataset", ("task=segmentation", "(24, 24)")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_a_sentence(refused: Callable[..., None], shapes: Path, name: str) -> None:
    damage, words, key, reasons = FAULTS[name]
    if damage is not None:
        damage(shapes)
    refused((*TINY, *words.split()), key, *reasons)


def test_files_that_cannot_be_read_are_skipped_and_counted(train: Callable[..., Any], shapes: Path) -> None:
    (shapes / "train" / "masks" / "003.png").write_bytes(b"no")
    Image.new("L", (9, 9)).save(shapes / "train" / "masks" / "004.png")
    result = train(*TINY, "data.on_error=skip")
    assert result.summary["skipped"] == 2


def test_black_and_white_masks_and_splits_by_fractions(train: Callable[..., Any], shapes: Path) -> None:
    white(shapes)
    words = ("data.dataset.classes=[ground,shape]", "data.dataset.values=[0,255]", "data.split.val=0.3")
    result = train(*TINY, *words, "data.root=shapes/train", "epochs=1")
    assert "2 classes" in result.err + result.out
    assert "6 val" in result.err + result.out


def test_a_mask_without_an_image_is_a_warning(train: Callable[..., Any], shapes: Path) -> None:
    for number in (3, 4):
        (shapes / "train" / "images" / f"{number:03}.png").unlink()
    assert "data.root: 2 masks have no image, such as shapes/train/masks/003.png" in train(*TINY, "epochs=1").out


def test_balanced_class_weights_are_those_of_the_pixels(
    train: Callable[..., Any], printed: Any, shapes: Path, compose: Any
) -> None:
    words = (*TINY, "loss.class_weights=balanced")
    masks = np.concatenate([np.array(Image.open(path)).ravel() for path in (shapes / "train" / "masks").iterdir()])
    counts = [int((masks == number).sum()) for number in range(3)]
    assert read_words(compose, *words).class_counts.tolist() == counts
    assert read_words(compose, *TINY).class_counts is None
    weights = [sum(counts) / count for count in counts]
    listed = train(*TINY, f"loss.class_weights={weights}").summary["last"]["loss"]
    result = train(*words)
    assert result.summary["last"]["loss"] == pytest.approx(listed, rel=1e-5)
    evaluated = printed("eval", f"ckpt_path={result.directory}/checkpoints/last.safetensors", "split=val")
    assert evaluated["metrics"] == result.summary["last"]


def test_a_class_may_have_several_values(compose: Any) -> None:
    words = (*TINY, "data.dataset.classes=[ground,shape]", "transform=none")
    changed = (*words, "data.dataset.values=[0,[2,1]]")
    plain, joined = (read_words(compose, *each).parts["train"][0] for each in ((*TINY, "transform=none"), changed))
    values, seen = torch.full((256,), 255), set[int]()
    values[:3] = torch.tensor([0, 1, 1])
    for (_, before), (_, after) in zip(plain, joined, strict=True):
        assert torch.equal(after.long(), values[before.long()])
        seen |= {*before.unique().tolist()}
    assert seen == {0, 1, 2, 255}


def test_images_with_rare_classes_are_drawn_more_often(train: Callable[..., Any], shapes: Path, compose: Any) -> None:
    for path in sorted((shapes / "train" / "masks").iterdir())[2:]:  # squares in two images alone
        mask = np.array(Image.open(path))
        Image.fromarray(np.where(mask == 2, 0, mask)).save(path)
    words = (*TINY, "data.sampler=balanced")
    loader = read_words(compose, *words).train.loader
    drawn = torch.cat([sample_of(loader.draws(epoch).slice(0, 20)) for epoch in range(500)])
    shown = [{*np.unique(Image.open(path))} - {255} for path in sorted((shapes / "train" / "masks").iterdir())]
    counts = {number: sum(number in each for each in shown) for number in range(3)}
    assert counts[2] == 2
    weights = torch.tensor([max(((20 / counts[each]) ** 0.5 for each in some), default=1) for some in shown])
    # The standard deviation of a share of 10,000 draws is at most 0.005
    torch.testing.assert_close(torch.bincount(drawn) / 10_000, weights / weights.sum(), rtol=0, atol=0.02)
    whole, stopped = train(*words), train(*words, "max_steps=1")
    assert "images of rare classes up to 3.16 times as often" in whole.out
    resumed = train(f"ckpt_path={stopped.directory}", "max_steps=null", "data.num_workers=2")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_classes_of_masks_are_looked_up_once_for_the_same_files(
    shapes: Path, compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, masks = list[int](), sorted((shapes / "train" / "masks").iterdir())
    classes_of = MaskFolder.classes_of
    monkeypatch.setattr(
        MaskFolder, "classes_of", lambda self, index: (looked.append(index), classes_of(self, index))[1]
    )

    def draws(*words: str, keep: bool = True) -> tuple[list[int], int]:
        """Draws of an epoch, and how many masks were read."""
        looked.clear()
        made = read_words(compose, *TINY, "data.sampler=balanced", *words, make_cache=keep)
        return made.train.loader.draws(0).slice(0, 20).tolist(), len(looked)

    expected, _ = draws(keep=False)
    assert not Path("shapes.cache").exists()
    assert [draws(), draws(), draws(keep=False)] == [(expected, 20), (expected, 0), (expected, 0)]
    # Other values of masks, other samples of the same files, and another mask
    assert draws("data.dataset.values=[1,0,2]")[1] == 20
    whole = ("data.root=shapes/train", f"data.dataset.classes=[{','.join(CLASSES)}]", "data.split.val=0.3")
    assert [draws(*whole, f"data.split.seed={seed}")[1] for seed in (1, 2, 2)] == [10, 10, 0]
    Image.fromarray(np.full_like(np.array(Image.open(masks[0])), 255)).save(masks[0])
    assert draws()[1] == 20
    # One that cannot be read may be repaired, and nothing else changes then
    masks[1].write_bytes(b"no image")
    assert [draws("data.on_error=skip")[1] for _ in range(2)] == [20, 20]


def test_mask_and_image_move_together_and_only_the_image_changes_its_colours() -> None:
    from torchvision.transforms import v2
    from torchvision.tv_tensors import Image as Picture
    from torchvision.tv_tensors import Mask

    from runner.data.transforms.segmentation import ScaleCrop

    torch.manual_seed(0)
    classes = torch.zeros(40, 24, dtype=torch.uint8)
    classes[8:20, 4:20] = 1
    image, mask = Picture(classes.repeat(3, 1, 1) * 200 + 20), Mask(classes)
    steps = v2.Compose([ScaleCrop(32, (0.5, 2.0)), v2.RandomHorizontalFlip(0.5)])
    for _ in range(20):
        picture, moved = steps((image, mask))
        assert (picture.shape, moved.shape) == ((3, 32, 32), (32, 32))
        assert set(moved.unique().tolist()) <= {0, 1, 255}
        # Black where the mask is padded, and the colours of the classes elsewhere but at edges
        assert bool((picture[:, moved == 255] == 0).all())
        assert bool(((picture[0].float() - 20 - 200 * moved.float()).abs() < 110)[moved != 255].float().mean() > 0.9)
    whole, placed = ScaleCrop(32)((image, mask))
    assert all(part.equal(other) for part, other in zip((whole, placed), ScaleCrop(32)((image, mask)), strict=True))
    assert (placed == 255).sum() == 32 * (32 - 19)
    assert ScaleCrop(40)((image, mask))[1][:, :24].equal(classes)


def test_evaluations_see_whole_images_in_any_order(train: Callable[..., Any], shapes: Path) -> None:
    wide(shapes)
    found = [train(*TINY, f"data.num_workers={workers}").summary for workers in (0, 2)]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    assert found[0]["last"]["miou"] == found[1]["last"]["miou"]
