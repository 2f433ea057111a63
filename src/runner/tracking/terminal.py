"""Drawing on a terminal with rich; imported only if there is one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from runner.tracking.formats import Line, bar_texts, encodable

_WIDEST_BAR = 30
_NARROWEST_BAR = 6
_HIGH_ENOUGH = 10  # rows


class _Rich(RichConsole):
    """Rich, without two behaviours that do not suit a training run."""

    def on_broken_pipe(self) -> None:
        # Rich would end the process; the run continues without a display.
        raise BrokenPipeError

    def show_cursor(self, show: bool = True) -> bool:
        # A live bar hides the cursor, and a killed process could not restore it.
        return False


class Terminal:
    """Lines and one live bar on a terminal; printed text appears above the bar.

    Raises:
        OSError: the terminal or pipe is gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None)
        self._rich = _Rich(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        return self._rich.width, self._rich.height

    def lines(self, lines: Sequence[Line]) -> None:
        """Show lines of (text, style); the terminal wraps them, so that paths can be copied whole."""
        for line in lines:
            text = self._text(line)
            text.rstrip()
            self._rich.print(text, soft_wrap=True)

    def bar(self, before: str, share: float, after: str, texts: Sequence[str], *, below: Sequence[Line] = ()) -> None:
        """Draw the live line: `before`, a bar filled to `share` (0 to 1), `after`, `texts`; cropped at the right edge.

        Lines `below` it follow if the terminal is high enough.
        """
        # Not rich.progress: its columns wrap or shrink the text on a narrow terminal, where the bar has to give way.
        # One cell stays free: some terminals wrap after the last one, and the bar would move down the screen.
        room, tail = self._rich.width - 1, "  ".join([after, *texts])
        cells = min(_WIDEST_BAR, room - len(before) - len(tail) - 4)
        full, empty = bar_texts(share, cells if cells >= _NARROWEST_BAR else 0, self._encoding)
        line: Line = [(f"{before}  ", ""), (full, "green"), (empty, "dim"), ("  " * bool(full + empty) + tail, "")]
        lines = [self._text(each) for each in (line, *(below if self._rich.height >= _HIGH_ENOUGH else ()))]
        for text in lines:
            text.truncate(max(1, room), overflow="crop" if text is lines[0] else "ellipsis")
        self.draw(Text("\n").join(lines))

    def _text(self, line: Line) -> Text:
        parts = ((encodable(part, self._encoding), style) for part, style in line)
        return Text.assemble(*parts, no_wrap=True, end="")

    def draw(self, shown: RenderableType) -> None:
        """Draw something live at the bottom."""
        if self._live is None:
            # Text that other code prints goes above the bar, unless it is redirected away from this terminal.
            self._live = Live(
                Text(""),
                console=self._rich,
                auto_refresh=False,
                transient=True,
                redirect_stdout=sys.stdout is self._stream,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        self._live.update(shown, refresh=True)

    def stop(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
