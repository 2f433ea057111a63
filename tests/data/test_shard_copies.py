"""Copies of shards of a store on this machine: what is read has the bits of the store, whatever happens to them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from extras import needs
from s3_server import Fault, Store
from store_shards import copies_in, opened, pixels
from tar_files import encoded

from runner.base.errors import DataFailed
from runner.data.sources import copies
from runner.data.sources.shards import shards

pytestmark = needs("remote")


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


def program(text: str, store: Store, tmp_path: Path) -> list[str]:
    """The command of a program that reads a store with copies, and must close what it opens."""
    development = ("-X", "dev", "-W", "error::ResourceWarning")
    return [sys.executable, *development, "-c", text, store.url, str(tmp_path / "cache")]


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
    words = program(FULL, store, tmp_path)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["24", "0"], done.stderr
    assert [line.partition(f" in {tmp_path}")[0] for line in done.stderr.splitlines() if "warning" in line] == [
        "warning: cannot keep copies of shards"
    ]
    assert "File too large" in done.stderr


SHARED = """
import sys
from runner.data.sources.shards import shards
dataset = shards(sys.argv[1], cache_folder=sys.argv[2], cache_gb=1)["train"]
print(sum(target for _, target in map(dataset.__getitem__, range(24))))
"""


@pytest.mark.extended
@pytest.mark.slow
def test_two_jobs_share_copies(store: Store, folder: Path, tmp_path: Path) -> None:
    words = program(SHARED, store, tmp_path)
    jobs = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for job in jobs:
        out, err = job.communicate(timeout=60)
        assert out.split() == ["24"], err
        assert "Warning" not in err
    assert len(copies_in(tmp_path)) == 2
    sizes = {path.stat().st_size for path in folder.glob("*/*.tar")}
    whole = [seen for seen in store.ranges() if seen.end in sizes and seen.start == 0]
    assert len(whole) == 2 * 3 + 2, "each job reads all for its indexes, and one of them for the copies"
