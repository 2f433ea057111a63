"""Packed data: the bytes that are written, how they are read, and that a killed pack ends with those of an undisturbed one."""

from __future__ import annotations

import io
import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from extended import some
from forked import ForkedProgram
from PIL import Image
from tar_files import members, packed_order, picture

from runner.base.errors import UserError
from runner.data.packing import Packer
from runner.data.sampler import AllSamples
from runner.data.sources.digits import digits
from runner.data.sources.folders import ImageFolder, image_folder
from runner.data.sources.shards import shards

LOCK = ".pack.json.lock"
UNCHANGED = ("000.JPG", "001.png", "002.png")


def noise(number: int, size: tuple[int, int] = (16, 12), kind: str = "PNG", **options: Any) -> bytes:
    pixels = np.random.default_rng(number).integers(256, size=(size[1], size[0], 3), dtype=np.uint8)
    return picture(pixels, kind, **options)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of 20 images for training and 3 for validation; every third one is a JPEG."""
    for split, count in (("train", 20), ("val", 3)):
        for place, name in enumerate(("cat", "dog")):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                kind, extension = ("JPEG", "JPG") if number % 3 == 0 else ("PNG", "png")
                (folder / f"{number:03d}.{extension}").write_bytes(noise(1000 * place + number, kind=kind))
    return tmp_path / "photos"


@pytest.fixture
def pack(accepted: Callable[..., Any], photos: Path) -> Callable[..., str]:
    """Pack the photos: `pack("output=out")`; returns what was printed."""

    def call(*words: str) -> str:
        done = accepted("pack", "data=image_folder", f"data.root={photos}", "shard_samples=8", *words)
        return done.out + done.err

    return call


def content(folder: Path) -> dict[str, bytes]:
    """The files of a pack."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_each_file_is_copied_with_its_class_and_all_splits_are_packed(pack: Any, photos: Path, workdir: Path) -> None:
    said = pack("output=out")
    assert said.splitlines()[-1] == "out"
    assert "6 shards, 46 samples" in said
    assert (workdir / "out" / "classes.txt").read_text() == "cat\ndog\n"
    for split, shard_count in (("train", 5), ("val", 1)):
        files = image_folder(str(photos))[split]
        tars = sorted((workdir / "out" / split).glob("*.tar"))
        assert [path.name for path in tars] == [f"{number:06d}.tar" for number in range(shard_count)]
        found, numbers = members(*tars), []
        for (image, file), (label, number) in zip(found[::2], found[1::2], strict=True):
            index = int(image[:9])
            original = files.path(index)
            assert (image, label) == (f"{index:09d}.{original.suffix[1:].lower()}", f"{index:09d}.cls")
            assert file == original.read_bytes()
            assert int(number) == files.targets[index]
            numbers.append(index)
        assert sorted(numbers) == list(range(len(files)))
        assert (numbers == sorted(numbers)) == (split == "val"), "only training samples are shuffled"
    path = workdir / "out" / "train" / "000000.tar"
    assert {label for name, label in members(path) if name.endswith("cls")} == {b"0", b"1"}, "a shard has all classes"
    with tarfile.open(path) as tar:
        for member in tar:
            assert (member.mtime, member.uid, member.gid, member.uname, member.mode) == (0, 0, 0, "", 0o644)
    subprocess.run(["tar", "-xf", path, "-C", workdir], check=True)
    assert all((workdir / name).read_bytes() == file for name, file in members(path))


