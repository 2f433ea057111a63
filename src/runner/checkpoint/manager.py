"""Which checkpoints of a run are on the disk: the newest few, `last` and `best`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from runner.checkpoint import file
from runner.checkpoint.disk_space import require_space, size_of
from runner.checkpoint.find import step_files


def step_name(global_step: int) -> str:
    """File name of the checkpoint of a step."""
    return f"step_{global_step:010d}.pt"


class CheckpointManager:
    """Writes checkpoints into a folder and deletes those that are no longer wanted.

    `last.pt` and `best.pt` are links to files of single steps, so a state is written once whatever it is called.

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
        return self.folder / "last.pt"

    @property
    def best(self) -> Path:
        """The best checkpoint."""
        return self.folder / "best.pt"

    def save(self, contents: dict[str, Any], global_step: int, is_best: bool) -> Path:
        """Write the state after `global_step` steps, point `last` (and `best`) at it, then delete what is too old.

        Raises:
            UserError: if there is no room, or it cannot be written; what was there before is untouched.
        """
        path = self.folder / step_name(global_step)
        require_space(self.folder, size_of(contents))
        file.write(path, contents)
        # Nothing older goes before the new one was read back whole.
        file.verify(path)
        file.link(path, self.last)
        if is_best:
            file.link(path, self.best)
        files = step_files(self.folder)
        # Later steps than this one are left from a future that is computed anew after resuming from an older checkpoint.
        abandoned = [old for old in files if old.name > path.name]
        for old in abandoned + [old for old in files if old not in abandoned][self.keep :]:
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
        return path
