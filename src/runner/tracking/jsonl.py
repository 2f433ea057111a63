"""Reading and truncating `metrics.jsonl`: one object per line with `global_step`, `epoch`, `split` and the metrics."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from runner.tracking.files import write_atomically, writing

_LONGEST_LINE = 2**20  # bytes; ours have a few hundred


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics file in order, without lines that a crash truncated; empty if there is no such file.

    A metric that was NaN or infinite is None.
    """
    return [record for _, record in _records(path)] if path.is_file() else []


def drop_after(path: Path, global_step: int | None, repeated: Collection[str] = ()) -> None:
    """Remove, atomically, the lines of later steps and incomplete lines.

    Args:
        path: a metrics file; nothing happens if it does not exist.
        global_step: the last step to keep; None removes incomplete lines only.
        repeated: splits whose lines of `global_step` itself are removed too.

    Raises:
        UserError: the file cannot be read or written.
    """
    if not path.is_file():
        return
    with writing(path):
        kept = _until(path, global_step, repeated)
        changed = len(kept) != path.stat().st_size or kept != path.read_bytes()
    if changed:
        write_atomically(path, kept)


def copy_until(source: Path, target: Path, global_step: int) -> None:
    """Copy, atomically, the lines of a metrics file up to a step.

    Raises:
        UserError: a file cannot be read or written.
    """
    with writing(target):
        kept = _until(source, global_step)
    write_atomically(target, kept)


def _until(path: Path, global_step: int | None, repeated: Collection[str] = ()) -> bytes:
    def keep(record: dict[str, Any]) -> bool:
        step = record["global_step"]
        last = global_step is not None and step == global_step and record.get("split") in repeated
        return (global_step is None or step <= global_step) and not last

    return b"".join(line + b"\n" for line, record in _records(path) if keep(record))


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Complete lines without line ends, and their objects."""
    with path.open("rb") as file:
        # A foreign file may have no line ends, so reading stops at a line that is too long.
        while (line := file.readline(_LONGEST_LINE)) and len(line) < _LONGEST_LINE:
            line = line.removesuffix(b"\n")
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("global_step"), int):
                yield line, record
