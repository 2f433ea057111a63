"""Loggers of metrics: JSON lines (always), CSV, TensorBoard. A custom logger only needs the methods of `Logger`."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import socket
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from runner.base.errors import UserError, first_line
from runner.base.files import append, finite, write_atomically, writing
from runner.tracking.jsonl import copy_until, read_records

METRICS = "metrics.jsonl"
_LARGEST = 2.0**128  # of 32 bits, as TensorBoard stores numbers
_CSV_PAUSE = 100  # times the time that writing took, until the tables are written again
T = TypeVar("T")


class Logger(Protocol):
    """Receives metrics, on the main process only, in the order of steps."""

    def open(self, directory: Path, resume_step: int | None) -> None:
        """Start to write into `directory`.

        Args:
            directory: the run directory; exists.
            resume_step: the `global_step` from which a run continues in this directory; None for a new run. What was logged
                for later steps is removed. Of this step itself, the lines that are in `metrics.jsonl` stay; the others
                will be logged again.
        """
        ...

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Record the metrics of one split, such as `train` or `val`, after `global_step` optimizer steps."""
        ...

    def flush(self) -> None:
        """Make everything logged so far survive the end of the process; called before each checkpoint."""
        ...

    def close(self) -> None:
        """Finish; nothing is logged afterwards. May be called twice, and without `open`."""
        ...


