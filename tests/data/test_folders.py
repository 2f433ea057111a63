"""Images in folders: listing, decoding of every kind of image, and what is said about bad ones."""

import contextlib
import io
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from runner.base.errors import UserError
from runner.data.loaders import BatchPlan
from runner.data.samples import SeededDataset
from runner.data.sources.folders import image_folder
from runner.data.sources.image_io import read_image
from runner.data.workers import WorkerLoader


def _save(path: Path, color=(10, 20, 30), size=(6, 4), mode="RGB", **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path, **options)
    return path


@pytest.fixture
def root(tmp_path):
    for split in ("train", "test"):
        for name in ("dog", "cat"):
            for index in range(3):
                _save(tmp_path / split / name / f"{index}.png", (index, 0, 0))
    return tmp_path


def test_splits_classes_and_files_come_in_the_order_of_their_names(root):
    found = image_folder(str(root))
    assert list(found) == ["train", "test"]
    train = found["train"]
    assert train.classes == ("cat", "dog")
    assert train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.paths == [root / "train" / name / f"{index}.png" for name in ("cat", "dog") for index in range(3)]
    image, target = train[4]
    assert image.dtype == torch.uint8
    assert image.shape == (3, 4, 6)
    assert image[0].unique().tolist() == [1]
    assert target == 1
    assert isinstance(target, int)


def test_a_folder_of_classes_alone_is_the_training_split(root):
    found = image_folder(str(root / "train"))
    assert list(found) == ["train"]
    assert len(found["train"]) == 6


def test_split_folders_may_have_other_names(root):
    (root / "test").rename(root / "holdout")
    assert list(image_folder(str(root), val_folder="holdout")) == ["train", "val"]


def test_nested_upper_case_and_hidden_files_are_handled(root):
    _save(root / "train/cat/deep/er/B.JPG")
    _save(root / "train/cat/.hidden.png")
    _save(root / "train/cat/.cache/x.png")
    _save(root / "train/.ipynb_checkpoints/x.png")
    (root / "train/cat/notes.txt").write_text("no image")
    train = image_folder(str(root))["train"]
    assert train.classes == ("cat", "dog")
    assert [path.name for path in train.paths[:4]] == ["0.png", "1.png", "2.png", "B.JPG"]


def test_photos_of_any_readable_type_are_listed_others_are_counted_and_thumbnails_skipped(root, run, workdir):
    names = (
        "a.jfif",
        "b.JPE",
        "c.avif",
        "d.heic",
        "e.CR2",
        "@eaDir/0.png/thumb.jpg",
        "__MACOSX/f.png",
        ".thumbnails/g.png",
    )
    for name in names:
        path = _save(root / "train" / "cat" / name, format="AVIF" if name == "c.avif" else "JPEG")
        _save(root / "@eaDir" / path.name, format="JPEG")
        _save(root / "train" / "@eaDir" / path.name, format="JPEG")
    for name in names[3:5]:
        (root / "train" / "cat" / name).write_bytes(b"another type")
    made = image_folder(str(root))["train"]
    assert [path.name for path in made.paths[:6]] == ["0.png", "1.png", "2.png", "a.jfif", "b.JPE", "c.avif"]
    assert made.classes == ("cat", "dog")
    assert [made[index][0].shape for index in range(6)] == [(3, 4, 6)] * 6
    words = ("data=image_folder", f"data.root={root}", "data.image_size=8", "data.batch_size=4", "data.num_workers=0")
    words += ("model=mlp", "model.hidden=[4]", "epochs=1", "device=cpu", "threads=1", "hydra.run.dir=mine")
    result = run("train", *words)
    assert result.status == 0
    assert "train: images of types that are not read here (.heic" in result.out + result.err
    assert "are skipped: 2" in result.out + result.err
    result = run("predict", "ckpt_path=mine", f"input={root}/train/cat", "output=rows.csv", "threads=1")
    assert "2 images were not predicted" in result.out + result.err


