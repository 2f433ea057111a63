"""The checkpoints of a run on the disk: the newest few, `last` and `best`; and whether there is room for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from runner.base.errors import UserError
from runner.checkpoint import file
from runner.checkpoint.find import SUFFIX, step_files
from runner.checkpoint.structure import identity
from runner.distributed.sharding import local
from runner.instrument.nested import tensors_in

_MIB = 2**20


def size_of(value: Any) -> int:
    """Bytes of the tensors in nested containers, tied ones once."""
    tensors = {identity(local(leaf)): leaf for leaf in tensors_in(value)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def require_space(folder: Path, size: int) -> None:
    """Raise a `UserError` if a file of `size` bytes does not fit beside what is there."""
    free = _free(folder)
    # A failed write would cost the time of a checkpoint, and may take the last space of other programs
    if free < size:
        raise UserError(
            "checkpoint",
            f"the disk that holds {folder} has {free / _MIB:,.0f} MiB free, and the next one takes "
            f"{size / _MIB:,.0f} MiB; earlier checkpoints are untouched",
            "free some space, a smaller checkpoint.keep, or another output_root",
        )


def scarce(folder: Path, size: int, keep: int) -> str:
    """A warning if the `keep` newest checkpoints of `size` bytes, the best and the next one may not fit, or an empty string."""
    free = _free(folder)
    if free >= size * (keep + 2):
        return ""
    return (
        f"checkpoints may not fit: the disk that holds {folder} has {free / _MIB:,.0f} MiB free, and up to "
        f"{keep + 2} of {size / _MIB:,.0f} MiB exist at a time; free some space, or set a smaller checkpoint.keep"
    )


def _free(folder: Path) -> float:
    """Bytes free on the disk that holds a folder; without end where the file system does not tell, as writing will."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return float("inf")


def _step_name(global_step: int) -> str:
    return f"step_{global_step:010d}{SUFFIX}"


class CheckpointManager:
    """Writes checkpoints into a folder and deletes those that are no longer wanted.

    `last` and `best` are links to files of single steps, so a state is written once whatever it is called. The `keep` newest
    are kept apart from the best. One process of a run `writes`; its other ranks only read.
    """

    def __init__(self, folder: Path, keep: int, writes: bool = True) -> None:
        self.folder, self.keep, self.writes = folder, keep, writes
        self.last, self.best = folder / f"last{SUFFIX}", folder / f"best{SUFFIX}"
        for leftover in folder.glob(".*.tmp") if writes else ():
            leftover.unlink()

    def save(self, contents: dict[str, Any], global_step: int, is_best: bool) -> Path:
        """Write the state after `global_step` steps, point `last` (and `best`) at it, then delete what is too old.

        Raises `UserError` if there is no room, or it cannot be written; what was there before is untouched.
        """
        path = self.folder / _step_name(global_step)
        # Nothing older is deleted before the new one was read back whole.
        require_space(self.folder, size_of(contents))
        file.write(path, contents)
        file.verify(path)
        # Links are moved before old files go, so that `last` and `best` always name a whole file.
        self.name(path, self.last)
        if is_best:
            self.name(path, self.best)
        others = [old for old in step_files(self.folder) if old != path]
        # Later steps are of a future that is computed again after resuming from an older checkpoint.
        abandoned = [old for old in others if old.stem >= path.stem]
        for old in abandoned + others[len(abandoned) :][self.keep - 1 :]:
            old.unlink(missing_ok=True)
        return path

    def name(self, path: Path, name: Path) -> None:
        """Make a checkpoint of this run, or of the one that it continues, `last` or `best`; raises as `link`."""
        if self.writes and not (name.is_file() and path.samefile(name)):
            file.link(path, name)

    def carry_best(self, source: Path, global_step: int) -> bool:
        """Make the checkpoint of the best evaluation, at `global_step`, the best one of a run that is resumed from `source`.

        The best one beside an older checkpoint may be of a later evaluation, which the resumed run does not know of. Returns
        whether there was a valid one.
        """
        # The best file may be gone, but the resumed checkpoint or one of its step may be the same state
        for path in (source.with_name(self.best.name), source, source.with_name(_step_name(global_step))):
            try:
                found = file.read(path, later=True)
            except UserError:
                continue
            # A file named best may be of another evaluation, so the step decides
            if found["position"]["global_step"] == global_step:
                self.name(path, self.best)
                return True
        return False
