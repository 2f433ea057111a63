"""The display of a run, its copy in `run.log`, and what it says of steps that were skipped."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

from runner.base.errors import UserError
from runner.base.files import append, writing
from runner.base.secrets import mask_text
from runner.tracking.formats import HARDWARE_METRICS, Line, aligned, amount, clean, duration, in_order, metric, wrapped
from runner.tracking.run_files import Progress, write_progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from runner.tracking.terminal import Terminal

_BAR_PERIOD_S = 0.2
_COUNTED_S = 0.1
_RATE_PERIOD_S = 1.0
_RATE_WINDOW_S = 60.0
_FILE_PERIOD_S = 2.0
_COUNTED_QUIET_S = 5.0  # doubled after each line, up to the next number
_SHOWN_LEFT = 0.05  # share of the parts, from which on the time left is shown
_QUIET_S = 60.0  # without a bar; then a line says how far the run is
_NOTABLE_WAIT = 0.1
_COMMAND = "python -m runner"
_BOUND = "\N{NO-BREAK SPACE}"


class Console:
    """Shows a run on a terminal (colours, a live bar) or in a pipe or file (plain lines), and appends it to a log file.

    Display problems never raise: with a closed pipe, a narrow terminal, a limited encoding or a full disk it shows less.
    There is no background thread: `advance` moves the bar.

    Args:
        log_file: gets every line, with the local time and without colours; None for no log.
        progress: False disables the live bar; otherwise there is one if `stream` is a terminal.
        stream: where to show; None for the current `sys.stdout`.
    """

    def __init__(self, log_file: Path | None, progress: bool | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._log_file = log_file
        self._log: FileIO | None = None  # open, as opening it for each line would take longer than writing
        self._terminal: Terminal | None = None
        self._wants_bar = progress is not False
        self._silent = self._running = False
        self._due = float("inf")
        self._shown_at = perf_counter()
        self._marks: deque[tuple[float, int]] = deque()
        self._progress = Progress()
        self._progress_file: Path | None = None
        self._file_due = 0.0
        self._best: Callable[[], tuple[float, int] | None] = lambda: None
        self._warnings = list[str]()
        with contextlib.suppress(AttributeError, ValueError, OSError):  # a stream that is None, closed, or not of text
            # Only a terminal gets a bar; a file or a pipe gets lines
            if self._stream.isatty() and os.environ.get("TERM", "").lower() not in {"dumb", "unknown"}:
                from runner.tracking.terminal import Terminal

                self._terminal = Terminal(self._stream)
            # What the stream cannot express becomes a question mark
            self._stream.reconfigure(errors="replace")  # type: ignore[union-attr]

    # Text

    def header(self, title: str, rows: list[tuple[str, str, str]]) -> None:
        """Show what runs and each choice that was made: rows of (label, value, reason); the reason may be empty."""
        rows = [(clean(label), clean(mask_text(value)), clean(reason)) for label, value, reason in rows]
        left = max((len(label) for label, _, _ in rows), default=0)
        middle = max((len(value) for _, value, reason in rows if reason), default=0)
        lines: list[Line] = [[(clean(mask_text(title)), "bold")]]
        for label, value, reason in rows:
            why = f"  ({reason})" if reason else ""
            lines.append([(f"  {label.ljust(left)}  ", "cyan"), (value.ljust(middle), "bold"), (why, "dim")])
        room = (self._room or 0) - left - 4
        shown = [lines[0], *(part for line in lines[1:] for part in _folded(line, left + 4, room))]
        self._show(lines, shown)

    def line(self, text: str, style: str = "") -> None:
        """Show one or several lines."""
        self._show([[(line, style)] for line in mask_text(clean(text)).split("\n")])

    def warn(self, text: str) -> None:
        """Show `text` as a warning."""
        self._warnings.append(clean(mask_text(text)).partition("\n")[0])
        self._sentences(f"warning: {text}", "yellow")

    def error(self, text: str) -> None:
        """Show `text` as an error."""
        self._sentences(f"error: {text}", "bold red")

    def _sentences(self, text: str, style: str) -> None:
        """Show lines that a terminal breaks between words, except those with a command, which are copied whole."""
        lines = mask_text(clean(text)).split("\n")
        parts = [part for line in lines for part in ([line] if _COMMAND in line else wrapped(line, self._room))]
        self._show([[(line, style)] for line in lines], [[(part, style)] for part in parts])

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Show a table; each row has as many cells as there are columns."""
        title, rows = mask_text(title), [[mask_text(cell) for cell in row] for row in rows]
        plain = [*([clean(title)] if title else []), *aligned(columns, rows)]
        self._emit(plain, lambda terminal: terminal.table(title, columns, rows))

    # Progress

    @property
    def size(self) -> tuple[int, int] | None:
        """Columns and rows of the terminal; None if there is none."""
        return None if self._terminal is None else self._terminal.size

    def live(self, shown: RenderableType) -> None:
        """Draw something at the bottom of the terminal instead of what was drawn there before; nothing without a terminal."""
        self._display(lambda terminal: terminal.draw(shown))

    def start(
        self,
        progress: Progress,
        best: Callable[[], tuple[float, int] | None] = lambda: None,
        file: Path | None = None,
    ) -> None:
        """Start to show progress, from what is known of it before the first step.

        Args:
            best: gives the value of its metric in the best evaluation so far and the step of that, by the rule of the run.
            file: gets the progress for other processes, at most every 2 s.
        """
        self._progress, self._best = progress, best
        # Names and numbers of the best evaluation continue after a resume
        progress.best, progress.best_step = best() or (None, None)
        self._progress_file, self._file_due = file, 0.0
        # The speed before a pause or a resume says nothing about that of now
        self._marks.clear()
        self._running = True
        self._write_progress()
        # The clock starts with the first `advance`: the first step compiles and warms up, so it does not show the rate.
        self._due = 0.0
        if self._bar_on:
            self._draw("starting")

    def advance(self, global_step: int, epoch: int) -> None:
        """Record that `global_step` steps are complete, in epoch `epoch` (from 1); cheap, because every step calls it."""
        if perf_counter() >= self._due:
            self._tick(global_step, epoch)

    def metrics(self, split: str, values: dict[str, float], global_step: int, epoch: int) -> None:
        """Show metrics after `global_step` optimizer steps, those of `train` in the bar if there is one, others on a line."""
        shown = [metric(name, values[name]) for name in in_order(values)]
        shown = [" ".join(["train", *shown[:1]]), *shown[1:]] if split == "train" else [f"[{split}]", *shown]
        shown = [*self._position(global_step, epoch), *shown]
        progress = self._progress
        if split == "train":
            progress.train = dict(values)
            line = "  ".join([*shown, *self._eta(global_step)])
            # Training shows in the bar, where there is one
            if self._bar_on:
                self._write_log([line])
            else:
                self._show([[(line, "")]])
            return
        if (last := values.get(progress.metric.removeprefix("val/"))) is not None and split == "val":
            progress.last, (progress.best, progress.best_step) = last, self._best() or (None, None)
        if self._bar_on:  # steps since the last drawing were too few to move the bar
            self._tick(global_step, epoch)
        # An evaluation stays on the screen. A name and its value stay together when a line is wrapped
        bound = "  ".join(cell.replace(" ", _BOUND) for cell in shown)
        lines = [line.replace(_BOUND, " ") for line in wrapped(bound, self._room, "  ")]
        self._show([[("  ".join(shown), "")]], [[(line, "bold cyan")] for line in lines])

    def stop(self) -> None:
        """Remove the bar and end progress; may be called twice, or without `start`."""
        self._running = False
        self._due = float("inf")
        if self._progress_file is not None:  # from now on, the summary says everything
            with contextlib.suppress(OSError):
                self._progress_file.unlink(missing_ok=True)
            self._progress_file = None
        self._display(lambda terminal: terminal.stop())

    def close(self) -> None:
        """Close the log file, which gets no further line."""
        self._log_file = None
        if self._log is not None:
            self._log.close()

    @contextlib.contextmanager
    def counting(self, what: str, total: int, costs: Sequence[float] = ()) -> Iterator[Callable[..., None]]:
        """Gives a function to call before each of `total` parts, with its name; shows them, and the time left by their `costs`."""
        begun, due, quiet, began, costs = -1, 0.0, _COUNTED_QUIET_S, perf_counter(), costs or [1.0] * total

        def begin(name: str = "") -> None:
            nonlocal begun, due, quiet
            begun += 1
            texts, done = [name] if name else [], sum(costs[:begun])
            if done >= _SHOWN_LEFT * sum(costs) > 0:
                texts.append(f"eta {duration((perf_counter() - began) * (sum(costs) / done - 1))}")
            # Without a terminal, lines become rarer the longer it takes
            if self._terminal is None and perf_counter() - self._shown_at >= quiet:
                quiet = min(2 * quiet, _QUIET_S)
                self.line("  ".join([what, f"{begun}/{total}", *texts]))
            elif self._terminal is not None and (name or perf_counter() >= due):  # short parts would flood the terminal
                due = perf_counter() + _COUNTED_S
                self._display(lambda terminal: terminal.bar(what, begun / max(total, 1), [f"{begun}/{total}", *texts]))

        try:
            yield begin
        finally:
            self._display(lambda terminal: terminal.stop())

    @property
    def _room(self) -> int | None:
        return None if self._terminal is None else self._terminal.size[0]

    @property
    def _bar_on(self) -> bool:
        return self._running and self._wants_bar and self._terminal is not None

    def _tick(self, global_step: int, epoch: int) -> None:
        now = perf_counter()
        if not self._marks or now - self._marks[-1][0] >= _RATE_PERIOD_S:
            self._marks.append((now, global_step))
            while len(self._marks) > 2 and now - self._marks[0][0] > _RATE_WINDOW_S:
                self._marks.popleft()
        self._progress.global_step, self._progress.epoch = global_step, epoch
        self._write_progress()
        if self._bar_on:
            self._draw(self._position(global_step, epoch)[0])
        elif now - self._shown_at >= _QUIET_S:
            self.line("  ".join([*self._position(global_step, epoch), *self._eta(global_step)]))
        self._due = perf_counter() + (_BAR_PERIOD_S if self._bar_on else _RATE_PERIOD_S)

    def _write_progress(self) -> None:
        if self._progress_file is not None and (now := perf_counter()) >= self._file_due:
            self._file_due = now + _FILE_PERIOD_S
            self._progress.seconds_left = self._seconds_left(self._progress.global_step)
            write_progress(self._progress_file, self._progress)

    def _draw(self, before: str) -> None:
        """Draw the bar, with the epoch, the monitored metric, memory and the last warning below it."""
        progress, below, texts = self._progress, list[Line](), list[str]()
        # Of the gauges, the bar has room for one: if waiting costs a tenth of the time.
        shown = [name for name in in_order(progress.train) if name not in HARDWARE_METRICS]
        shown += ["data_wait"] if (progress.train.get("data_wait") or 0.0) >= _NOTABLE_WAIT else []
        after = [metric(name, progress.train[name]) for name in shown]
        # A narrow terminal crops the line at its right end, so what people look for most comes first.
        after[1:1] = self._eta(progress.global_step)
        after.insert(0, self._position(progress.global_step, 0)[1])
        if progress.last is not None:
            at = "" if progress.best_step is None else f", {metric('best', progress.best)} at step {progress.best_step}"
            texts.append(metric(progress.metric, progress.last) + at)
        if "peak_memory_mib" in progress.train:
            texts.append(metric("peak_memory_mib", progress.train["peak_memory_mib"]))
        below += [[(f"  {'  '.join(texts)}", "")]] if texts else []
        if self._warnings:
            below.append([(f"  {amount(len(self._warnings), 'warning')}: {self._warnings[-1]}", "yellow")])
        epoch = None  # the part of it that is complete; None for a single epoch or an unknown number of steps
        if progress.total_epochs > 1 and progress.total_steps > 0:
            steps = max(1, round(progress.total_steps / progress.total_epochs))
            epoch = (progress.global_step - (max(progress.epoch, 1) - 1) * steps) / steps
        self._display(lambda terminal: terminal.bar(before, progress.share, after, epoch=epoch, below=below))

    def _position(self, global_step: int, epoch: int) -> list[str]:
        epochs, steps = (
            f"/{total}" * (total > 0) for total in (self._progress.total_epochs, self._progress.total_steps)
        )
        return [f"epoch {epoch}{epochs}", f"step {global_step}{steps}"]

    def _eta(self, global_step: int) -> list[str]:
        left = self._seconds_left(global_step)
        return [] if left is None else [f"eta {duration(left)}"]

    def _seconds_left(self, global_step: int) -> float | None:
        total = self._progress.total_steps
        if not self._running or total <= 0 or not self._marks or global_step <= self._marks[0][1]:
            return None
        time_then, step_then = self._marks[0]
        return max(0, total - global_step) * (perf_counter() - time_then) / (global_step - step_then)

    def _show(self, lines: list[Line], on_terminal: list[Line] | None = None) -> None:
        plain = ["".join(text for text, _ in line).rstrip() for line in lines]
        self._emit(plain, lambda terminal: terminal.lines(on_terminal or lines))

    def _emit(self, plain: list[str], draw: Callable[[Terminal], None]) -> None:
        self._shown_at = perf_counter()
        self._write_log(plain)
        self._display(draw, plain)

    def _display(self, draw: Callable[[Terminal], None], plain: Sequence[str] = ()) -> None:
        """Draw on the terminal, or write plain lines where there is none. Nothing that fails here may end a run."""
        if self._silent:
            return
        try:
            if self._terminal is not None:
                draw(self._terminal)
            elif plain:
                self._stream.write("\n".join(plain) + "\n")
                self._stream.flush()
        except Exception as error:
            terminal, self._terminal = self._terminal, None
            if terminal is not None:
                with contextlib.suppress(Exception):  # gives back stdout and stderr, which the bar redirects
                    terminal.stop()
            # A terminal that is there, but cannot be drawn on, gets plain lines from here on
            if terminal is not None and not isinstance(error, OSError):
                self._display(draw, plain)
                return
            self._silent = True
            # A later print by other code, or the interpreter's last flush, would still end the process with an error.
            for descriptor, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
                if self._stream is stream:
                    with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
                        os.dup2(nowhere.fileno(), descriptor)

    def _write_log(self, lines: list[str]) -> None:
        if self._log_file is None:
            return
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        text = "".join(f"{now}  {line}".rstrip() + "\n" for line in lines)
        try:
            if self._log is None:
                with writing(self._log_file):
                    self._log = self._log_file.open("ab", buffering=0)
                weakref.finalize(self, self._log.close)
            append(self._log, text.encode("utf-8", "backslashreplace"))
        except UserError:
            unwritable, self._log_file = self._log_file, None
            self.warn(f"{unwritable} cannot be written; the run continues without it")