def test_classes_whose_names_are_not_utf8_are_evaluated(root, run, workdir):
    for split in ("train", "test"):
        (root / split / "cat").rename(root / split / os.fsdecode(b"caf\xe9"))
    words = (f"data.root={root}", "data.image_size=8", "data.batch_size=2", "model=mlp", "model.hidden=[4]", "epochs=1")
    words += ("data=image_folder", "device=cpu", "threads=1", "logger=none", "hydra.run.dir=mine", "data.num_workers=0")
    assert run("train", *words).status == 0
    result = run("eval", "ckpt_path=mine")
    assert (result.status, Path("mine/plots/confusion_test.png").is_file()) == (0, True), result.err


def test_links_are_followed_but_loops_add_nothing(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    _save(elsewhere / "more/z.png")
    cat = root / "train/cat"
    (cat / "more").symlink_to(elsewhere / "more")
    (cat / "again").symlink_to(elsewhere / "more")
    (cat / "up").symlink_to(root)
    (cat / "self").symlink_to(cat)
    (cat / "ring").symlink_to(cat / "ring")
    (elsewhere / "more/back").symlink_to(cat)
    assert image_folder(str(root))["train"].targets.tolist() == [0] * 4 + [1] * 3


def test_odd_file_names_survive(root):
    name = "ü ñ\n%s.png"
    _save(root / "train/cat" / name)
    train = image_folder(str(root))["train"]
    assert train.paths[3].name == name
    assert train[3][0].shape == (3, 4, 6)


def test_indices_count_from_the_end_and_stop_there(root):
    train = image_folder(str(root))["train"]
    assert train.path(-1) == train.paths[5]
    for index in (6, -7):
        with pytest.raises(IndexError):
            train[index]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: root / "gone", "data.root: .*gone does not exist"),
        (lambda root: root / "train/cat/0.png", "0.png is not a folder"),
        (lambda root: root / "train/cat", "one folder of images for each class; there are only images of no class"),
        (lambda root: (root / "e").mkdir() or root / "e", "for each class; there is none"),
        (
            lambda root: [(root / "m" / name).mkdir(parents=True) for name in ("images", "masks")] and root / "m",
            r"images and masks, and no classes\n.*experiment=segmentation",
        ),
        (lambda root: [(root / s / "bird").mkdir() for s in ("train", "test")] and root, "folder .*train/bird has no"),
        (
            lambda root: [(root / s / e).mkdir() for s in ("train", "test") for e in ("\u00e9", "e\u0301")] and root,
            "two classes of one name",
        ),
        (lambda root: _save(root / "train/bird/0.png") and root, "bird only in .*train"),
        (lambda root: _save(root / "test/bird/0.png") and root, "bird only in .*test"),
        (
            lambda root: (root / "train").rename(root / "training") and root,
            r"test but no folder 'train'.*\n.*train_folder",
        ),
    ],
)
def test_folders_that_cannot_be_a_data_set_are_reported(root, prepare, message):
    with pytest.raises(UserError, match=message):
        image_folder(str(prepare(root)))


def _colour(tmp_path: Path, image: Image.Image, suffix: str = ".png", channels: int = 3, **options) -> list[int]:
    path = tmp_path / f"image{suffix}"
    image.save(path, **options)
    tensor = read_image(path, None, channels)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (channels, image.height, image.width)
    assert tensor.is_contiguous()
    return tensor[:, 0, 0].tolist()


def _palette(*values: int) -> Image.Image:
    image = Image.new("P", (3, 2), 5)
    image.putpalette(values)
    return image


