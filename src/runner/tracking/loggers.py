"""Where metrics go: JSON lines (always), CSV, TensorBoard. A logger of one's own needs only the methods of `Logger`."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Protocol

from runner.config.errors import UserError
from runner.tracking.files import finite, write_atomically, writing
from runner.tracking.records import drop_after

_FIRST_COLUMNS = ["global_step", "epoch"]


class Logger(Protocol):
    """Takes metrics; called on the main process only, in the order of steps."""

    def open(self, directory: Path, resume_step: int | None) -> None:
        """Begin to write into `directory`.

        Args:
            directory: the run directory; exists.
            resume_step: for a run that continues in this directory, the `global_step` it continues from: what was
                logged for later steps is taken back. None for a new run.
        """
        ...

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Record the metrics of one split, e.g. `train` or `val`, after `global_step` optimizer steps."""
        ...

    def flush(self) -> None:
        """Make everything logged so far survive the end of the process; called before each checkpoint."""
        ...

    def close(self) -> None:
        """Finish; nothing is logged afterwards. May be called twice, and without `open`."""
        ...


class JsonLines:
    """`metrics.jsonl`: one object a line, `global_step`, `epoch`, `split` first, then the metrics; NaN as null.

    Each line reaches the operating system at once, so that killing the process loses none.
    """

    def __init__(self) -> None:
        self._path = Path("metrics.jsonl")
        self._file: IO[bytes] | None = None

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        self._path = directory / "metrics.jsonl"
        drop_after(self._path, resume_step)
        with writing(self._path):
            self._file = self._path.open("ab")

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """See `Logger.log`."""
        file = _opened(self._file)
        record = {"global_step": global_step, "epoch": epoch, "split": split}
        record.update({name: finite(float(value)) for name, value in metrics.items()})
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        with writing(self._path):
            file.write(line.encode() + b"\n")
            file.flush()

    def flush(self) -> None:
        """See `Logger.flush`."""
        if self._file is not None:
            _sync(self._path, self._file)

    def close(self) -> None:
        """See `Logger.close`."""
        if self._file is not None:
            _close(self._file)
            self._file = None


