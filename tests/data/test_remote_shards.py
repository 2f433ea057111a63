"""Shards in a store: the bits of a folder, whatever the network and the store do."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from extended import MARK, some
from extras import needs
from PIL import Image
from s3_server import Fault, Store, s3_store
from tar_files import cls, encoded, samples, write_tar

from runner.base.errors import DataFailed, UserError
from runner.base.signals import heard
from runner.data.sources import copies, remote
from runner.data.sources import shards as module
from runner.data.sources.shards import Shards, packed_index, shards

pytestmark = needs("remote")

SMALL = (
    "data=shards", "data.image_size=8", "data.batch_size=4", "model=mlp", "epochs=2", "scheduler=constant", "logger=none",
    "evaluate.test=false", "name=x",
)  # fmt: skip


@pytest.fixture(scope="session")
def server() -> Iterator[Store]:
    with s3_store() as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of twelve images to train on, and one to validate."""
    for split, starts in (("train", (0, 12)), ("val", (24,))):
        for start in starts:
            write_tar(tmp_path / "shards" / split / f"{start:03d}.tar", samples(range(start, start + 12), cls))
    return tmp_path / "shards"


@pytest.fixture
def store(server: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The server with the shards, at a URL for this test; clients do not wait before they try again."""
    for name, value in {**server.environment(), "XDG_CACHE_HOME": str(tmp_path / "user")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "DELAY_S", 0.01)
    server.url = f"s3://bucket/{tmp_path.name}"
    for path in folder.rglob("*.tar"):
        upload(server, path)
    server.faults.clear()
    server.seen.clear()
    return server


def upload(store: Store, path: Path, content: bytes | None = None) -> None:
    key = f"{store.url.rpartition('/')[2]}/{path.parent.name}/{path.name}"
    store.put(key, path.read_bytes() if content is None else content)


def opened(store: Store, tmp_path: Path, **arguments: Any) -> dict[str, Shards]:
    """The data sets of a run, which keeps its indexes."""
    made = shards(store.url, cache_folder=str(tmp_path / "cache"), **arguments)
    assert made["train"].keep_indexes() == []
    return made


def copies_in(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "shards").iterdir())


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
    monkeypatch.setattr(module, "index_of_file", None)
    again = opened(store, tmp_path)
    assert store.ranges() == [], "the index was kept"
    assert again["train"].fingerprint() == local["train"].fingerprint()


def test_a_store_with_a_part_of_a_pack_is_refused(store: Store, tmp_path: Path) -> None:
    for content, finished in (
        (b"no JSON", True),
        (b'{"samples": {"train": 24, "val": 12}}', True),
        (b'{"samples": null}', False),
    ):
        store.put(f"{tmp_path.name}/pack.json", content)
        if finished:
            assert len(shards(store.url)["train"]) == 24
            continue
        with pytest.raises(UserError, match=r"s3://bucket/.* is not packed to its end"):
            shards(store.url)


def test_an_index_beside_a_shard_spares_reading_it(store: Store, folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*/*.tar"):
        index = packed_index(path, path.stat().st_size)
        assert index.write(module.index_of(path, "label")) == ""
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
    with pytest.raises(UserError, match=r"data\.dataset: names a shard twice"):
        shards(root, train="train/{000..000}.tar", val="train/000.tar")
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
    "fault",
    [
        Fault("unavailable", times=3),
        Fault("cut", 40, times=2),
        Fault("short", 40, times=2),
        Fault("flip", 40, times=1),
        Fault("delay", 0.7, times=1),
    ],
    ids=lambda fault: fault.kind,
)
def test_what_passes_is_tried_again(fault: Fault, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CLIENTS", {})
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    dataset = shards(store.url)["train"]
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.5)
    store.seen.clear()
    store.faults.append(fault)
    expected = int(fault.times) + 1
    image, target = dataset[13]
    assert torch.equal(image, pixels(13))
    assert target == 1
    assert len(store.ranges()) >= expected
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]


def pixels(number: int) -> torch.Tensor:
    """The image of a number, without a store."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(encoded(number))))).permute(2, 0, 1)


@pytest.mark.parametrize("kind", ["unavailable", "cut", "short", "delay"])
def test_what_does_not_pass_ends_with_a_sentence(kind: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = shards(store.url)["train"]
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.2)
    store.seen.clear()
    store.faults.append(Fault(kind, 0.5))
    with pytest.raises(DataFailed, match=r"data\.root: cannot read s3://bucket/.*/train/012\.tar: .*\(6 attempts\)"):
        dataset[13]
    assert kind == "delay" or len(store.ranges()) == 6


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


def test_a_store_that_fails_at_the_start_is_named(store: Store) -> None:
    store.faults.append(Fault("unavailable"))
    with pytest.raises(DataFailed, match=r"cannot read s3://bucket/.*/train/0.*Please try again.*\(6 attempts\)"):
        shards(store.url)


def test_copies_spare_the_store_and_damaged_or_removed_ones_are_made_again(store: Store, tmp_path: Path) -> None:
    dataset = opened(store, tmp_path, cache_gb=1)["train"]
    images = [dataset[number][0] for number in range(24)]
    assert len(copies_in(tmp_path)) == 2, "of what was read"
    store.seen.clear()
    assert all(torch.equal(dataset[number][0], images[number]) for number in range(24))
    assert store.ranges() == []
    for path in copies_in(tmp_path):
        path.write_bytes(path.read_bytes().replace(encoded(13)[50:60], bytes(10)))
    assert torch.equal(dataset[13][0], images[13])
    assert torch.equal(dataset[14][0], images[14])
    assert [seen.end is not None and seen.end > 20_000 for seen in store.ranges()] == [False, True]
    shutil.rmtree(tmp_path / "cache")
    assert torch.equal(dataset[0][0], images[0])
    assert len(copies_in(tmp_path)) == 1


def test_the_copies_that_were_used_last_stay_below_the_limit(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (folder / "train" / "000.tar").stat().st_size
    monkeypatch.setattr(copies, "_FULL_S", 0.0)
    dataset = shards(store.url, cache_folder=str(tmp_path / "cache"), cache_gb=1.5 * size / 1e9)["train"]
    own = tmp_path / "cache" / "shards" / "000.tar"
    own.parent.mkdir(parents=True)
    own.write_bytes(bytes(size))
    old = time.time() - 1000
    os.utime(own, (old, old))
    assert dataset[0][1] == 0
    (kept,) = set(copies_in(tmp_path)) - {own}
    store.seen.clear()
    assert (dataset[1][1], dataset[12][1]) == (1, 0)
    assert len(store.ranges()) == 1, "one shard is kept, and was used a moment ago; the other is read in the store"
    assert set(copies_in(tmp_path)) == {own, kept}
    os.utime(kept, (old, old))
    assert dataset[12][1] == 0
    (other,) = set(copies_in(tmp_path)) - {own}
    assert other != kept, "other files stay"


def test_a_copy_grows_with_each_read_and_no_read_waits_for_all_of_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "BLOCK", 10_000)
    dataset = opened(store, tmp_path, cache_gb=1)["train"]
    store.seen.clear()
    for number in range(5):
        assert torch.equal(dataset[number][0], pixels(number))
    whole = [(seen.start, seen.end) for seen in store.ranges() if seen.end and seen.start is not None]
    blocks = [(start, end) for start, end in whole if start % 10_000 == 0]
    assert [start for start, _ in blocks] == list(range(0, 10_000 * len(blocks), 10_000))
    assert len(blocks) >= 3
    assert [path.suffix for path in copies_in(tmp_path)] == [".copy"]
    store.seen.clear()
    assert torch.equal(dataset[0][0], pixels(0))
    assert store.ranges() == []
    store.faults.append(Fault("unavailable"))
    with pytest.raises(DataFailed):
        dataset[12]
    assert [path.suffix for path in copies_in(tmp_path)] == [".copy"], "a part of one that failed is removed"


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "wb")
file.write(bytes(100_000))
file.flush()
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_shard_that_another_process_downloads_is_read_in_the_store_until_that_process_ends(
    store: Store, tmp_path: Path
) -> None:
    dataset = opened(store, tmp_path, cache_gb=1)["train"]
    assert dataset[0][1] == 0
    name = copies_in(tmp_path)[0]
    name.unlink()
    words = [sys.executable, "-c", HOLD, str(name.with_suffix(".part"))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        store.seen.clear()
        assert torch.equal(dataset[1][0], pixels(1))
        assert [seen.end - seen.start for seen in store.ranges() if seen.end and seen.start] == [len(encoded(1))]
        holder.kill()
    assert torch.equal(dataset[1][0], pixels(1))
    assert copies_in(tmp_path) == [name]


FULL = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
from runner.data.sources.shards import shards
dataset = shards(sys.argv[1], cache_folder=sys.argv[2], cache_gb=1)["train"]
print(sum(target for _, target in map(dataset.__getitem__, range(24))), len(list(Path(sys.argv[2]).rglob("*.*"))))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one shard and a half."""
    place = tmp_path / "cache" / "shards"
    place.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=40k", "none", str(place)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_told_once_and_the_store_is_read(
    store: Store, tmp_path: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = opened(store, tmp_path, cache_gb=1)["train"]
    assert [dataset[number][1] for number in range(24)] == [number % 3 for number in range(24)]
    assert [path.suffix for path in small_disk.iterdir()] == [".copy"]
    said = capfd.readouterr().err.splitlines()
    assert said == [
        f"warning: cannot keep copies of shards in {small_disk}: No space left on device; the store is read instead"
    ]


@pytest.mark.extended
def test_a_copy_that_cannot_be_written_is_told_once_and_the_store_is_read(store: Store, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-X",
        "dev",
        "-W",
        "error::ResourceWarning",
        "-c",
        FULL,
        store.url,
        str(tmp_path / "cache"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["24", "0"], done.stderr
    assert [line.partition(f" in {tmp_path}")[0] for line in done.stderr.splitlines() if "warning" in line] == [
        "warning: cannot keep copies of shards"
    ]
    assert "File too large" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    some(
        [
            ("data.num_workers=2",),
            ("data.num_workers=2", "data.dataset.cache_gb=1"),
            ("data.num_workers=0",),
            ("data.num_workers=1", "data.dataset.cache_gb=1"),
            ("data.num_workers=1", "data.dataset.cache_gb=0.00001"),
        ],
        0,
        1,
    ),
    ids=" ".join,
)
def test_a_training_from_a_store_has_the_bits_of_one_from_a_folder(
    words: tuple[str, ...], store: Store, folder: Path, tmp_path: Path, accepted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "BLOCK", 10_000)  # a copy takes several reads, which workers begin
    expected = accepted("train", *SMALL, f"data.root={folder}").summary["weights_sha256"]
    result = accepted("train", *SMALL, f"data.root={store.url}", *words)
    assert result.summary["weights_sha256"] == expected
    assert "warning" not in (result.out + result.err).lower()
    kept = list((tmp_path / "user").rglob("*.copy"))
    assert len(kept) == 3 * (words[-1] == "data.dataset.cache_gb=1"), "in the user's folder for caches"
    store.seen.clear()
    evaluated = accepted("eval", f"ckpt_path={result.directory}", "split=val")
    assert len(store.ranges()) >= 12, "a checkpoint does not say that copies are to be kept"
    assert "warning" not in (evaluated.out + evaluated.err).lower()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(2, 0), pytest.param((0, 2), marks=MARK)], ids=str)
def test_a_killed_run_goes_on_with_other_workers_and_reads_what_follows_only(
    workers: tuple[int, int], store: Store, accepted: Any, killed: Callable[..., Path]
) -> None:
    words = (*SMALL, f"data.root={store.url}", "checkpoint.every_steps=2", "evaluate.every_epochs=2")
    accepted("train", *words, "max_steps=1")  # so that the indexes are there
    store.seen.clear()
    whole = accepted("train", *words, "data.num_workers=0")
    all_of_it = Counter(store.ranges())
    directory = killed(5, *words, f"data.num_workers={workers[0]}")
    store.seen.clear()
    resumed = accepted("train", f"ckpt_path={directory}", "callbacks=none", f"data.num_workers={workers[1]}")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    rest = Counter(store.ranges())
    assert rest - all_of_it == Counter()
    missing = all_of_it - rest
    assert sorted(missing.values()) == [1] * 16, "the samples of the four steps before the checkpoint, and no others"
    assert all(seen.end > 1000 for seen in missing if seen.end)


def test_a_command_line_names_the_shards(folder: Path, accepted: Any) -> None:
    names = (
        'data.dataset.train="train/{012..012}.tar"',
        "data.dataset.val=[train/000.tar]",
        "data.dataset.test=val/024.tar",
    )
    named = accepted("train", *SMALL, f"data.root={folder}", *names, "evaluate.test=true").summary
    (folder / "train" / "000.tar").rename(folder / "other.tar")
    (folder / "val").rename(folder / "test")
    (folder / "val").mkdir()
    (folder / "other.tar").rename(folder / "val" / "000.tar")
    listed = accepted("train", *SMALL, f"data.root={folder}", "evaluate.test=true").summary
    assert named["weights_sha256"] == listed["weights_sha256"]
    assert named["test"] == listed["test"]


def test_keeping_copies_of_local_files_is_said_to_have_no_effect(folder: Path, accepted: Any) -> None:
    said = accepted("train", *SMALL, f"data.root={folder}", "data.dataset.cache_gb=1", "max_steps=1")
    assert "data.dataset.cache_gb has no effect: the data are on this machine" in said.out + said.err


@pytest.mark.extended
def test_a_run_that_is_killed_three_times_in_an_epoch_has_the_bits_of_one_that_is_not(
    store: Store, folder: Path, workdir: Path, accepted: Any, killed: Callable[..., Path]
) -> None:
    whole = accepted("train", *SMALL, f"data.root={folder}")
    words = (*SMALL, "checkpoint.every_steps=1", "data.dataset.cache_gb=1", f"data.root={store.url}")
    for step, workers, before in ((2, 2, ""), (4, 0, "after_2"), (5, 1, "after_4")):
        more = (f"ckpt_path={before}",) if before else ()
        killed(step, *words, *more, f"data.num_workers={workers}").rename(workdir / f"after_{step}")
    resumed = accepted("train", "ckpt_path=after_5", "callbacks=none", "data.num_workers=2", f"data.root={folder}")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_a_store_as_they_read_a_folder(ranks: int, store: Store, folder: Path, accepted: Any) -> None:
    words = (*SMALL, f"devices={ranks}", "device=cpu", "data.batch_size=6", "data.num_workers=1")
    expected = accepted("train", *words, f"data.root={folder}").summary["weights_sha256"]
    found = accepted("train", *words, f"data.root={store.url}", "data.dataset.cache_gb=1")
    assert found.summary["weights_sha256"] == expected


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=MARK)])
def test_a_store_that_fails_ends_the_run_which_goes_on_later(
    workers: int, store: Store, folder: Path, run: Any, accepted: Any
) -> None:
    expected = accepted("train", *SMALL, f"data.root={folder}").summary["weights_sha256"]
    words = (
        *SMALL,
        f"data.root={store.url}",
        f"data.num_workers={workers}",
        "data.on_error=skip",
        "checkpoint.every_steps=1",
    )
    stopped = accepted("train", *words, "max_steps=7")
    store.faults.append(Fault("unavailable", key="train"))
    store.seen.clear()
    failed = run("train", f"ckpt_path={stopped.directory}", "max_steps=null")
    assert failed.status == 1
    assert "cannot read s3://bucket/" in failed.err
    assert "Traceback" not in failed.err
    assert "(6 attempts)" in failed.err
    store.faults.clear()
    resumed = accepted("train", f"ckpt_path={stopped.directory}", "max_steps=null")
    assert resumed.summary["weights_sha256"] == expected
    assert "skipped" not in resumed.summary, "an image that the store did not give is not a bad sample"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=MARK)])
def test_a_signal_ends_a_run_that_waits_for_the_store(
    workers: int, store: Store, monkeypatch: pytest.MonkeyPatch, workdir: Path
) -> None:
    monkeypatch.setattr(remote, "DELAY_S", 0.5)
    words = (*SMALL, f"data.root={store.url}", f"data.num_workers={workers}", "epochs=1000", "checkpoint.every_steps=1")
    run = forked.ForkedProgram(("train", *words))
    deadline = time.monotonic() + 60
    while len(store.ranges()) < 150 and time.monotonic() < deadline:
        time.sleep(0.01)
    store.faults.append(Fault("unavailable"))
    time.sleep(1)
    os.kill(run.pid, signal.SIGTERM)
    began = time.monotonic()
    status, (out, err) = run.wait(60), run.communicate()
    assert status == 75, out + err
    assert "stopped by SIGTERM; resume with" in out + err
    assert time.monotonic() - began < (20 if workers else 2)


def test_a_signal_ends_the_reading_of_whole_shards(store: Store, tmp_path: Path) -> None:
    heard.append("SIGTERM")
    try:
        for arguments in ({}, {"cache_gb": 1, "cache_folder": str(tmp_path / "cache")}):
            with pytest.raises(
                DataFailed, match=r"data\.root: a signal came before all of s3://bucket/.*\.tar was read"
            ):
                shards(store.url, **arguments)
    finally:
        heard.clear()


SHARED = """
import sys
from runner.data.sources.shards import shards
dataset = shards(sys.argv[1], cache_folder=sys.argv[2], cache_gb=1)["train"]
print(sum(target for _, target in map(dataset.__getitem__, range(24))))
"""


@pytest.mark.extended
@pytest.mark.slow
def test_two_jobs_share_copies(store: Store, folder: Path, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-X",
        "dev",
        "-W",
        "error::ResourceWarning",
        "-c",
        SHARED,
        store.url,
        str(tmp_path / "cache"),
    ]
    jobs = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for job in jobs:
        out, err = job.communicate(timeout=60)
        assert out.split() == ["24"], err
        assert "Warning" not in err
    assert len(copies_in(tmp_path)) == 2
    sizes = {path.stat().st_size for path in folder.glob("*/*.tar")}
    whole = [seen for seen in store.ranges() if seen.end in sizes and seen.start == 0]
    assert len(whole) == 2 * 3 + 2, "each job reads all for its indexes, and one of them for the copies"


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
