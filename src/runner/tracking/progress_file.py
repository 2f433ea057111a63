"""`progress.json` in a run directory: how far a run is, for other processes; there while the run trains."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from runner.base.files import finite
from runner.base.reading import read_regular

NAME = "progress.json"


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
        found = json.loads(read_regular(folder / NAME))
        return TypeAdapter(Progress).validate_python({name: found[name] for name in asdict(Progress())})
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