class Csv:
    """`metrics_<split>.csv`: a row for each call, a column for each metric.

    A metric that first appears later adds a column: the file is then rewritten whole, the older rows empty there.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._columns: dict[Path, list[str]] = {}
        self._files: dict[Path, IO[str]] = {}

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        self._directory = directory
        for path in sorted(directory.glob("metrics_*.csv")):
            with writing(path):
                data = path.read_bytes()
            # A row without its line end is one that a crash cut short.
            whole = data[: data.rfind(b"\n") + 1].decode("utf-8", "replace")
            columns, *rows = list(csv.reader(io.StringIO(whole, newline=""))) or [[]]
            if columns[:2] != _FIRST_COLUMNS:
                continue
            kept = [row for row in rows if _keep(row, resume_step)]
            if _csv([columns, *kept]) != data:
                write_atomically(path, _csv([columns, *kept]))
            self._columns[path] = columns

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """See `Logger.log`."""
        if self._directory is None:
            raise RuntimeError("log() came before open()")
        path = self._directory / f"metrics_{split.replace('/', '_')}.csv"
        values = {"global_step": str(global_step), "epoch": str(epoch)}
        values.update({name: repr(float(value)) for name, value in metrics.items()})
        columns = self._columns.get(path, [])
        new = [name for name in values if name not in columns]
        if new:
            columns = self._widen(path, [*columns, *new])
        with writing(path):
            if path not in self._files:
                self._files[path] = path.open("a", encoding="utf-8", newline="")
            row = [values.get(name, "") for name in columns]
            csv.writer(self._files[path], lineterminator="\n").writerow(row)
            self._files[path].flush()

    def flush(self) -> None:
        """See `Logger.flush`."""
        for path, file in self._files.items():
            _sync(path, file)

    def close(self) -> None:
        """See `Logger.close`."""
        for file in self._files.values():
            _close(file)
        self._files.clear()

    def _widen(self, path: Path, columns: list[str]) -> list[str]:
        if path in self._files:
            _close(self._files.pop(path))
        rows: list[list[str]] = []
        if self._columns.get(path):
            with writing(path), path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))[1:]
        write_atomically(path, _csv([columns, *(row + [""] * (len(columns) - len(row)) for row in rows)]))
        self._columns[path] = columns
        return columns


class TensorBoard:
    """Event files in `tensorboard/`, tags `loss/train`, `loss/val`: one chart a metric, the splits together.

    The file is made at the first `log`, as importing the library takes time. Records are written where they are logged: the
    library's own writer hands them to a thread, which costs small steps more than the writing. A continued run marks its
    first step, and TensorBoard hides what an earlier attempt had logged beyond it.
    """

    def __init__(self, flush_s: int = 10) -> None:
        """Flush at least every `flush_s` seconds (at least 1)."""
        if flush_s < 1:
            raise ValueError(f"flush_s must be at least 1, got {flush_s}")
        self.flush_s = flush_s
        self._directory: Path | None = None
        self._resume_step: int | None = None
        self._events: _Events | None = None
        self._flushed = 0.0

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        self._directory = directory / "tensorboard"
        self._resume_step = resume_step

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """See `Logger.log`."""
        if self._directory is None:
            raise RuntimeError("log() came before open()")
        with writing(self._directory):
            if self._events is None:
                self._events = self._begin(self._directory)
            # One record for all of them, as each one takes time.
            self._events.write(global_step, {f"{name}/{split}": value for name, value in metrics.items()})
            if time.monotonic() - self._flushed >= self.flush_s:
                self._flush(self._events)

    def flush(self) -> None:
        """See `Logger.flush`."""
        if self._events is not None and self._directory is not None:
            with writing(self._directory):
                self._flush(self._events)

    def close(self) -> None:
        """See `Logger.close`."""
        if self._events is not None and self._directory is not None:
            with writing(self._directory):
                self._events.file.close()
            self._events = None

    def _flush(self, events: _Events) -> None:
        events.file.flush()
        self._flushed = time.monotonic()

    def _begin(self, directory: Path) -> _Events:
        try:
            events = _Events()
        except ImportError as error:
            raise UserError(
                f"logger=tensorboard cannot be used ({error}): install the package tensorboard or set logger=none"
            ) from error
        directory.mkdir(exist_ok=True)
        # The name says when and where, as the library's do: TensorBoard reads the files of a folder in this order.
        stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        for count in itertools.count():
            with contextlib.suppress(FileExistsError):
                events.begin((directory / f"{stem}.{count}").open("xb"), self._resume_step)
                break
        self._flush(events)
        return events


class _Events:
    """Records of TensorBoard in a file; made with what the library has for them."""

    def __init__(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.file: IO[bytes] = io.BytesIO()
        self._event, self._session, self._summary, self._writer = Event, SessionLog, Summary, RecordWriter

    def begin(self, file: IO[bytes], resume_step: int | None) -> None:
        """Say which version the file has and, in a continued run, from which step on older files do not count."""
        self.file, self._records = file, self._writer(file)
        self._put(file_version="brain.Event:2")
        if resume_step is not None:
            self._put(step=resume_step + 1, session_log=self._session(status=self._session.START))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a number for each tag."""
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._put(step=step, summary=self._summary(value=scalars))

    def _put(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def _opened(file: IO[bytes] | None) -> IO[bytes]:
    if file is None:
        raise RuntimeError("log() came before open()")
    return file


def _close(file: IO[Any]) -> None:
    # `log` has already raised for what could not be written; closing would only raise it again.
    with contextlib.suppress(OSError):
        file.close()


def _keep(row: list[str], resume_step: int | None) -> bool:
    return bool(row) and row[0].isdecimal() and (resume_step is None or int(row[0]) <= resume_step)


def _csv(rows: Iterable[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _sync(path: Path, file: IO[Any]) -> None:
    with writing(path):
        file.flush()
        os.fsync(file.fileno())
