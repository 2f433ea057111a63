"""Which checkpoints stay on the disk, which one `ckpt_path=` finds, what it falls back to, and how it says so."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nested import names

from faults import slow_disk
from runner.base.errors import UserError
from runner.checkpoint.file import DamagedCheckpoint, read
from runner.checkpoint.find import load, newest_run
from runner.checkpoint.manager import CheckpointManager

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def runs(tmp_path: Path, contents: Make) -> Path:
    """Two runs: `old` with steps 10 (best), 20, 30 and `new` with step 5, which was written last."""
    for number, (name, steps) in enumerate({"old": (10, 20, 30), "new": (5,)}.items()):
        folder = tmp_path / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        manager = CheckpointManager(folder, 2)
        for step in steps:
            manager.save(contents(step), step, is_best=step in (10, 5))
        os.utime(manager.last, (1000 + number, 1000 + number))
    return tmp_path / "runs"


def found(runs: Path, ckpt_path: str | Path, prefer: str = "last") -> tuple[str, int, int]:
    got = load(str(ckpt_path), runs, prefer)
    return got.path.name, got.contents["position"]["global_step"], len(got.warnings)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_a_file_a_run_and_names_are_found(runs: Path) -> None:
    folder = runs / "old" / "checkpoints"
    assert found(runs, folder / "step_0000000020.safetensors") == ("step_0000000020.safetensors", 20, 0)
    assert found(runs, runs / "old") == ("last.safetensors", 30, 0)
    assert found(runs, runs / "old", "best") == ("best.safetensors", 10, 0)
    assert found(runs, folder) == ("last.safetensors", 30, 0)
    assert found(runs, "last") == ("last.safetensors", 5, 0)
    assert found(runs, "last", "best") == ("best.safetensors", 5, 0)
    assert found(runs, "best") == ("best.safetensors", 5, 0)


def test_the_newest_run_is_the_one_that_started_or_was_saved_last_in_sweeps_too(runs: Path, contents: Make) -> None:
    assert newest_run(runs).name == "new"
    job = runs / "sweeps" / "2026-01-01" / "3" / "checkpoints"
    job.mkdir(parents=True)
    CheckpointManager(job, 1).save(contents(1), 1, is_best=False)
    assert newest_run(runs).name == "3"
    shutil.rmtree(job)
    for name, started in (("old", "2026-11-20T12:00:00.000001+00:00"), ("new", "2026-11-20T12:00:00+00:00")):
        (runs / name / "summary.json").write_text(json.dumps({"started": started}))
    assert newest_run(runs).name == "old"


def test_a_checkpoint_that_is_a_named_pipe_is_no_run_with_a_checkpoint(runs: Path) -> None:
    (runs / "pipe" / "checkpoints").mkdir(parents=True)
    os.mkfifo(runs / "pipe" / "checkpoints" / "last.safetensors")
    assert newest_run(runs).name == "new"
    with pytest.raises(UserError, match="not a regular file"):
        read(runs / "pipe" / "checkpoints" / "last.safetensors")


def test_a_damaged_last_falls_back_to_the_newest_valid_one_and_says_so(runs: Path) -> None:
    folder = runs / "old" / "checkpoints"
    damage(folder / "last.safetensors")
    got = load(str(runs / "old"), runs, "last")
    assert got.path.name == "step_0000000030.safetensors", "the same step under its other name is whole"
    damage(folder / "step_0000000030.safetensors")
    got = load(str(runs / "old"), runs, "last")
    assert got.contents["position"]["global_step"] == 20
    for warning, name in zip(got.warnings, ("last", "step_0000000030"), strict=True):
        assert f"{name}.safetensors: " in warning
        assert "damaged" in warning


def test_a_damaged_file_that_was_named_is_an_error_that_offers_another(runs: Path) -> None:
    folder = runs / "old" / "checkpoints"
    damage(folder / "step_0000000030.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"0030\.safetensors.*damaged\n.*ckpt_path=.*last\.safetensors"):
        load(str(folder / "step_0000000030.safetensors"), runs, "last")
    damage(folder / "best.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"best\.safetensors"):
        load(str(runs / "old"), runs, "best")


def test_a_run_with_nothing_whole_names_every_file(runs: Path) -> None:
    for path in (runs / "new" / "checkpoints").iterdir():
        damage(path)
    with pytest.raises(DamagedCheckpoint, match=r"no checkpoint of this run is whole:\n.*last.safetensors.*\n.*step_"):
        load(str(runs / "new"), runs, "last")


@pytest.mark.parametrize(
    ("ckpt_path", "folder", "words"),
    [
        ("last", "nothing", "no run with a checkpoint"),
        ("last", "begun", r"no run with a checkpoint in .*begun: the newest, .*2026-01-01_00-00-00, has none"),
        ("empty", "runs", "has no checkpoint"),
        ("best", "runs", r"has no best checkpoint\n.*ckpt_path=last"),
        ("runs/olde", "runs", r"there is no .*olde; did you mean '.*old'\?\n.*allowed: a checkpoint file"),
        ("runs/old/checkpoints/step_000000020.safetensors", "runs", r"did you mean '.*step_0000000020\.safetensors'"),
        ("/dev/zero", ".", r"ckpt_path: /dev/zero is not a regular file\n    allowed: "),
        ("pipe.pt", ".", r"ckpt_path: pipe\.pt is not a regular file\n    allowed: "),
        ("link.pt", ".", r"ckpt_path: link\.pt is not a regular file\n    allowed: "),
        ("links.pt", ".", r"ckpt_path: there is no links\.pt\n    allowed: "),
    ],
)
def test_what_is_not_there_or_no_file_is_a_sentence_and_not_suggested(
    ckpt_path: str, folder: str, words: str, tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "begun" / "2026-01-01_00-00-00" / "checkpoints").mkdir(parents=True)
    (tmp_path / "begun" / "2026-01-01_00-00-00" / "overrides.yaml").touch()
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (runs / "new" / "checkpoints" / "best.safetensors").unlink()
    os.mkfifo("pipe.pt")
    Path("link.pt").symlink_to("gone.pt")
    with pytest.raises(UserError, match=words):
        load(ckpt_path, tmp_path / folder, "last")


@pytest.mark.parametrize("named", ["run", "file"])
def test_a_newer_format_is_told_and_no_older_file_is_taken_instead(named: str, runs: Path, forge_header: Any) -> None:
    folder = runs / "old" / "checkpoints"
    (folder / "last.safetensors").unlink()
    forge_header(folder / "last.safetensors", {"format": "3", "shards": "3"}, {})
    with pytest.raises(UserError, match=r"last\.safetensors: has format 3, and this version reads up to 2: update"):
        load(str(folder / "last.safetensors" if named == "file" else runs / "old"), runs, "last")


def step_of(path: Path) -> int:
    return int(read(path)["position"]["global_step"])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_few_are_kept_and_last_and_best_outlive_them(keep: int, tmp_path: Path, contents: Make) -> None:
    manager = CheckpointManager(tmp_path, keep)
    for step in range(1, 7):
        manager.save(contents(step), step, is_best=step in (1, 2))
    newest = [f"step_{step:010d}.safetensors" for step in range(7 - keep, 7)]
    assert names(tmp_path) == sorted(["best.safetensors", "last.safetensors", *newest])
    assert step_of(manager.last) == 6
    assert step_of(manager.best) == 2


def test_the_same_step_saved_twice_is_one_checkpoint(tmp_path: Path, contents: Make) -> None:
    manager = CheckpointManager(tmp_path, 2)
    manager.save(contents(5), 5, is_best=True)
    manager.save(contents(5, classes=["new"]), 5, is_best=False)
    assert names(tmp_path) == ["best.safetensors", "last.safetensors", "step_0000000005.safetensors"]
    assert read(manager.last)["classes"] == ["new"]
    assert step_of(manager.best) == 5


def test_steps_of_an_abandoned_future_are_removed(tmp_path: Path, contents: Make) -> None:
    manager = CheckpointManager(tmp_path, 3)
    for step in (10, 20, 30):
        manager.save(contents(step), step, is_best=False)
    manager.save(contents(15), 15, is_best=False)
    assert names(tmp_path) == ["last.safetensors", "step_0000000010.safetensors", "step_0000000015.safetensors"]
    assert step_of(manager.last) == 15


def killed_at(count: int, manager: CheckpointManager, made: dict[str, Any], step: int) -> bool:
    """Save in a process that SIGKILLs itself at an operation; whether it came that far."""
    pid = os.fork()
    if pid == 0:
        slow_disk.dying(count)()
        try:
            manager.save(made, step, is_best=True)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_kill_at_any_moment_of_saving_leaves_the_last_reported_checkpoint_or_a_newer_one(
    tmp_path: Path, contents: Make
) -> None:
    for count in range(1, 100):
        folder = tmp_path / str(count) / "checkpoints"
        folder.mkdir(parents=True)
        manager = CheckpointManager(folder, 1)
        manager.save(contents(1), 1, is_best=True)
        killed = killed_at(count, manager, contents(2), 2)
        for prefer in ("last", "best"):
            found = load(str(folder), folder, prefer)
            assert found.path.name == f"{prefer}.safetensors", "the name that people look for is gone"
            assert found.contents["position"]["global_step"] in (1, 2)
            assert found.warnings == []
        restarted = CheckpointManager(folder, 1)
        restarted.save(contents(3), 3, is_best=False)
        assert not [name for name in names(folder) if name.endswith(".tmp")]
        if not killed:
            break
    assert count > 10, "too few moments were tried"
    assert not killed
