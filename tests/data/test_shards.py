"""Images in tar files: what is read, what is refused, and that nothing else than what was indexed is trained on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tar_files import Members, cls, encoded, pixels, samples, write_tar

from runner.base.errors import UserError
from runner.data.sources import shards as module
from runner.data.sources.listing import IndexFile
from runner.data.sources.shards import Shards, shards


@pytest.fixture
def opened(root: str, tmp_path: Path) -> Callable[[], dict[str, Shards]]:
    """Opens the data sets of a run, which keeps its indexes."""

    def call() -> dict[str, Shards]:
        made = shards(root, cache_folder=str(tmp_path / "cache"))
        assert made["train"].keep_indexes() == []
        return made

    return call


def indexed(path: Path) -> dict[str, torch.Tensor]:
    return module.index_of(module.LocalShard.of(path), "label")


def index_beside(path: Path) -> IndexFile:
    return module.packed_index(path, path.stat().st_size)


def flipped(path: Path, number: int) -> bytes:
    """The content of a shard with another byte in the image of a number."""
    content = bytearray(path.read_bytes())
    content[content.index(encoded(number)) + 100] ^= 1
    return bytes(content)


def test_images_and_classes_come_in_the_order_of_shards_and_a_second_start_reads_no_shard(
    opened: Any, root: str, folder: Path, put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened()["train"].classes == (), "numbers are their names"
    put(folder / "classes.txt", b"a\nb\nc\n")
    whole = shards(str(folder))
    monkeypatch.setattr(module, "index_of", None)
    found = opened()
    assert {split: len(dataset) for split, dataset in found.items()} == {"train": 24, "val": 12}
    assert found["train"].classes == ("a", "b", "c")
    for number in range(24):
        image, target = found["train"][number]
        assert torch.equal(image, pixels(number))
        assert target == number % 3
    assert torch.equal(found["train"][-1][0], found["train"][23][0])
    assert found["val"].targets.tolist() == [0, 1, 2] * 4
    for split, dataset in found.items():
        assert dataset.fingerprint() == whole[split].fingerprint()


def test_json_labels_class_names_other_formats_and_further_files(tmp_path: Path) -> None:
    def members() -> Members:
        yield "a/0.seg.png", encoded(7)  # a mask comes first, and is not the image
        yield "a/0.jpg", encoded(0)
        yield "a/0.json", json.dumps({"kind": 1, "label": 0}).encode()
        yield "a/0.txt", b"a caption"
        yield "a/" + "long" * 60 + ".png", encoded(1)
        yield "a/" + "long" * 60 + ".json", json.dumps({"kind": 0}).encode()
        yield "readme.md", b"of no sample"

    write_tar(tmp_path / "000.tar", members(), tarfile.GNU_FORMAT)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    found = shards(str(tmp_path), label="kind")["train"]
    assert found.classes == ("cat", "dog")
    assert [target for _, target in (found[0], found[1])] == [1, 0]
    assert found[0][0].shape == (3, 16, 16)


def test_a_byte_that_changed_after_indexing_is_found_when_the_image_is_read(
    opened: Any, folder: Path, put: Any
) -> None:
    dataset, path = opened()["train"], folder / "train" / "012.tar"
    put(path, flipped(path, 13))
    assert dataset[12][1] == 0
    with pytest.raises(UserError, match=r"012\.tar was changed or damaged after it was indexed: the image at byte"):
        dataset[13]
    with pytest.raises(UserError, match="cannot read the image"):
        opened()["train"][13]  # it is indexed again
    put(path, write_tar(path, samples(range(30, 33), cls)).read_bytes())
    assert len(opened()["train"]) == 15


@pytest.mark.parametrize("root", ["folder"], indirect=True)
def test_a_label_that_changed_is_seen_also_by_a_cache_of_decoded_images(opened: Any, folder: Path) -> None:
    before, path = opened()["train"], folder / "train" / "012.tar"
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"1" + bytes(511), b"0" + bytes(511), 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = opened()["train"]
    assert after.targets.tolist() != before.targets.tolist()
    assert after.fingerprint() != before.fingerprint()


@pytest.mark.parametrize("root", ["folder"], indirect=True)
def test_an_index_with_a_flipped_bit_is_not_used(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = opened()["train"].targets.tolist()
    for path in (tmp_path / "cache").iterdir():
        content = bytearray(path.read_bytes())
        for place in range(len(content) - 100, len(content), 8):
            content[place] ^= 1
        path.write_bytes(content)
    assert opened()["train"].targets.tolist() == labels
    monkeypatch.setattr(module, "index_of", None)
    assert opened()["train"].targets.tolist() == labels, "it is written again"


def test_an_index_beside_a_shard_is_used_until_the_size_of_the_shard_changes(
    root: str, folder: Path, put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, every = shards(root)["train"], sorted(folder.glob("*/*.tar"))
    for path in every:
        beside = index_beside(path)
        put(beside.path, beside.content(indexed(path)))
        os.utime(path, (0, 0))  # as in a copy, which is older than its index
    named = {"train": ["train/000.tar", "train/012.tar"], "val": "val/{024..024}.tar"}
    with monkeypatch.context() as patched:
        patched.setattr(module, "index_of", None)
        for found in (shards(root)["train"], shards(root, **named)["train"]):
            assert found.fingerprint() == before.fingerprint()
            assert torch.equal(found[13][0], before[13][0])
    put(every[1], write_tar(every[1], samples(range(30, 36), cls)).read_bytes())
    put(index_beside(every[0]).path, b"damaged")
    read, real = list[Any](), module.index_of
    monkeypatch.setattr(module, "index_of", lambda shard, *rest: read.append(shard) or real(shard, *rest))
    assert len(shards(root)["train"]) == 18
    assert len(read) == 2, "the shard that has changed and that of the damaged index, of three"


@pytest.mark.parametrize("case", ["column", "length", "outside", "shape", "pipe", "device"])
def test_an_index_that_cannot_be_that_of_its_shard_is_not_used(folder: Path, case: str) -> None:
    expected, path = shards(str(folder))["train"].targets.tolist(), folder / "train" / "000.tar"
    index, beside = indexed(path), index_beside(path)
    if case == "pipe":
        os.mkfifo(beside.path)
    elif case == "device":
        beside.path.symlink_to("/dev/zero")
    else:
        other = index["offsets"] + 2**40 if case == "outside" else index["offsets"][: 0 if case == "shape" else 1]
        changed = index | {"offsets": other[0] if case == "length" else other}
        beside.write({name: column for name, column in changed.items() if case != "column" or name != "labels"})
    os.utime(path, (0, 0))
    assert shards(str(folder))["train"].targets.tolist() == expected


def test_names_of_shards_and_classes_are_bounded(folder: Path) -> None:
    with pytest.raises(UserError, match="names more than 262,144 shards"):
        shards(str(folder), train="{0..999}-{0..999}-{0..999}.tar")
    os.mkfifo(folder / "classes.txt")
    with pytest.raises(UserError, match=r"cannot read .*classes\.txt: it is not a regular file"):
        shards(str(folder))


def long_names(tar: bytes) -> bytes:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1
    return (header.tobuf(tarfile.GNU_FORMAT) + b"a".ljust(512, b"\0")) * 1000 + tar


def damaged_number(tar: bytes) -> bytes:
    header = tarfile.TarInfo("a.png")
    header.pax_headers = {"GNU.sparse.size": "many", "GNU.sparse.map": "0,x"}
    return header.tobuf(tarfile.PAX_FORMAT) + tar


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda tar: tar[: len(tar) // 2], "truncated"),
        (lambda tar: tar[: tar.rindex(encoded(11))], "unexpected end"),
        (lambda tar: tar + tar, "something follows the end"),
        (lambda tar: b"", "empty"),
        (lambda tar: b"no tar at all" * 100, "invalid header"),
        (long_names, "nested too deeply"),
        (damaged_number, "invalid literal"),
    ],
    ids=["cut", "cut in an image", "two", "empty", "foreign", "long names", "number"],
)
def test_a_file_that_is_no_whole_tar_is_named(
    root: str, folder: Path, put: Any, content: Callable[[bytes], bytes], reason: str
) -> None:
    path = folder / "train" / "000.tar"
    put(path, content(path.read_bytes()))
    with pytest.raises(UserError, match=rf"cannot read the shard {re.escape(root)}/.*000\.tar: .*({reason})"):
        shards(root)


def test_named_shards_are_read_in_the_order_given(root: str) -> None:
    found = shards(root, train=["train/012.tar", "train/{000..000}.tar"])
    assert list(found) == ["train"]
    assert torch.equal(found["train"][0][0], shards(root)["train"][12][0])
    assert len(shards(root, train="train/0{1..1}{2..2}.tar")["train"]) == 12
    for names, reason in (
        ({"train": "train/{012..013}.tar"}, r"(cannot read the shard|there is no) .*train/013\.tar"),
        ({"train": "train/{012..000}.tar"}, r"data\.dataset: the pattern train/\{012\.\.000\}\.tar has no numbers"),
        ({"val": "val/024.tar"}, r"data\.dataset\.train: names no shards"),
    ):
        with pytest.raises(UserError, match=reason):
            shards(root, **names)


NO_NUMBERS = [("cls", text) for text in (b"dog", b"1_0", b"-1", b"9" * 20)]
NO_NUMBERS += [("json", b"{}"), ("json", b"{"), ("txt", b"1")]
DOTS = [("0.v2.JPG", "0.v2.cls"), ("0.v2.png", "0.cls")]
PICTURE, NUMBER = ("0.png", encoded(0)), ("0.cls", b"0")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        *(([*samples([4], lambda _, label=label: label)], "sample 000004 has no class number") for label in NO_NUMBERS),
        ([("0.json", b"[1]"), PICTURE], "no class number"),
        ([PICTURE, NUMBER, NUMBER, PICTURE], "twice"),
        ([PICTURE, NUMBER, ("1.png", encoded(1)), ("1.cls", b"0"), ("0.cls", b"1")], "twice"),
        ([PICTURE, ("0.jpg", encoded(0)), NUMBER], "two images"),
        *(([*samples([1], cls), (image, b""), (label, b"0")], rf"{image} is the image of no.*first dot") for image, label in DOTS),
        ([PICTURE, NUMBER, ("0.v2.png", b""), ("0.v2.cls", b"0")], r"0\.v2\.png is the image of no.*first dot"),
        ([PICTURE, NUMBER, ("0.v2.png", b""), ("0.v2.json", b"{}")], r"0\.v2\.png is the image of no.*first dot"),
        ([*samples([1], cls), ("0.heic", b""), NUMBER], r"0\.heic is an image of a type that is not read"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_samples_that_could_be_mistaken_are_refused(tmp_path: Path, members: Members, reason: str) -> None:
    write_tar(tmp_path / "0.tar", members)
    with pytest.raises(UserError, match=rf"^data\.root: cannot read the shard .*/0\.tar: .*{reason}"):
        shards(str(tmp_path))


def test_links_and_sparse_files_are_refused_and_hidden_files_are_skipped(tmp_path: Path) -> None:
    link = tarfile.TarInfo("1.png")
    link.type, link.linkname = tarfile.LNKTYPE, "0.png"
    thumbnail = [("@eaDir/0.jpg/SYNOFILE_THUMB_M.jpg", b"x")]
    write_tar(
        tmp_path / "a" / "0.tar",
        [*thumbnail, ("._0.png", b"x"), ("0.cls", b"0"), ("._0.cls", b"x"), ("0.png", encoded(0))],
    )
    (tmp_path / "a" / "._0.tar").write_text("")
    assert shards(str(tmp_path / "a"))["train"].targets.tolist() == [0]
    with tarfile.open(tmp_path / "a" / "0.tar", "a") as tar:
        tar.addfile(link)
    with pytest.raises(UserError, match=r"0\.tar: 1\.png is a link or a sparse file"):
        shards(str(tmp_path / "a"))
    (tmp_path / "0.cls").write_text("0")
    with (tmp_path / "0.png").open("wb") as file:
        file.seek(2**20)
        file.write(b"x" * 4096)
    (tmp_path / "b").mkdir()
    subprocess.run(["tar", "-S", "-C", tmp_path, "-cf", tmp_path / "b" / "0.tar", "0.cls", "0.png"], check=True)
    with pytest.raises(UserError, match=r"0\.tar: 0\.png is a link or a sparse file"):
        shards(str(tmp_path / "b"))


@pytest.mark.parametrize("other", ["train//000.tar", "train/../val/../train/000.tar", "link.tar"])
def test_a_shard_of_two_splits_is_refused_however_it_is_spelled(folder: Path, other: str) -> None:
    (folder / "link.tar").symlink_to(folder / "train" / "000.tar")
    with pytest.raises(UserError, match=r"data\.dataset: names a shard twice"):
        shards(str(folder), train="train/{000..000}.tar", val=other)


def test_folders_without_shards_shards_without_images_and_too_few_names_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match=r"has no files \*\.tar"):
        shards(str(tmp_path / "nothing"))
    (folder / "classes.txt").write_text("one\n")
    with pytest.raises(UserError, match=r"class 2.* only 1 line"):
        shards(str(folder))
    for members in ([("0.txt", b"")], []):
        write_tar(tmp_path / "0.tar", members)
        with pytest.raises(UserError, match=r"0\.tar: it has no images"):
            shards(str(tmp_path))
    for names in (b"a\nb\n\n", b"a\nb\na\n", b"\xff\xfe"):
        (folder / "classes.txt").write_bytes(names)
        with pytest.raises(UserError, match=r"classes\.txt"):
            shards(str(folder))
