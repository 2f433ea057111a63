"""What a run calls to log metrics: JSON lines (always), CSV and TensorBoard. A custom logger only needs the methods of `Logger`.

Loggers that pass rows to a thread are `Background`: a slow or dead receiver neither blocks nor ends a run.
"""

# Not as strings, `annotations`: subclasses in other modules have these fields, too.

import contextlib
import csv
import importlib
import io
import json
import math
import os
import queue
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from runner.base.errors import first_line, require
from runner.base.files import append, finite, write_atomically, writing
from runner.base.secrets import mask_text
from runner.tracking.formats import amount, clean
from runner.tracking.run_files import copy_until, read_records

METRICS = "metrics.jsonl"
_CSV_PAUSE = 100  # times the time that writing took, until the tables are written again
_MOST_WAITING, _MOST_SENT = 10_000, 500  # rows in the queue, and passed on together
_GROUPED_S = 1.0
_LARGEST = 2.0**128  # of 32 bits, as TensorBoard stores numbers
_LONGEST_PAUSE_S = 60.0  # between attempts that fail
_IMPORTS = threading.RLock()
# A process that is forked during an import would wait for ever once it imports the same module.
os.register_at_fork(before=_IMPORTS.acquire, after_in_parent=_IMPORTS.release, after_in_child=_IMPORTS.release)


class Row(NamedTuple):
    """Metrics of one split, as they were logged."""

    split: str
    metrics: dict[str, Any]
    global_step: int
    epoch: int
    time: float  # in seconds since 1970


class Logger(Protocol):
    """Receives metrics, on the main process only, in the order of steps; ours inherit the methods that have nothing to do."""

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
        return

    def flush(self) -> None:
        """Make everything logged so far survive the end of the process; called before each checkpoint."""
        return

    def close(self) -> None:
        """Finish; nothing is logged afterwards. May be called twice, and without `open`."""
        return


