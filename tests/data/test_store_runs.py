"""Trainings from a store: the bits of those from a folder, whatever the network and the store do."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from extended import MARK, some
from extras import needs
from s3_server import Fault, Store
from tar_files import SMALL

import runner
from runner.base.errors import UserError
from runner.data.sources import remote

pytestmark = needs("remote")


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