def test_packed_images_have_the_pixels_of_the_files_and_of_arrays(pack: Any, accepted: Any, photos: Path) -> None:
    pack("output=out")
    packed, loose = shards("out", 8), image_folder(str(photos), 8)
    accepted("pack", "data=digits", "output=numbers")
    pairs = {f"out/{split}": (packed[split], dataset) for split, dataset in loose.items()}
    pairs["numbers/train"] = shards("numbers", channels=1)["train"], digits()["train"]
    for folder, (found, dataset) in pairs.items():
        order = packed_order(folder)
        assert sorted(order) == list(range(len(dataset)))
        for place in range(0, len(order), len(order) // 30 or 1):
            assert torch.equal(found[place][0], dataset[order[place]][0])
            assert found[place][1] == dataset[order[place]][1]


def test_the_printed_command_trains(pack: Any, accepted: Any) -> None:
    tiny = ("model=mlp", "max_steps=2", "logger=none", "threads=1")
    numbers = accepted("pack", "data=digits", "output='my numbers (8)'").out
    for said in (pack("output=out", "data.image_size=8"), numbers):
        command = shlex.split(said.splitlines()[-2].partition("; ")[2])
        assert command[:4] == ["python", "-m", "runner", "train"]
        assert accepted(*command[3:], *tiny).summary["global_step"] == 2


def test_larger_images_become_upright_jpegs_and_others_are_copied(pack: Any, photos: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(4, 64))
    grey.save(photos / "val" / "cat" / "grey.png")
    for name, file in {
        "photo.jpg": noise(1, (64, 32), "JPEG", exif=exif),
        "palette.gif": noise(2, (50, 40), "GIF"),
        "turned.tif": noise(4, (64, 32), "TIFF", exif=exif),
        "at_limit.png": noise(3, (24, 10)),
    }.items():
        (photos / "val" / "cat" / name).write_bytes(file)
    pack("output=out", "max_side=24")
    files = image_folder(str(photos))["val"]
    sizes = {}
    for name, file in members(*Path("out/val").glob("*.tar"))[::2]:
        original = files.path(int(name[:9]))
        with Image.open(io.BytesIO(file)) as image:
            sizes[original.name] = (image.format, image.mode, image.size)
            assert not image.getexif()
        assert (file == original.read_bytes()) == (original.name in ("at_limit.png", *UNCHANGED))
    assert sizes.keys() == {*UNCHANGED, "photo.jpg", "turned.tif", "palette.gif", "grey.png", "at_limit.png"}
    assert sizes["photo.jpg"] == ("JPEG", "RGB", (12, 24))
    assert sizes["turned.tif"] == ("JPEG", "RGB", (12, 24))
    assert sizes["palette.gif"] == ("JPEG", "RGB", (24, 19))
    assert sizes["grey.png"] == ("JPEG", "L", (24, 2))
    assert sizes["at_limit.png"] == ("PNG", "RGB", (24, 10))


def test_quality_is_that_of_the_jpegs(pack: Any) -> None:
    sizes = []
    for quality in (95, 20):
        pack(f"output=out{quality}", "max_side=10", f"quality={quality}")
        sizes.append(sum(len(file) for name, file in members(Path(f"out{quality}/train/000000.tar"))))
    assert sizes[0] > sizes[1] + 500


def test_bytes_depend_on_data_and_options_alone_and_the_order_on_the_seed(pack: Any) -> None:
    record = json.loads(pack("output=one", "workers=1", "json=true").splitlines()[0])
    size = sum(path.stat().st_size for path in Path("one").rglob("*.tar"))
    assert record.pop("command")
    assert record == {"shards": 6, "samples": 46, "bytes": size, "skipped": 0, "output": "one"}
    pack("output=many", "workers=3")
    pack("output=other", "seed=1")
    assert content(Path("one")) == content(Path("many"))
    one, other = (members(*sorted(Path(name, "train").glob("*.tar"))) for name in ("one", "other"))
    assert one != other
    assert sorted(one) == sorted(other)


def test_shards_are_packed_again_with_other_options(pack: Any, accepted: Any) -> None:
    pack("output=one")
    accepted("pack", "data=shards", "data.root=one", "output=two", "shard_samples=40", "seed=5")
    first, second = (sorted(file for _, file in members(*Path(name).glob("train/*.tar"))) for name in ("one", "two"))
    assert first == second


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (["shard_samples=9"], "shard_samples", "is 9, and out was begun with 8"),
        (["max_side=10"], "max_side", "is 10, and out was begun with null"),
        (["quality=50"], "quality", "is 50, and out was begun with 95"),
        (["seed=1"], "seed", "is 1, and out was begun with 0"),
        (["data.root=moved"], "output", "out was begun with other data"),
        (["data=digits"], "output", "out was begun with other data"),
        (["output=photos"], "output", "photos has other files"),
        (["output=null"], "output", "is missing"),
        (["experiment=segmentation", "data=digits", "data.images=['0']"], "data", "are more than an image and its class"),
        (["data=digits", "output=s3://bucket/new"], "output", "is s3://bucket/new"),
        (["data=synthetic", "data.dataset.kind=regression", "output=new"], "data.dataset", "is not a class number"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_does_not_go_with_what_was_begun_is_refused(
    pack: Any, rejected: Any, photos: Path, words: list[str], key: str, reason: str
) -> None:
    pack("output=out")
    before = content(Path("out"))
    shutil.copytree(photos, "moved")
    (Path("moved") / "train" / "cat" / "001.png").write_bytes(noise(77))
    first = ("data=image_folder", f"data.root={photos}", "shard_samples=8", "output=out")
    keys = {word.partition("=")[0] for word in words}
    said = rejected("pack", *(word for word in first if word.partition("=")[0] not in keys), *words).err
    assert f"{key}: " in said
    assert reason in said
    assert content(Path("out")) == before
    assert not Path("new").exists() or not content(Path("new"))


def test_shards_that_are_not_finished_are_not_trained_on(pack: Any) -> None:
    pack("output=out")
    manifest = json.loads(Path("out/pack.json").read_text())
    assert manifest["samples"] == {"train": 40, "val": 6}
    Path("out/train/000003.tar").unlink()
    for samples, reason in ((manifest["samples"], "has 32 of the 40 images of 'train'"), (None, "is not finished")):
        Path("out/pack.json").write_text(json.dumps(manifest | {"samples": samples}))
        with pytest.raises(UserError, match=reason) as raised:
            shards("out")
        assert raised.value.problems[0].key == "data.root"
    assert "5 of 6 shards are finished already" in pack("output=out")
    assert len(shards("out")["train"]) == 40


def test_unreadable_images_stop_a_pack_or_are_skipped(pack: Any, rejected: Any, photos: Path) -> None:
    (photos / "train" / "dog" / "007.png").write_text("no image")
    said = rejected("pack", "data=image_folder", f"data.root={photos}", "output=out").err
    assert "007.png: its content is not an image of a known type" in said
    assert not list(Path("out").rglob("*.tmp"))
    said = pack("output=some", "data.on_error=skip")
    assert "1 image skipped" in said
    assert "007.png" in said
    assert len(shards("some")["train"]) == 39
    (photos / "train" / "cat" / "000.png").write_text("no image")
    assert "2 images skipped" in pack("output=more", "data.on_error=skip")
    assert "2 images skipped" in pack("output=single", "data.on_error=skip", "shard_samples=1")
    assert len(shards("single")["train"]) == 39, "a shard of which all is skipped has no images"
    words = ("data=image_folder", f"data.root={photos}", "data.on_error=skip", "data.max_skipped=0.01")
    said = rejected("pack", *words, "output=few").err
    assert "data.max_skipped: is 0.01, and 2 of 41 images cannot be read" in said
    with pytest.raises(UserError, match="is not finished"):
        shards("few")
    for path in (photos / "val").rglob("*.*"):
        path.write_text("no image")
    refused = rejected("pack", *words[:3], "data.max_skipped=1", "output=none")
    assert re.search(r"data\.max_skipped: is 1.*, and (\d+) of \1 images cannot be read in 'val'", refused.err)
    assert "its content is not an image of a known type" in refused.out + refused.err


class TopRows(ImageFolder):
    """A data set of a part of each file."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image[:, :6], target


def test_a_data_set_that_changes_what_it_reads_is_packed_as_it_reads(photos: Path) -> None:
    files = sorted(photos.glob("train/*/*.png"))
    parts: Any = {"train": (TopRows(files, [0] * len(files), ["a"]), AllSamples(len(files)))}
    data = SimpleNamespace(max_pixels=10**6, on_error="raise")
    config: Any = SimpleNamespace(seed=0, shard_samples=10, max_side=None, quality=95, data=data)
    packer = Packer(parts, photos, config)
    assert Image.open(io.BytesIO(packer.sample("train", 0)["png"])).height == 6


@pytest.fixture
def begun(photos: Path, workdir: Path) -> Callable[[str], ForkedProgram]:
    """Start a pack in another process, in shards of one sample."""
    return lambda output: ForkedProgram(
        ["pack", "data=image_folder", f"data.root={photos}", "shard_samples=1", f"output={output}", "workers=2"]
    )


def wait_for(program: ForkedProgram, count: int) -> None:
    """Wait for a number of shards, or the end of the pack."""
    while program.poll() is None and len(list(Path("out").glob("train/*.tar"))) < count:
        time.sleep(0.001)


@pytest.mark.parametrize("kills", some([3, 20], 0))
def test_a_pack_that_is_killed_and_goes_on_has_the_bytes_of_an_undisturbed_one(
    begun: Callable[[str], ForkedProgram], kills: int
) -> None:
    assert begun("whole").wait(120) == 0
    random.seed(kills)
    struck = 0
    for turn in range(kills):
        program = begun("out")
        wait_for(program, 1 + 38 * turn // kills)
        time.sleep(random.uniform(0, 0.02))
        program.kill()
        struck += program.wait(60) == -signal.SIGKILL
    assert struck >= kills // 2
    assert begun("out").wait(120) == 0
    assert content(Path("out")) == content(Path("whole"))


def test_ctrl_c_and_the_death_of_a_worker_end_a_pack_with_a_sentence_and_the_command_goes_on(
    begun: Callable[[str], ForkedProgram],
) -> None:
    for status, sentence in (
        (130, r"interrupted with \d+ of 46 shards; the same command goes on"),
        (1, "error: workers: a process that packs was killed"),
    ):
        finished = len(list(Path("out").glob("train/*.tar")))
        program = begun("out")
        wait_for(program, finished + 3)
        workers = psutil.Process(program.pid).children()
        assert len(workers) == 2, "workers=2"
        if status == 130:
            program.send_signal(signal.SIGINT)
        else:
            workers[0].kill()
        assert program.wait(60) == status
        out, err = program.communicate()
        said = err if status == 1 else out + err
        assert re.search(sentence, said), said
        assert "Traceback" not in said
        assert not list(Path("out").rglob("*.tmp"))
    assert begun("out").wait(120) == 0
    assert begun("whole").wait(120) == 0
    assert content(Path("out")) == content(Path("whole"))
