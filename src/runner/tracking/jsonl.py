"""Reading and cutting back `metrics.jsonl`: an object a line with `global_step`, `epoch`, `split` and the metrics."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from runner.tracking.files import write_atomically, writing

_LONGEST_LINE = 2**20  # bytes; ours have a few hundred


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics file in their order; lines that a crash cut short are left out.

    Returns:
        One dictionary a line; a metric that was NaN or infinite is None. Empty if there is no such file.
    """
    if not path.is_file():
        return []
    return [record for line in _lines(path) if (record := _parse(line)) is not None]


def drop_after(path: Path, global_step: int | None, repeated: Collection[str] = ()) -> None:
    """Remove, atomically, the lines whose `global_step` is larger, and lines that are not whole.

    Args:
        path: a metrics file; nothing happens if it does not exist.
        global_step: the last step to keep, or None to remove damaged lines only.
        repeated: splits whose lines of `global_step` itself are removed too.

    Raises:
        UserError: the file cannot be read or written.
    """
    if not path.is_file():
        return
    with writing(path):
        kept = b"".join(line + b"\n" for line in _lines(path) if _keep(_parse(line), global_step, repeated))
        changed = len(kept) != path.stat().st_size or kept != path.read_bytes()
    if changed:
        write_atomically(path, kept)


def copy_until(source: Path, target: Path, global_step: int) -> None:
    """Write, atomically, the lines of one metrics file whose `global_step` is not larger into another.

    Raises:
        UserError: one cannot be read or the other not be written.
    """
    with writing(target):
        kept = b"".join(line + b"\n" for line in _lines(source) if _keep(_parse(line), global_step))
    write_atomically(target, kept)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines without their ends, up to one that is longer than any of ours: a file from somebody else may have no line ends."""
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                return
            yield line.removesuffix(b"\n")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("global_step"), int) else None


def _keep(record: dict[str, Any] | None, global_step: int | None, repeated: Collection[str] = ()) -> bool:
    if record is None or global_step is None:
        return record is not None
    step = record["global_step"]
    return bool(step < global_step or (step == global_step and record.get("split") not in repeated))