STEPS = [value for index in range(256) for value in (index, 2 * index % 256, 9)]
COLOURED = [
    *(("RGB", (9, 90, 200), suffix, [9, 90, 200]) for suffix in (".png", ".bmp", ".webp")),
    ("RGB", (100, 100, 100), ".png", [100]),
    ("L", 77, ".png", [77, 77, 77]),
    ("L", 77, ".png", [77]),
    ("1", 1, ".png", [255, 255, 255]),
    ("1", 0, ".png", [0]),
    # As JPEG: Pillow before 13 writes TIFF files of YCbCr pixels that it cannot read itself.
    ("YCbCr", (100, 128, 128), ".jpg", [100, 100, 100]),
    ("RGBA", (9, 9, 9, 0), ".png", [255, 255, 255]),
    ("RGBA", (9, 90, 200, 255), ".png", [9, 90, 200]),
    ("RGBA", (0, 0, 0, 128), ".png", [127]),
    ("LA", (9, 0), ".png", [255]),
]
DEEP = {0: 0, 257: 1, 32896: 128, 65535: 255, 385: 1, 386: 2}  # scaled to 8 bits and not cut off


@pytest.mark.parametrize(
    ("image", "suffix", "options", "expected"),
    [
        *((Image.new(mode, (16, 16), colour), suffix, {}, found) for mode, colour, suffix, found in COLOURED),
        (Image.new("RGB", (3, 2), (1, 2, 3)), ".png", {"transparency": (1, 2, 3)}, [255, 255, 255]),
        (_palette(*STEPS), ".png", {}, [5, 10, 9]),
        (_palette(*STEPS), ".gif", {}, [5, 10, 9]),
        (_palette(*[7] * 768), ".png", {"transparency": 5}, [255, 255, 255]),
        (_palette(*[7] * 768), ".png", {"transparency": bytes([255] * 5 + [0])}, [255, 255, 255]),
        *(
            (Image.fromarray(np.full((2, 3), value, dtype=np.uint16)), suffix, {}, [expected] * channels)
            for value, expected in DEEP.items()
            for suffix in (".png", ".tif")
            for channels in (1, 3)
        ),
    ],
)
def test_every_mode_becomes_rgb_or_grey_with_white_behind_what_is_transparent(
    tmp_path, image, suffix, options, expected
):
    options = options | ({"lossless": True} if suffix == ".webp" else {})
    assert _colour(tmp_path, image, suffix, len(expected), **options) == expected


def test_cmyk_jpeg_keeps_its_colour(tmp_path):
    red, green, blue = _colour(tmp_path, Image.new("RGB", (16, 16), (200, 60, 30)).convert("CMYK"), ".jpg", quality=95)
    assert abs(red - 200) < 12
    assert abs(green - 60) < 12
    assert abs(blue - 30) < 12


@pytest.mark.parametrize("values", [np.full((2, 3), 0.5, np.float32), np.full((2, 3), 70000, np.int32)])
def test_numbers_without_a_known_range_are_refused(tmp_path, values):
    Image.fromarray(values).save(tmp_path / "raw.tif")
    with pytest.raises(UserError, match=r"raw\.tif: its pixels are 32-bit"):
        read_image(tmp_path / "raw.tif", None)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_every_orientation_is_turned_upright_also_where_the_image_is_cut(tmp_path, orientation, suffix):
    pixels = np.kron(
        np.random.default_rng(0).integers(0, 256, (5, 8, 3), dtype=np.uint8), np.ones((16, 16, 1), np.uint8)
    )
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(
        tmp_path / f"turned{suffix}", exif=exif, **({"quality": 95} if suffix == ".jpg" else {})
    )
    with Image.open(tmp_path / f"turned{suffix}") as opened:
        upright = torch.from_numpy(np.array(ImageOps.exif_transpose(opened))).permute(2, 0, 1)
    assert torch.equal(read_image(tmp_path / f"turned{suffix}", None), upright)

    def corner(height, width):
        assert (height, width) == upright.shape[1:]
        return 3, 5, 32, 32

    part = read_image(tmp_path / f"turned{suffix}", 32, 3, corner)
    assert torch.equal(part, upright[:, 3:35, 5:37])
    halved = read_image(tmp_path / f"turned{suffix}", 16, 3, corner)
    assert (halved.float() - part.float().unfold(1, 2, 2).unfold(2, 2, 2).mean((3, 4))).abs().mean() < 12


