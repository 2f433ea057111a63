"""Which checkpoints stay on the disk, and that one always does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults import slow_disk
from runner.checkpoint import find
from runner.checkpoint.file import read
from runner.checkpoint.manager import CheckpointManager

Make = Callable[..., dict[str, Any]]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
            found = find.load(str(folder), folder, prefer)
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
