"""Shards in a store: the bits of a folder, whatever the network and the store do."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from extended import some
from extras import needs
from s3_server import Fault, Store, upload
from tar_files import cls, encoded, pixels, samples, write_tar

from runner.base.errors import DataFailed, UserError
from runner.base.signals import heard
from runner.data.sources import remote
from runner.data.sources import shards as module
from runner.data.sources.shards import Shards, packed_index, shards

pytestmark = needs("remote")


def opened(store: Store, tmp_path: Path) -> dict[str, Shards]:
    """The data sets of a run, which keeps its indexes."""
    made = shards(store.url, cache_folder=str(tmp_path / "cache"))
    assert made["train"].keep_indexes() == []
    return made


def test_a_store_has_the_images_order_and_fingerprint_of_the_folder(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(f"{tmp_path.name}/classes.txt", b"a\nb\nc\n")
    local, there = shards(str(folder)), opened(store, tmp_path)
    assert {split: len(dataset) for split, dataset in there.items()} == {"train": 24, "val": 12}
    assert there["train"].classes == ("a", "b", "c")
    for split in local:
        assert there[split].fingerprint() == local[split].fingerprint()
        assert there[split].targets.tolist() == local[split].targets.tolist()
        for number in range(12):
            assert torch.equal(there[split][number][0], local[split][number][0])
    store.seen.clear()
    monkeypatch.setattr(module, "index_of", None)
    again = opened(store, tmp_path)
    assert store.ranges() == [], "the index was kept"
    assert again["train"].fingerprint() == local["train"].fingerprint()


def test_a_store_whose_lists_and_descriptions_have_other_forms_of_a_time_is_indexed(folder: Path) -> None:
    for path in folder.rglob("*.tar"):
        fsspec.filesystem("memory").pipe(f"{folder}/{path.relative_to(folder)}", path.read_bytes())
    there, local = (shards(root)["train"] for root in (f"memory:/{folder}", str(folder)))
    assert there.fingerprint() == local.fingerprint()
    assert torch.equal(there[13][0], local[13][0])
    fsspec.filesystem("memory").pipe(f"{folder}/train/012.tar", (folder / "train/000.tar").read_bytes())
    with pytest.raises(DataFailed, match="was changed or damaged after it was indexed"):
        there[13]


def test_a_store_with_a_part_of_a_pack_is_refused(store: Store, tmp_path: Path) -> None:
    for content in (b"no JSON", b'{"samples": 5}', b'{"rules": 1, "samples": {"train": 24, "val": 12}}'):
        store.put(f"{tmp_path.name}/pack.json", content)
        assert len(shards(store.url)["train"]) == 24
    store.put(f"{tmp_path.name}/pack.json", b'{"rules": 1, "samples": null}')
    with pytest.raises(UserError, match=r"s3://bucket/.* is not finished"):
        shards(store.url)


def test_an_index_beside_a_shard_spares_reading_it(store: Store, folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*/*.tar"):
        index = packed_index(path, path.stat().st_size)
        assert index.write(module.index_of(module.LocalShard.of(path), "label")) == ""
        upload(store, index.path)
    named = {"train": ["train/000.tar", "train/012.tar"], "val": "val/{024..024}.tar"}
    for arguments in ({}, named):
        assert len(shards(store.url, **arguments)["train"]) == 24
    assert store.ranges() == []
    upload(store, folder / "train" / "000.tar.index", b"damaged")
    assert len(shards(store.url)["train"]) == 24
    assert {seen.key for seen in store.ranges()} == {f"/bucket/{tmp_path.name}/train/000.tar"}


@pytest.mark.parametrize("where", ["folder", "store"])
def test_named_shards_are_read_in_the_order_given(where: str, store: Store, folder: Path) -> None:
    root = str(folder) if where == "folder" else store.url
    found = shards(root, train=["train/012.tar", "train/{000..000}.tar"])
    assert list(found) == ["train"]
    assert torch.equal(found["train"][0][0], shards(root)["train"][12][0])
    assert len(shards(root, train="train/0{1..1}{2..2}.tar")["train"]) == 12
    with pytest.raises(UserError, match=r"(cannot read the shard|there is no) .*train/013\.tar"):
        shards(root, train="train/{012..013}.tar")
    with pytest.raises(UserError, match=r"data\.dataset: the pattern train/\{012\.\.000\}\.tar has no numbers"):
        shards(root, train="train/{012..000}.tar")
    with pytest.raises(UserError, match=r"data\.dataset\.train: names no shards"):
        shards(root, val="val/024.tar")


def test_roots_that_hold_nothing_or_cannot_be_opened_are_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for root, reason in (
        (f"{store.url}/none", r"s3://bucket/.*/none/train has no files \*\.tar|has no files \*\.tar"),
        ("s3://nothing/at/all", r"has no files \*\.tar"),
        ("unheard://of", "cannot open unheard://of.*Protocol not known"),
        ("https://127.0.0.1:9/x", "cannot be listed"),
        ("https://joe:secret@127.0.0.1:9/x", "password or a query"),
        (f"{store.url}?signature=secret", "password or a query"),
        (f"{store.url}/train/000.tar", r"has no files \*\.tar"),
    ):
        with pytest.raises(UserError, match=reason):
            shards(root)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"cannot open gs://other(.|\n)*pip install 'runner\[remote\]'"):
        shards("gs://other/x")


@pytest.mark.parametrize(
    ("kind", "amount", "times"),
    [("unavailable", 0, 3), ("cut", 40, 2), ("short", 40, 2), ("flip", 40, 1), ("delay", 0.7, 1)],
)
def test_what_passes_is_tried_again(
    kind: str, amount: float, times: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states() -> Any:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    monkeypatch.setattr(remote, "_CLIENTS", {})
    before, dataset = states(), shards(store.url)["train"]
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.5)
    store.seen.clear()
    store.faults.append(Fault(kind, amount, times))
    image, target = dataset[13]
    assert torch.equal(image, pixels(13))
    assert target == 1
    assert len(store.ranges()) >= times + 1
    assert states() == before


@pytest.mark.parametrize("kind", ["unavailable", "cut", "short", "delay"])
def test_what_does_not_pass_ends_with_a_sentence(kind: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = shards(store.url)["train"]
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.2)
    store.seen.clear()
    store.faults.append(Fault(kind, 0.5))
    with pytest.raises(DataFailed, match=r"data\.root: cannot read s3://bucket/.*/train/012\.tar: .*\(6 attempts\)"):
        dataset[13]
    assert kind == "delay" or len(store.ranges()) == 6
    with pytest.raises(DataFailed, match=r"cannot read s3://bucket/.*/train/0.*\(6 attempts\)"):
        shards(store.url)


@pytest.mark.parametrize(("kind", "reason"), [("expired", "token has expired"), ("denied", "Access Denied")])
def test_what_is_refused_is_not_tried_again(kind: str, reason: str, store: Store) -> None:
    dataset = shards(store.url)["train"]
    store.seen.clear()
    store.faults.append(Fault(kind, times=1))
    with pytest.raises(DataFailed, match=rf"012\.tar: .*{reason}"):
        dataset[13]
    assert len(store.ranges()) == 1
    assert dataset[13][1] == 1, "a client with another credential goes on"


def test_a_shard_that_was_replaced_or_removed_is_not_trained_on(store: Store, folder: Path, tmp_path: Path) -> None:
    dataset, path = opened(store, tmp_path)["train"], folder / "train" / "012.tar"
    content = bytearray(path.read_bytes())
    content[content.index(encoded(13)) + 100] ^= 1
    upload(store, path, bytes(content))
    assert dataset[12][1] == 0
    with pytest.raises(UserError, match=r"012\.tar was changed or damaged after it was indexed: the image at byte"):
        dataset[13]
    upload(store, path, bytes(content)[:2048])
    with pytest.raises(UserError, match=r"012\.tar was changed .* it is another object now"):
        dataset[20]
    store.put(f"{tmp_path.name}/train/012.tar", None)
    with pytest.raises(UserError, match=r"012\.tar was changed .* it is not there any more"):
        dataset[20]
    upload(store, write_tar(path, samples(range(30, 33), cls)))
    assert len(opened(store, tmp_path)["train"]) == 15, "it is indexed again"


@pytest.mark.parametrize(
    ("length", "reason"), some([(10_000, "unexpected end|truncated"), (0, "empty")], 0, several=True)
)
def test_a_shard_that_is_no_whole_tar_is_named(length: int, reason: str, store: Store, folder: Path) -> None:
    path = folder / "train" / "012.tar"
    upload(store, path, path.read_bytes()[:length])
    with pytest.raises(UserError, match=rf"cannot read the shard s3://bucket/.*/012\.tar: .*({reason})"):
        shards(store.url)


def test_a_signal_ends_the_reading_of_whole_shards(store: Store) -> None:
    heard.append("SIGTERM")
    try:
        with pytest.raises(DataFailed, match=r"data\.root: a signal came before all of s3://bucket/.*\.tar was read"):
            shards(store.url)
    finally:
        heard.clear()


def test_http_reads_named_shards(store: Store, folder: Path, tmp_path: Path) -> None:
    root = f"http://127.0.0.1:{store.server.port}/bucket/{tmp_path.name}"
    store.faults += [Fault("denied", key=".index"), Fault("denied", key="classes.txt")]  # which are not there
    found = shards(root, train="train/{000..000}.tar", val=["val/024.tar"], cache_folder=str(tmp_path / "cache"))
    local = shards(str(folder), train="train/000.tar")["train"]
    assert found["train"].fingerprint() == local.fingerprint()
    assert torch.equal(found["train"][3][0], local[3][0])
    store.faults += [Fault("flip", 40, times=1), Fault("unavailable", times=1), Fault("cut", 40, times=1)]
    assert torch.equal(found["train"][3][0], local[3][0])
    with pytest.raises(UserError, match=r"there is no http://.*/001\.tar"):
        shards(root, train="train/{000..001}.tar")
    with pytest.raises(UserError, match=r"cannot be listed.(.|\n)*data\.dataset\.train"):
        shards(root)


@pytest.mark.parametrize("protocol", ["http", "s3"])
def test_of_an_answer_without_end_only_what_was_asked_for_is_read(
    protocol: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = store.url if protocol == "s3" else f"http://127.0.0.1:{store.server.port}/bucket/{tmp_path.name}"
    dataset = shards(root, train="train/000.tar")["train"]
    store.faults.append(Fault("endless"))
    for read, reason in (
        (lambda: dataset[3], "does not answer requests of ranges"),
        (lambda: remote.content_of(f"{root}/train/000.tar"), "has more than 1,000 bytes"),
    ):
        monkeypatch.setattr(remote, "_LARGEST", 1000)
        store.poured = 0
        with pytest.raises(DataFailed, match=rf"000\.tar {reason}"):
            read()
        assert store.poured < 2**24, "buffers of the connection, and not all 32 MiB"
        store.faults[0] = Fault("endless", key="000.tar")


def test_http_follows_redirects_on_the_same_host_alone(store: Store, tmp_path: Path) -> None:
    root = f"http://127.0.0.1:{store.server.port}/bucket/{tmp_path.name}"
    store.faults.append(Fault("renamed", times=1, key="000.tar"))
    dataset = shards(root, train="train/000.tar")["train"]
    assert torch.equal(dataset[3][0], pixels(3))
    store.faults.append(Fault("moved", key="000.tar"))
    for read in (lambda: dataset[3], lambda: shards(root, train="train/000.tar")):
        store.seen.clear()
        with pytest.raises(DataFailed, match=r"000\.tar redirects to another host, localhost, which is not followed"):
            read()
        assert {seen.key for seen in store.seen} == {f"/bucket/{tmp_path.name}/train/000.tar"}
        assert len(store.seen) <= 3, "nothing is asked for again, or elsewhere"