def _folded(line: Line, indent: int, room: int) -> list[Line]:
    """A row of a header (label, value, reason) in as many lines as it needs, broken between words."""
    (label, style), *cells = line
    if len("".join(text for text, _ in cells).rstrip()) <= room:
        return [line]
    parts = [(part, kind) for text, kind in cells for part in wrapped(text.strip(), max(room, 1))]
    return [[(" " * indent if at else label, style), part] for at, part in enumerate(parts)]


class SkippedSteps:
    """A callback that warns of skipped steps and writes their batches, as `nonfinite/step_0000000012.pt` in the run directory."""

    def __init__(self, directory: Path, console: Console) -> None:
        self._folder, self._console = directory / "nonfinite", console
        self._undiagnosed = 0

    def on_step_skipped(self, loop: Any, step: int, diagnosis: Any) -> None:
        """Report a step; `diagnosis` is None if its cause was not examined."""
        if diagnosis is None:
            self._undiagnosed += 1
            if (self._undiagnosed & (self._undiagnosed - 1)) == 0:  # 1, 2, 4, 8, ...
                self._console.warn(f"skipped step {step} ({self._undiagnosed} skipped since the last diagnosis)")
            return
        saved = self._save(step, diagnosis.batch) if diagnosis.batch else ""
        self._console.warn(f"{diagnosis}; skipped this step{saved}")

    def _save(self, step: int, batch: dict[str, Any]) -> str:
        import torch

        path = self._folder / f"step_{step:010d}.pt"
        try:
            self._folder.mkdir(exist_ok=True)
            torch.save(batch, path)
        except (OSError, RuntimeError) as error:  # must not hide the failure that led here
            return f"; its batch could not be written to {path}: {error}"
        return f"; its batch is in {path}"
