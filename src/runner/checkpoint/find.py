"""Which file `ckpt_path=` means, and what to take when it is damaged."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from runner.checkpoint.file import DamagedCheckpoint, read
from runner.config.errors import UserError, nearest
from runner.config.reading import modified, start_time

_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was read, where it lies, and what was passed over on the way to it."""

    path: Path
    contents: dict[str, Any]
    warnings: list[str]


def load(ckpt_path: str, runs: Path, prefer: str, key: str = "ckpt_path") -> LoadedCheckpoint:
    """Read the checkpoint that `ckpt_path` names.

    Args:
        ckpt_path: a file, a run directory, or `last` or `best` for the newest run in `runs`.
        runs: folder with the runs of one name.
        prefer: `last` or `best`: which one a run directory stands for.
        key: the key of the config that names it, for messages.

    Returns:
        The contents. Where `last` is damaged, those of the newest checkpoint of the same run that is not.

    Raises:
        UserError: if nothing is there, or nothing valid.
    """
    if ckpt_path in ("last", "best"):
        run, prefer = newest_run(runs, key), ckpt_path
    else:
        path = Path(ckpt_path)
        if path.is_file():
            return _load_file(path, key)
        if not path.is_dir():
            raise UserError(_missing(path, key))
        run = path
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    if prefer == "best" and (folder / "best.pt").is_file():
        return _load_file(folder / "best.pt", key)
    if prefer == "best" and ckpt_path == "best":
        raise UserError(f"{key}: {run} has no best.pt\n    allowed: {key}=last")
    return _newest_valid(folder, key)


def newest_run(runs: Path, key: str = "ckpt_path") -> Path:
    """The run directory of the newest run that has a checkpoint: the one that was started last, see `start_time`.

    Raises:
        UserError: if no run in `runs` has one.
    """
    globbed = (path for pattern in ("*", "sweeps/*/*") for path in runs.glob(f"{pattern}/checkpoints/last.pt"))
    found = [path for path in globbed if path.is_file()]
    if not found:
        others = sorted({path.parts[len(runs.parent.parts)] for path in runs.parent.glob("*/*/checkpoints/last.pt")})
        hint = f", or name={others[0]} (there are runs of {', '.join(others[:8])})" if others else ""
        raise UserError(
            f"{key}: no run with a checkpoint in {runs}\n    allowed: a checkpoint file or a run directory{hint}"
        )

    def age(path: Path) -> tuple[datetime, datetime]:
        written = modified(path) or _LONG_AGO
        return start_time(path.parents[1]) or written, written

    return max(found, key=age).parents[1]


def step_files(folder: Path) -> list[Path]:
    """Checkpoints of single steps in a folder, newest step first."""
    return sorted(folder.glob("step_*.pt"), key=lambda path: path.name, reverse=True)


def _load_file(path: Path, key: str) -> LoadedCheckpoint:
    try:
        return LoadedCheckpoint(path, read(path), [])
    except DamagedCheckpoint as error:
        others = [other for other in [path.with_name("last.pt"), *step_files(path.parent)] if other.name != path.name]
        for other in others:
            if other.is_file() and not _same(other, path) and _is_valid(other):
                raise DamagedCheckpoint(f"{error}\n    the newest valid one beside it: {key}={other}") from None
        raise


def _newest_valid(folder: Path, key: str) -> LoadedCheckpoint:
    warnings: list[str] = []
    candidates = [path for path in [folder / "last.pt", *step_files(folder)] if path.is_file()]
    if not candidates:
        raise UserError(f"{key}: {folder} has no checkpoint (last.pt or step_*.pt)")
    for path in candidates:
        try:
            return LoadedCheckpoint(path, read(path), warnings)
        except DamagedCheckpoint as error:
            warnings.append(str(error))
    raise DamagedCheckpoint(f"{key}: no checkpoint of this run is whole:\n    " + "\n    ".join(warnings))


def _is_valid(path: Path) -> bool:
    try:
        read(path)
    except UserError:
        return False
    return True


def _same(first: Path, second: Path) -> bool:
    return first.stat().st_ino == second.stat().st_ino


def _missing(path: Path, key: str) -> str:
    allowed = "\n    allowed: a checkpoint file, a run directory, last or best"
    if path.exists():
        return f"{key}: {path} is a device, a pipe or a socket, not a regular file{allowed}"
    if path.is_symlink():
        return f"{key}: {path} is a link to {path.readlink()}, which does not exist{allowed}"
    close = ""
    if path.parent.is_dir():
        close = nearest(path.name, [other.name for other in path.parent.iterdir() if other.exists()])
    hint = f"; did you mean '{path.parent / close}'?" if close else ""
    return f"{key}: there is no {path}{hint}{allowed}"
