"""Draw `docs/assets/run.svg`: a real training on digits, as a terminal shows it while it runs.

python scripts/picture.py
"""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import select
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

WORDS = ["train", "seed=1", "epochs=12"]
MOMENT = 0.8  # of the drawings of the bar
COLUMNS = 104
TARGET = Path(__file__).resolve().parents[1] / "docs" / "assets" / "run.svg"


def record(words: list[str]) -> str:
    """What `python -m runner` writes to a terminal, escape codes included."""
    with tempfile.TemporaryDirectory() as folder:
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(folder)
            os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            os.execv(sys.executable, [sys.executable, "-m", "runner", *words])
        chunks = []
        while select.select([terminal], [], [], 120)[0]:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            chunks.append(chunk)
        os.waitpid(child, 0)
    return b"".join(chunks).decode()


def screen(output: str) -> str:
    """The lines at a moment of the run: those that stay, and the bar with the lines below it."""
    frames = re.split(r"\r(?=\x1b\[2K)", output.replace("\r\n", "\n"))
    stay: list[str] = []
    for frame, following in itertools.pairwise(frames[: int(MOMENT * len(frames))]):
        drawn = following.count("\x1b[2K")  # lines that are erased before the next drawing
        lines = re.sub(r"\x1b\[(2K|1A)", "", frame).split("\n")
        stay, bar = stay + lines[:-drawn], lines[-drawn:]
    return "\n".join([*stay, *bar, ""])  # the last line of a picture may be cropped


def main() -> None:
    """Record and draw."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ python -m runner {' '.join(WORDS)}", style="bold"))
    console.print(Text.from_ansi(screen(record(WORDS))))
    drawn = console.export_svg(title="python -m runner train")
    # The picture must not load fonts from elsewhere.
    TARGET.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
