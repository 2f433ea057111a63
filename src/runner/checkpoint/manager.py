"""Which checkpoints of a run are on the disk: the newest few, `last` and `best`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from runner.checkpoint import file
from runner.checkpoint.disk_space import require_space, size_of
from runner.checkpoint.find import SUFFIXES, step_files


def step_stem(global_step: int) -> str:
    """File name of the checkpoint of a step, without its suffix."""
    return f"step_{global_step:010d}"


class CheckpointManager:
    """Writes checkpoints into a folder and deletes those that are no longer wanted.

    `last` and `best` are links to files of single steps, so a state is written once whatever it is called.

    Args:
        folder: where checkpoints go.
        keep: how many of the newest to keep, apart from the best.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.folder / f"last{SUFFIXES[0]}"

    @property
    def best(self) -> Path:
        """The best checkpoint."""
        return self.folder / f"best{SUFFIXES[0]}"

    def save(self, contents: dict[str, Any], global_step: int, is_best: bool) -> Path:
        """Write the state after `global_step` steps, point `last` (and `best`) at it, then delete what is too old.

        Raises:
            UserError: if there is no room, or it cannot be written; what was there before is untouched.
        """
        path = self.folder / f"{step_stem(global_step)}{SUFFIXES[0]}"
        require_space(self.folder, size_of(contents))
        file.write(path, contents)
        # Nothing older is deleted before the new one was read back whole.
        file.verify(path)
        self.make_last(path)
        if is_best:
            self.make_best(path)
        others = [old for old in step_files(self.folder) if old != path]
        # Later steps are of a future that is computed again after resuming from an older checkpoint.
        abandoned = [old for old in others if old.stem >= path.stem]
        for old in abandoned + others[len(abandoned) :][self.keep - 1 :]:
            _delete(old)
        return path

    def make_last(self, path: Path) -> None:
        """Make a checkpoint of this run, or of the one that it continues, the newest one.

        Raises:
            UserError: if it cannot be written.
        """
        self._name(path, self.last)

    def make_best(self, path: Path) -> None:
        """Make a checkpoint the best one, as `make_last` does."""
        self._name(path, self.best)

    def _name(self, path: Path, name: Path) -> None:
        if not (name.is_file() and path.samefile(name)):
            file.link(path, name)
        for suffix in SUFFIXES[1:]:  # of an older format, which this one replaces
            _delete(name.with_suffix(suffix))


def _delete(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
