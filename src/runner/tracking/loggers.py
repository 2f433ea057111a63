"""Loggers of metrics: JSON lines (always), CSV, TensorBoard. A custom logger only needs the methods of `Logger`."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from runner.base.errors import first_line, require
from runner.base.files import append, finite, write_atomically, writing
from runner.tracking.background import Background, Row
from runner.tracking.background import Logger as Logger
from runner.tracking.run_files import copy_until, read_records

METRICS = "metrics.jsonl"
_LARGEST = 2.0**128  # of 32 bits, as TensorBoard stores numbers
_CSV_PAUSE = 100  # times the time that writing took, until the tables are written again


class JsonLines(Logger):
    """`metrics.jsonl`: one object per line, `global_step`, `epoch`, `split` first, then the metrics; NaN as null.

    Each line reaches the operating system at once, so that a kill loses none.
    """

    def __init__(self) -> None:
        self._file: FileIO | None = None

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        path = directory / METRICS
        copy_until(path, path, resume_step)
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """See `Logger.log`."""
        assert self._file is not None, "log() came before open()"
        record: dict[str, Any] = {"global_step": global_step, "epoch": epoch, "split": split}
        record.update({name: finite(float(value)) for name, value in metrics.items()})
        append(self._file, json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")

    def flush(self) -> None:
        """See `Logger.flush`."""
        if self._file is not None:
            with writing(Path(self._file.name)):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """See `Logger.close`."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Csv(Logger):
    """`metrics_<split>.csv`: the lines of `metrics.jsonl` as tables, a column per metric, written at each flush and the end.

    A table is written whole from that file each time, so a resumed run and a new metric need no further code. This takes 1% of
    the time at most: in a long run, not every flush writes.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._due = 0.0

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        self._directory = directory

    def flush(self) -> None:
        """See `Logger.flush`."""
        if (began := time.monotonic()) >= self._due:
            self._write()
            self._due = began + _CSV_PAUSE * (time.monotonic() - began)

    def _write(self) -> None:
        if self._directory is None:
            return
        tables: dict[str, list[dict[str, Any]]] = {}
        for record in read_records(self._directory / METRICS):
            row = {name: "nan" if value is None else value for name, value in record.items() if name != "split"}
            tables.setdefault(str(record.get("split", "")), []).append(row)
        for split, rows in tables.items():
            columns = dict.fromkeys(["global_step", "epoch", *(name for row in rows for name in row)])
            table = csv.DictWriter(text := io.StringIO(), list(columns), restval="", lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
            path = self._directory / f"metrics_{split.replace('/', '_')}.csv"
            write_atomically(path, text.getvalue().encode())

    def close(self) -> None:
        """See `Logger.close`."""
        self._write()


@dataclass(frozen=True)
class Watched:
    """What a logger of images may show: the first sample of each split, (C, H, W), and predictions as they are now."""

    samples: Mapping[str, Any]
    pictures: Callable[[], list[Any]] = list  # uint8 (3, H, W)


class TensorBoard(Background):
    """Event files in `tensorboard/`, tags `loss/train`, `loss/val`: one chart a metric, the splits together.

    A thread writes them with torch's `SummaryWriter`, once there is a row, because importing it takes time. A resumed run marks
    the step that it continues from; TensorBoard hides what an earlier attempt logged from there on, and the values of that step
    that are still valid are written again.

    Args:
        flush_s: longest time between flushes in seconds, at least 1.
        images: whether the first sample of each split is written at the start, and at each validation what the task draws of
            its predictions for two samples; on a single process.
        watched: what `images` shows; without it, only scalars are written.
        warn: called with a sentence if something cannot be written.
    """

    name, at_once = "TensorBoard", False

    def __init__(
        self,
        flush_s: int = 10,
        *,
        images: bool = False,
        watched: Watched | None = None,
        warn: Callable[[str], object] = str,
    ) -> None:
        if flush_s < 1:
            raise ValueError(f"flush_s must be at least 1, got {flush_s}")
        require("logger.tensorboard", "tensorboard", "tensorboard", otherwise=", or logger=none")
        super().__init__(warn=warn)
        self.address, self.modules, self._flush_s = "tensorboard/", ["torch.utils.tensorboard"], flush_s
        self._watched = watched if images else None
        self._failed = False

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        self._again = _at(directory, resume_step)
        super().open(directory, resume_step)

    def log(self, split: str, metrics: dict[str, Any], global_step: int, epoch: int) -> None:
        """See `Logger.log`."""
        super().log(split, metrics, global_step, epoch)
        if split == "val" and self._watched is not None and not self._failed:
            try:
                pictures = self._watched.pictures()
            except Exception as error:
                self._failed = True
                self.warn(f"TensorBoard gets no pictures of predictions: {first_line(error)}")
            else:
                super().log("prediction", {str(place): each for place, each in enumerate(pictures)}, global_step, epoch)

    def flush(self) -> None:
        """Wait until the thread has written everything, as a resumed run continues after what was logged here."""
        self._wake.set()
        until = time.monotonic() + self.wait_s
        while self._arrived < self._logged and not self._trouble and time.monotonic() < until:
            time.sleep(0.001)

    def close(self) -> None:
        """See `Logger.close`."""
        self.finish()

    def connect(self) -> None:
        """Create a file that marks, in a resumed run, the step from which older files are obsolete."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(self.directory / "tensorboard")
        make: Any = SummaryWriter  # which has no types
        self._writer = make(folder, purge_step=self.resume_step, flush_secs=self._flush_s)
        with contextlib.suppress(AttributeError):  # another version may have other names
            # Its own thread would print a traceback where the disk is full, beside the error that `flush` raises
            self._writer.file_writer.event_writer._async_writer._worker._invoke_excepthook = lambda *_: None
        for row in self._again:
            self._write(row)
        for split, sample in self._watched.samples.items() if self._watched is not None else ():
            pixels = (sample if len(sample) in (1, 3) else sample[:1]).detach().float().cpu()
            low, high = pixels.min(), pixels.max()
            shown = (pixels - low) / (high - low).clamp(min=1e-12)
            self._writer.add_image(f"first sample/{split}", shown, self.resume_step or 0)

    def send(self, rows: list[Row]) -> None:
        """Write rows to the file."""
        for row in rows:
            self._write(row)
        self._writer.flush()

    def _write(self, row: Row) -> None:
        for name, value in row.metrics.items():
            if row.split == "prediction":
                self._writer.add_image(f"prediction/{name}", value, row.global_step, row.time)
            else:
                self._writer.add_scalar(f"{name}/{row.split}", value, row.global_step, row.time)

    def end(self) -> None:
        """Close the file."""
        self._writer.close()


def _at(directory: Path, step: int | None) -> list[Row]:
    """The lines of a step in `metrics.jsonl`; empty without a step or file."""
    rows = list[Row]()
    for record in read_records(directory / METRICS) if step is not None else ():
        if record.pop("global_step") == step:
            split, epoch = str(record.pop("split", "")), record.pop("epoch", 0)
            metrics = {name: _number(value) for name, value in record.items()}
            rows.append(Row(split, metrics, step or 0, epoch, time.time()))
    return rows


def _number(value: Any) -> float:
    """A number as before JSON, which stores NaN as null; NaN for anything else."""
    return float(value) if isinstance(value, float | int) and abs(value) < _LARGEST else math.nan
