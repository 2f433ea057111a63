"""Reading and truncating `metrics.jsonl`: one object per line with `global_step`, `epoch`, `split` and the metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from runner.base.files import write_atomically, writing

_LONGEST_LINE = 2**20  # bytes; ours have a few hundred


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics file in order, without lines that a crash truncated; empty if there is no such file.

    A metric that was NaN or infinite is None.
    """
    return [record for _, record in _records(path)] if path.is_file() else []


def copy_until(source: Path, target: Path, global_step: int | None, repeated: Collection[str] = ()) -> None:
    """Copy, atomically, the complete lines of a metrics file up to a step, None for all; nothing happens if there is no file.

    If the target is the source, it loses its other lines. `repeated` are splits whose lines of the step itself are skipped, too.

    Raises:
        UserError: a file cannot be read or written.
    """
    if not source.is_file():
        return

    def keep(record: dict[str, Any]) -> bool:
        left = math.inf if global_step is None else global_step - record["global_step"]
        return left > 0 or (left == 0 and record.get("split") not in repeated)

    # Lines after the step belong to a future that the resumed run computes again
    with writing(target):
        kept = b"".join(line + b"\n" for line, record in _records(source) if keep(record))
        changed = target != source or len(kept) != source.stat().st_size
    if changed:
        write_atomically(target, kept)


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Complete lines without line ends, and their objects."""
    with path.open("rb") as file:
        # A foreign file may have no line ends, so reading stops at a line that is too long.
        while (line := file.readline(_LONGEST_LINE)) and len(line) < _LONGEST_LINE:
            line = line.removesuffix(b"\n")
            if (record := parse(line)) is not None:
                yield line, record


def parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line, or None if it is not one of a metrics file."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("global_step"), int) else None