class JsonLines:
    """`metrics.jsonl`: one object per line, `global_step`, `epoch`, `split` first, then the metrics; NaN as null.

    Each line reaches the operating system at once, so that a kill loses none.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: FileIO | None = None

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        self.close()
        self._path = path = directory / METRICS
        copy_until(path, path, resume_step)
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """See `Logger.log`."""
        record: dict[str, Any] = {"global_step": global_step, "epoch": epoch, "split": split}
        record.update({name: finite(float(value)) for name, value in metrics.items()})
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        append(_opened(self._file), line)

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


class Csv:
    """`metrics_<split>.csv`: the lines of `metrics.jsonl` as tables, a column per metric, written at each flush and the end.

    A table is written whole each time, so a resumed run and a new metric need no further code. This takes 1% of the time at most:
    in a long run, not every flush writes.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._due = 0.0

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        self._directory = directory

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Nothing to do: the line is in `metrics.jsonl` already."""
        _opened(self._directory)

    def flush(self) -> None:
        """See `Logger.flush`."""
        if (began := time.monotonic()) >= self._due:
            self._write()
            self._due = began + _CSV_PAUSE * (time.monotonic() - began)

    def _write(self) -> None:
        # The tables are made from metrics.jsonl, so a resume cannot leave lines in them twice
        tables: dict[str, list[dict[str, Any]]] = {}
        for record in read_records(self._directory / METRICS) if self._directory is not None else ():
            row = {name: "nan" if value is None else value for name, value in record.items() if name != "split"}
            tables.setdefault(str(record.get("split", "")), []).append(row)
        for split, rows in tables.items():
            columns = dict.fromkeys(["global_step", "epoch", *(name for row in rows for name in row)])
            text = io.StringIO()
            table = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
            path = _opened(self._directory) / f"metrics_{split.replace('/', '_')}.csv"
            write_atomically(path, text.getvalue().encode())

    def close(self) -> None:
        """See `Logger.close`."""
        self._write()


class TensorBoard:
    """Event files in `tensorboard/`, tags `loss/train`, `loss/val`: one chart a metric, the splits together.

    The file is created at the first `log`, because importing the library takes time. The calling thread writes: the
    library's writer hands records to another thread, which costs small steps more than the writing. A resumed run marks the
    step that it continues from; TensorBoard hides what an earlier attempt logged from there on, and the values of that step
    that are still valid are written again.

    Args:
        flush_s: longest time between flushes in seconds, at least 1.
        hparams: whether the config and the metrics of evaluations are written for the page HPARAMS when the run ends.
        histograms: whether the weights are written at each checkpoint.
        graph: whether the graph of the model is written at the start.
        images: whether the first sample of each split is written at the start, and at each validation what the task draws of
            its predictions for two samples; on a single process.
        watched: see `runner.tracking.tensorboard_extras.Watched`; without it, only scalars and `hparams` are written.
        warn: called with a sentence once for each of these that cannot be made.
    """

    def __init__(
        self,
        flush_s: int = 10,
        *,
        hparams: bool = False,
        histograms: bool = False,
        graph: bool = False,
        images: bool = False,
        watched: Any = None,
        warn: Callable[[str], object] = str,
    ) -> None:
        if flush_s < 1:
            raise ValueError(f"flush_s must be at least 1, got {flush_s}")
        self.flush_s, self._warn = flush_s, warn
        self._hparams, self._histograms, self._graph, self._images = hparams, histograms, graph, images
        self._watched, self._step, self._compared = watched, 0, dict[str, None]()
        self._failed = set[str]()
        self._directory: Path | None = None
        self._path = Path("tensorboard")
        self._file: IO[bytes] | None = None

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        self._directory = directory / "tensorboard"
        again = _at(directory, resume_step)
        self._again = again or []
        self._first_step = None if resume_step is None else resume_step + (again is None)

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """See `Logger.log`."""
        directory = _opened(self._directory)
        with writing(directory):
            if self._file is None:
                self._begin(directory)
            self._write(split, metrics, global_step)
            self._step = global_step
            if split == "val" and self._images and self._watched is not None:
                self._put_extras("pictures")
            if split != "train":
                self._compared |= dict.fromkeys(f"{name}/{split}" for name in metrics)
            if time.monotonic() - self._flushed >= self.flush_s:
                self._flush()

    def flush(self) -> None:
        """See `Logger.flush`."""
        if self._file is not None:
            with writing(self._path):
                if self._histograms and self._watched is not None:
                    self._put_extras("histograms")
                self._flush()

    def close(self) -> None:
        """See `Logger.close`."""
        if self._file is not None:
            with writing(self._path):
                if self._hparams and self._directory is not None:
                    self._put_extras("hyperparameters", self._directory.parent, list(self._compared))
                self._file.close()
            self._file = None

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
        self._flushed = time.monotonic()

    def _begin(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UserError(
                "logger", f"tensorboard cannot be used ({error})", "logger=none, or install the package tensorboard"
            ) from error
        self._event, self._session, self._summary, self._writer = Event, SessionLog, Summary, RecordWriter
        self._make(directory)
        for split, metrics in self._again:
            self._write(split, {name: metrics[name] for name in metrics if name != "epoch"}, self._first_step or 0)
        self._again = []
        self._step = self._first_step or 0
        if self._watched is not None and self._images:
            self._put_extras("images")
        if self._watched is not None and self._graph:
            self._put_extras("graph")
        self._flush()

    def _put_extras(self, make: str, *arguments: Any) -> None:
        """Write the events that a function of `tensorboard_extras` makes; what cannot be made costs a warning."""
        from runner.tracking import tensorboard_extras  # needs torch

        try:
            for fields in list(getattr(tensorboard_extras, make)(*arguments or [self._watched])):
                self._put(step=self._step, **fields)
        except OSError:
            raise
        except Exception as error:
            if make not in self._failed:
                self._warn(f"TensorBoard gets no {make}: {first_line(error)}")
            self._failed.add(make)

    def _make(self, directory: Path) -> None:
        """Create a file with its version and, in a resumed run, the step from which older files are obsolete."""
        directory.mkdir(exist_ok=True)
        # Time and host, as in the library's names. TensorBoard reads the files of a folder in the order of their names, so
        # this one must come last, even if runs follow each other within a second or the clock was set back.
        stamps = [path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*.*")]
        latest = max((int(stamp) for stamp in stamps if stamp.isdecimal()), default=-1)
        stamp = max(int(time.time()), latest + 1)
        self._path = directory / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = self._path.open("xb")
        self._records = self._writer(self._file)
        self._put(file_version="brain.Event:2")
        if self._first_step is not None:
            self._put(step=self._first_step, session_log=self._session(status=self._session.START))

    def _write(self, split: str, metrics: dict[str, float], step: int) -> None:
        """Add the metrics of a split in one record, because each record takes time."""
        scalars = [self._summary.Value(tag=f"{name}/{split}", simple_value=value) for name, value in metrics.items()]
        self._put(step=step, summary=self._summary(value=scalars))

    def _put(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def _opened(target: T | None) -> T:
    if target is None:
        raise RuntimeError("log() came before open()")
    return target


def _at(directory: Path, step: int | None) -> list[tuple[str, dict[str, float]]] | None:
    """Split and metrics of each line of a step in `metrics.jsonl`; None without a step or file."""
    path = directory / METRICS
    if step is None or not path.is_file():
        return None
    records = [record for record in read_records(path) if record.pop("global_step") == step]
    return [(str(record.pop("split", "")), {name: _number(record[name]) for name in record}) for record in records]


def _number(value: Any) -> float:
    """A number as before JSON, which stores NaN as null; NaN for anything else."""
    return float(value) if isinstance(value, float | int) and abs(value) < _LARGEST else math.nan