def test_grey_comes_from_the_brightness_of_a_jpeg_alone(tmp_path):
    pixels = np.kron(np.random.default_rng(1).integers(0, 256, (4, 4, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
    Image.fromarray(pixels).save(tmp_path / "colour.jpg", quality=95, subsampling=0)
    with Image.open(tmp_path / "colour.jpg") as opened:
        grey = torch.from_numpy(np.array(opened.convert("L"))).float()
    assert (read_image(tmp_path / "colour.jpg", None, 1)[0].float() - grey).abs().mean() < 1


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 24), st.sampled_from([1, 3]))
def test_any_size_becomes_the_square_asked_for(tmp_path_factory, width, height, size, channels):
    path = _save(tmp_path_factory.mktemp("size") / "a.png", (10, 10, 10), (width, height))
    tensor = read_image(path, size, channels)
    assert tensor.shape == (channels, size, size)
    assert tensor.unique().tolist() == [10]


def test_resizing_takes_the_middle_and_averages(tmp_path):
    pixels = np.zeros((8, 24), dtype=np.uint8)
    pixels[:, 8:16] = np.indices((8, 8)).sum(0) % 2 * 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    tensor = read_image(tmp_path / "wide.png", 2, 1)
    assert ((tensor > 100) & (tensor < 155)).all(), "a checkerboard shrinks to grey when antialiased"
    assert torch.equal(read_image(tmp_path / "wide.png", 8, 1)[0], torch.from_numpy(pixels[:, 8:16]))


def _bad_files() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    files = {}
    for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"):
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, kind)
        files[f"half a {kind}"] = buffer.getvalue()[: len(buffer.getvalue()) // 2]
        files[f"head of a {kind}"] = buffer.getvalue()[:20]
    return files | {"empty": b"", "text": b"not an image"}


@pytest.mark.parametrize("case", _bad_files())
@pytest.mark.filterwarnings("ignore:Truncated File Read")
def test_a_truncated_or_foreign_file_is_named(tmp_path, case):
    path = tmp_path / "broken.jpg"
    path.write_bytes(_bad_files()[case])
    with pytest.raises(UserError, match=r"cannot read the image .*broken\.jpg: [^.]"):
        read_image(path, 8)
    with pytest.raises(UserError, match=r"gone\.png: no such file"):
        read_image(tmp_path / "gone.png", 8)


def test_the_message_survives_a_loader_worker(root):
    (root / "train/cat/1.png").write_bytes(b"broken")
    reader = SeededDataset(image_folder(str(root))["train"], 0)
    loader = WorkerLoader(reader, BatchPlan(torch.arange(6), 3), torch.device("cpu"), workers=1, persistent=False)
    with contextlib.closing(loader), pytest.raises(UserError, match=r"^cannot read the image .*1\.png"):
        list(loader.batches(0, 0, 2))


def test_a_pickled_data_set_reads_the_same_images(root):
    train = image_folder(str(root), image_size=4)["train"]
    copy = pickle.loads(pickle.dumps(train))
    assert copy.paths == train.paths
    assert torch.equal(copy[5][0], train[5][0])


def test_reading_draws_no_random_numbers(root):
    before = torch.get_rng_state()
    list(image_folder(str(root), image_size=3)["train"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_share_of_the_middle_can_be_cut_out(tmp_path):
    pixels = np.arange(12 * 16, dtype=np.uint8).reshape(12, 16)
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "train" / "a" / "0.png")
    train = image_folder(str(tmp_path), image_size=6, channels=1, crop_share=0.5)["train"]
    assert torch.equal(train[0][0][0], torch.from_numpy(pixels[3:9, 5:11]))


def test_a_fingerprint_follows_files_and_settings(root, monkeypatch):
    def print_of(**settings):
        return image_folder(str(root), **settings)["train"].fingerprint()

    first = print_of(image_size=4)
    assert print_of(image_size=4) == first
    others = {
        print_of(image_size=5),
        print_of(),
        print_of(image_size=4, channels=1),
        print_of(image_size=4, crop_share=0.5),
        print_of(image_size=4, max_pixels=99),
    }
    os.utime(root / "train/cat/0.png", ns=(1, 1))
    others.add(print_of(image_size=4))
    (root / "train/cat/0.png").rename(root / "train/cat/00.png")
    others.add(print_of(image_size=4))
    assert len(others | {first}) == 8
    monkeypatch.chdir(root.parent)
    assert image_folder(root.name, image_size=4)["train"].fingerprint() == print_of(image_size=4)
    gone, known = image_folder(str(root))["train"], print_of()
    (root / "train/cat/00.png").unlink()
    assert gone.fingerprint() != known


@pytest.mark.parametrize(
    ("suffix", "options"), [(".gif", {}), (".png", {}), (".tif", {}), (".webp", {"lossless": True})]
)
def test_of_an_animation_it_is_the_first_frame(tmp_path, suffix, options):
    first, second = Image.new("RGB", (5, 4), (250, 0, 0)), Image.new("RGB", (5, 4), (0, 0, 250))
    path = tmp_path / f"moving{suffix}"
    first.save(path, save_all=True, append_images=[second], **options)
    with Image.open(path) as opened:
        assert opened.n_frames == 2
    assert read_image(path, None)[:, 0, 0].tolist() == [250, 0, 0]
    assert read_image(path, 2)[:, 0, 0].tolist() == [250, 0, 0]


@pytest.mark.parametrize("suffix", [".jpg", ".gif", ".bmp"])
def test_what_a_file_is_follows_from_its_content(tmp_path, suffix):
    Image.new("RGB", (5, 4), (250, 9, 1)).save(tmp_path / "image.png")
    renamed = (tmp_path / "image.png").rename(tmp_path / f"image{suffix}")
    assert read_image(renamed, None)[:, 0, 0].tolist() == [250, 9, 1]


def test_the_memory_of_an_image_is_bounded_by_its_pixels(tmp_path):
    path = tmp_path / "large.png"
    Image.new("RGBA", (3000, 3000)).save(path)
    assert path.stat().st_size < 100_000
    with pytest.raises(
        UserError, match=r"large\.png: it has 3,000 x 3,000 = 9,000,000 pixels, and data\.max_pixels=8999999"
    ):
        read_image(path, 8, max_pixels=8_999_999)
    assert read_image(path, 8, max_pixels=9_000_000).shape == (3, 8, 8)


def test_a_run_on_folders_of_train_and_val_trains_on_all_of_train_and_says_that_it_has_not_tested(
    run, accepted, rejected, workdir
):
    for split, count in (("train", 10), ("val", 4)):
        for color, name in enumerate(("cat", "dog")):
            for number in range(count):
                _save(workdir / "images" / split / name / f"{number}.png", (color * 200, number, 0), (8, 8))
    words = ("data=image_folder", "data.root=images", "data.image_size=8", "data.num_workers=0", "model=mlp")
    words += ("model.hidden=[4]", "device=cpu", "threads=1", "logger=none", "log.curves=false", "epochs=1")
    words += ("data.batch_size=4",)
    result = accepted("train", *words, "hydra.run.dir=mine")
    assert "images (image_folder), 3x8x8, 2 classes, 20 train, 8 val\n" in result.out
    assert "not tested: there is no test split" in result.out
    summary = json.loads(Path("mine/summary.json").read_text())
    assert "test" not in summary
    assert summary["status"] == "finished"
    result = rejected("eval", "ckpt_path=mine", "split=test", "device=cpu")
    assert "split: this data has no 'test' split" in result.err
    # A checkpoint of a run that divided `train` keeps its splits, also where the data are selected again.
    asked = run("train", *words, "data.split.test=0.2", "hydra.run.dir=asked")
    assert "16 train, 8 val, 4 test" in asked.out
    resumed = accepted("train", *words[:-2], "epochs=2", "ckpt_path=asked")
    assert "16 train, 8 val, 4 test" in resumed.out