class MetricsBuffer:
    """Passes metrics on to each sink in groups if training logs more often than once a second.

    Formatting and writing one line between two small steps takes several times as long as one of many in a row, which adds
    up if a step takes less than a millisecond. Metrics of other splits than `train` are passed on at once, along with
    everything that waits. If the process is killed, what waited is younger than the last checkpoint, so a resumed run logs
    it again. A sink is called as `Logger.log` is.
    """

    def __init__(self, sinks: Sequence[Callable[[str, dict[str, float], int, int], None]]) -> None:
        self._sinks = list(sinks)
        self._waiting: list[tuple[str, dict[str, float], int, int]] = []
        self._emptied = float("-inf")

    def __call__(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Add metrics, which must not be changed afterwards."""
        self._waiting.append((split, metrics, global_step, epoch))
        if split != "train" or time.monotonic() - self._emptied >= _GROUPED_S:
            self.empty()

    def empty(self) -> None:
        """Pass on everything that waits; called before every checkpoint and at the end."""
        waiting, self._waiting = self._waiting, []
        for sink in self._sinks:
            for metrics in waiting:
                sink(*metrics)
        self._emptied = time.monotonic()


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


@dataclass(kw_only=True, eq=False)
class Background(Logger):
    """Base of loggers that pass rows to a thread; see `Logger` for what a run calls.

    A row is dropped if the queue is full, or if sending it fails. The first failure is a warning of the run, and when the run
    ends, another one counts the rows that did not arrive. `metrics.jsonl` has all of them.
    """

    wait_s: float = 30.0
    warn: Callable[[str], object] = print
    name: ClassVar[str]
    period_s: ClassVar[float] = 2.0  # between two batches of rows, as Python does not train while the thread computes
    address: str = field(init=False)  # of the receiver, without secrets
    modules: Sequence[str] = field(init=False)  # that the thread imports first, as that may take seconds
    at_once: ClassVar[bool] = True  # whether to connect before there is a row
    connect: ClassVar[Callable[..., None]]  # called until it succeeds
    send: ClassVar[Callable[..., None]]  # a list of rows
    end: ClassVar[Callable[..., None]]  # how the run ended
    rest: str = field(init=False, default="")  # how to send the rest, for people

    def __post_init__(self) -> None:
        self._rows, self._wake = queue.Queue[Row](_MOST_WAITING), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"runner-{self.name}", daemon=True)
        self._logged = self._arrived = 0
        self._trouble, self._warned, self._ended, self._complete = "", False, False, False

    def open(self, directory: Path, resume_step: int | None) -> None:
        """Start the thread."""
        self.directory, self.resume_step = directory, resume_step
        self._thread.start()

    def log(self, split: str, metrics: dict[str, Any], global_step: int, epoch: int) -> None:
        """Pass a row to the thread, or drop it; warn once if there is a reason."""
        self._logged += 1
        try:
            self._rows.put_nowait(Row(split, metrics, global_step, epoch, time.time()))
        except queue.Full:
            self._trouble = self._trouble or f"{self.address}: {_MOST_WAITING:,} rows wait, and more are dropped"
        if self._trouble and not self._warned:
            self._warned = True
            self.warn(f"{self.name}: {self._trouble}; the run goes on, and metrics.jsonl has every row")

    def finish(self) -> None:
        """The run has ended, and its summary says how: wait a little for the thread, and say what is missing."""
        if self._ended or self._thread.ident is None:
            return
        self._ended = True
        self._wake.set()
        self._thread.join(self.wait_s)
        if self._complete and not self._thread.is_alive():
            return
        reason = f"{self.address}: not everything was sent within {self.wait_s:g} s"
        reason = reason if self._thread.is_alive() else self._trouble
        missing = self._logged - self._arrived
        lost = f"{missing:,} of {amount(self._logged, 'row')}" if missing else "the end of the run"
        self.warn(f"{self.name}: {lost} did not arrive ({reason}){self.rest}; metrics.jsonl has every row")

    def _work(self) -> None:
        """The thread: connect, and send what there is every few seconds, until the run has ended."""
        pause, connected, ended = 0.0, False, False
        while not ended:
            self._wake.wait(pause)
            self._wake.clear()
            ended = self._ended
            try:
                if not connected and (self.at_once or not self._rows.empty()):
                    with _IMPORTS:
                        for module in self.modules:
                            importlib.import_module(module)
                    self.connect()
                    connected = True
                # Only this thread takes rows
                while rows := [self._rows.get() for _ in range(min(_MOST_SENT, self._rows.qsize()))]:
                    self.send(rows)
                    self._arrived += len(rows)
                if ended and connected:
                    self.end()
                self._complete = self._arrived == self._logged
                pause = self.period_s
            except (Exception, SystemExit) as error:
                self._complete, self._trouble = False, sentence_of(error, self.address)
                pause = min(max(2 * pause, self.period_s), _LONGEST_PAUSE_S)


def sentence_of(error: BaseException, address: str) -> str:
    """The innermost message of an error, on one line, without secrets; clients wrap that of the system several times."""
    deepest = error
    while (inner := deepest.__cause__ or deepest.__context__) is not None:
        deepest = inner
    system = (deepest.strerror or str(deepest)).lower() if isinstance(deepest, OSError) else ""
    text = clean(mask_text(f"{address}: {system or str(error) or type(error).__name__}"))
    return textwrap.shorten(text.strip().removesuffix("."), 300, placeholder=" ...")


@dataclass(frozen=True)
class Watched:
    """What a logger of images may show: the first sample of each split, (C, H, W), and predictions as they are now."""

    samples: Mapping[str, Any]
    pictures: Callable[[], list[Any]] = list  # uint8 (3, H, W)


class TensorBoard(Background):
    """Event files in `tensorboard/`, tags `loss/train`, `loss/val`: one chart a metric, the splits together.

    A thread writes them with torch's `SummaryWriter`, once there is a row, because importing it takes time: in a resumed run at
    its start, if there are values to write again. A resumed run marks
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
        shown = watched if images else None
        self._samples = {} if shown is None else shown.samples
        self._pictures = None if shown is None else shown.pictures

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        super().open(directory, resume_step)
        for record in read_records(directory / METRICS) if resume_step is not None else ():
            if record.pop("global_step") == resume_step:
                split, epoch = str(record.pop("split", "")), record.pop("epoch", 0)
                # JSON stores NaN as null; a directory may come from someone else
                known = {
                    name: isinstance(value, float | int) and abs(value) < _LARGEST for name, value in record.items()
                }
                values = {name: float(value) if known[name] else math.nan for name, value in record.items()}
                super().log(split, values, resume_step or 0, epoch)
                if split == "val":
                    files = [each for each in directory.glob(f"samples/*_{resume_step:08}.*") if not each.is_symlink()]
                    shown = {each.stem.rpartition("_")[0]: each for each in files}
                    super().log("sample", shown, resume_step or 0, epoch)

    def log(self, split: str, metrics: dict[str, Any], global_step: int, epoch: int) -> None:
        """See `Logger.log`."""
        super().log(split, metrics, global_step, epoch)
        if split == "val" and self._pictures is not None:
            try:
                pictures = self._pictures()
            except Exception as error:
                self._pictures = None
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
        for split, sample in self._samples.items():
            pixels = sample[: 3 if len(sample) > 2 else 1].detach().float().cpu()
            low, high = pixels.min(), pixels.max()
            shown = (pixels - low) / (high - low).clamp(min=1e-12)
            self._writer.add_image(f"first sample/{split}", shown, self.resume_step or 0)

    def send(self, rows: list[Row]) -> None:
        """Write rows to the file."""
        import numpy as np
        from PIL import Image

        for row in rows:
            for name, value in row.metrics.items():
                tag, place = f"{row.split}/{name}", (row.global_step, row.time)
                if row.split == "prediction":
                    self._writer.add_image(tag, value, *place)
                elif row.split != "sample":
                    self._writer.add_scalar(f"{name}/{row.split}", value, *place)
                elif value.suffix == ".png":
                    with Image.open(value) as image:
                        self._writer.add_image(tag, np.asarray(image), *place, dataformats="HWC")
                else:  # an indented text is shown as it is, and not as Markdown
                    self._writer.add_text(tag, textwrap.indent(value.read_bytes().decode(), "    "), *place)
        self._writer.flush()

    def end(self) -> None:
        """Close the file."""
        self._writer.close()
