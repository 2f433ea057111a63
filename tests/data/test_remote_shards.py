"""Shards in a store, and trainings from it: the bits of a folder, whatever the network and the store do."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import fsspec
import numpy as np
import pytest
import torch
from extended import MARK, some
from extras import needs
from s3_server import Fault, Store, upload
from tar_files import SMALL, in_memory, pixels

import runner
from runner.base.errors import DataFailed, UserError
from runner.base.signals import heard
from runner.data.sources import remote
from runner.data.sources.shards import shards

pytestmark = needs("remote")


def test_a_store_whose_lists_and_descriptions_have_other_forms_of_a_time_is_indexed(folder: Path) -> None:
    there, local = (shards(root)["train"] for root in (in_memory(folder), str(folder)))
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
    dataset, path = shards(store.url)["train"], folder / "train" / "012.tar"
    upload(store, path, path.read_bytes()[:2048])
    with pytest.raises(UserError, match=r"012\.tar was changed .* it is another object now"):
        dataset[20]
    store.put(f"{tmp_path.name}/train/012.tar", None)
    with pytest.raises(UserError, match=r"012\.tar was changed .* it is not there any more"):
        dataset[20]


def test_a_signal_ends_the_reading_of_whole_shards(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    content = remote._content
    heard.append("SIGTERM")  # of an earlier run, which counts no more
    try:
        store.faults.append(Fault("unavailable", times=1))
        assert len(shards(store.url)["train"]) == 24
        monkeypatch.setattr(remote, "_BLOCK", 512)
        monkeypatch.setattr(remote, "_content", lambda *range: (heard.append("SIGTERM"), content(*range))[1])
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


@pytest.mark.slow
@pytest.mark.parametrize("workers", some([2, 0, 4], 0))
def test_a_training_from_a_store_has_the_bits_of_one_from_a_folder(
    workers: int, store: Store, folder: Path, accepted: Any
) -> None:
    expected = accepted("train", *SMALL, f"data.root={folder}").summary["weights_sha256"]
    result = accepted("train", *SMALL, f"data.root={store.url}", f"data.num_workers={workers}")
    assert result.summary["weights_sha256"] == expected
    said = [line for line in (result.out + result.err).splitlines() if "CPU cores" not in line]
    assert "warning" not in "".join(said).lower()
    store.seen.clear()
    evaluated = accepted("eval", f"ckpt_path={result.directory}", "split=val", f"data.root={store.url}")
    assert len(store.ranges()) >= 12
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
    resumed = accepted(
        "train", f"ckpt_path={directory}", "callbacks=none", f"data.root={store.url}", f"data.num_workers={workers[1]}"
    )
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    rest = Counter(store.ranges())
    assert rest - all_of_it == Counter()
    missing = all_of_it - rest
    assert sorted(missing.values()) == [1] * 16, "the samples of the four steps before the checkpoint, and no others"
    assert all(seen.end > 1000 for seen in missing if seen.end)


@pytest.mark.slow
def test_the_address_of_a_store_comes_from_the_command_line_and_never_from_a_file(
    store: Store, tmp_path: Path, accepted: Any, rejected: Any
) -> None:
    root = f"data.root=http://127.0.0.1:{store.server.port}/bucket/{tmp_path.name}"
    names = ("data.dataset.train=train/000.tar", "data.dataset.val=val/024.tar")
    words = (*SMALL, root, *names, "data.num_workers=0", "max_steps=2")
    directory = accepted("train", *words).directory
    given, verbs = f"ckpt_path={directory}", ("eval split=val", "predict input=val", "train max_steps=3", "find-lr")
    store.seen.clear()
    for command in (*verbs, "inspect what=errors", "check", "profile", "bench vary.threads=[1]", "pack output=packed"):
        verb, *more = command.split()
        said = rejected(verb, given, *more)
        found = re.search(r"the same on the command line, if [\w ]+: (.+)", said.out + said.err)
        assert found, said.out + said.err
        assert shlex.split(found[1]) == [root], command
        assert store.seen == [], command
    for call in (runner.evaluate, lambda checkpoint: runner.train(f"ckpt_path={checkpoint}")):
        with pytest.raises(UserError, match=re.escape(root)):
            call(directory)
    assert len(runner.load(directory).classes) == 3, "nothing is read from the store"
    assert store.seen == []
    accepted("eval", given, root, "split=val")
    accepted("train", *words, "resume=auto")
    assert accepted("train", given, root, "max_steps=3").summary["global_step"] == 3


def test_a_command_line_names_the_shards(folder: Path, accepted: Any) -> None:
    words = ("train", *SMALL, f"data.root={folder}", "evaluate.test=true")
    names = {"train": '"train/{012..012}.tar"', "val": "[train/000.tar]", "test": "val/024.tar"}
    named = accepted(*words, *(f"data.dataset.{split}={some}" for split, some in names.items())).summary
    (folder / "train" / "000.tar").rename(folder / "other.tar")
    (folder / "val").rename(folder / "test")
    (folder / "val").mkdir()
    (folder / "other.tar").rename(folder / "val" / "000.tar")
    listed = accepted(*words).summary
    assert named["weights_sha256"] == listed["weights_sha256"]
    assert named["test"] == listed["test"]


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_a_store_as_they_read_a_folder(ranks: int, store: Store, folder: Path, accepted: Any) -> None:
    words = (*SMALL, f"devices={ranks}", "device=cpu", "data.batch_size=6", "data.num_workers=1")
    expected = accepted("train", *words, f"data.root={folder}").summary["weights_sha256"]
    found = accepted("train", *words, f"data.root={store.url}")
    assert found.summary["weights_sha256"] == expected


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=MARK)])
def test_a_store_that_fails_ends_the_run_which_goes_on_later(
    workers: int, store: Store, folder: Path, run: Any, accepted: Any
) -> None:
    expected = accepted("train", *SMALL, f"data.root={folder}").summary["weights_sha256"]
    words = (*SMALL, f"data.root={store.url}", f"data.num_workers={workers}", "data.on_error=skip")
    stopped = accepted("train", *words, "checkpoint.every_steps=1", "max_steps=7")
    store.faults.append(Fault("unavailable", key="train"))
    store.seen.clear()
    failed = run("train", f"ckpt_path={stopped.directory}", "max_steps=null", f"data.root={store.url}")
    assert failed.status == 1
    assert "cannot read s3://bucket/" in failed.err
    assert "Traceback" not in failed.err
    assert "(6 attempts)" in failed.err
    store.faults.clear()
    resumed = accepted("train", f"ckpt_path={stopped.directory}", "max_steps=null", f"data.root={store.url}")
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
