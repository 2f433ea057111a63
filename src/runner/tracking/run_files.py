"""Files of a run that other processes read while it trains.

`metrics.jsonl` has one object per line with `global_step`, `epoch`, `split` and the metrics. `progress.json` says how far the
run is, and is there while it trains.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.base.files import finite, write_atomically, writing
from runner.base.reading import read_regular

PROGRESS = "progress.json"
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


@dataclass
class Progress:
    """The progress of a run."""

    global_step: int = 0  # complete optimizer steps
    total_steps: int = 0  # 0 if unknown, as for the epochs
    epoch: int = 0  # the current one, from 1
    total_epochs: int = 0
    seconds_left: float | None = None  # until the last step; None if not known yet
    device: str = ""  # where it trains
    train: dict[str, float | None] = field(default_factory=dict)  # metrics logged last
    metric: str = ""  # name of the monitored metric
    last: float | None = None  # its last value
    best: float | None = None  # its best one, and the step of that
    best_step: int | None = None
    time: float = 0.0  # when this was written, in Unix seconds

    @property
    def share(self) -> float:
        """The part of the steps that is complete, 0 to 1."""
        return max(0, min(self.global_step, self.total_steps)) / self.total_steps if self.total_steps > 0 else 0.0


def write_progress(path: Path, progress: Progress) -> None:
    """Write what is known; a file that cannot be written is not an error."""
    temporary = path.with_name(f".{path.name}.tmp")
    text = json.dumps(finite({**asdict(progress), "time": round(time.time(), 3)}))
    with contextlib.suppress(OSError):  # no reader sees a part of it; nobody needs it after a crash
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def read_progress(folder: Path) -> Progress | None:
    """The progress of the run in a folder; None without a file that makes sense."""
    # The file may be half written, of another version, or made by somebody else
    from pydantic import TypeAdapter

    try:
        found = json.loads(read_regular(folder / PROGRESS))
        return TypeAdapter(Progress).validate_python({name: found[name] for name in asdict(Progress())})
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
