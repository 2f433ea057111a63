"""Small files that want to become large: how much memory the program takes to read each, measured in a separate process."""

from __future__ import annotations

import os
from pathlib import Path

from faults.jobs import directory, whole
from faults.lives import Prepare, begin, live
from faults.memory_files import BOMBS, LARGEST, Bomb, Contents
from faults.table import Bench, Row

_MOST = 100  # MiB beyond what the program has after its imports
_SMALL = ("epochs=1", "max_steps=1", "callbacks=none", "evaluate.test=false")


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    from runner.checkpoint.file import read

    row = Row("memory", f"read with at most {_MOST} MiB, or refused")
    ours = bench.folder / "ours"
    first = live([*whole(_SMALL), directory(ours)], bench.folder / "ours.log")
    assert first.status == 0, first.said()[-2000:]
    contents = read(ours / "checkpoints" / "last.safetensors")
    count = bench.counts["memory"]
    chosen = bench.draw.sample(BOMBS, count) if count else BOMBS
    most = 0.0
    for number, bomb in enumerate(chosen):
        broken, taken = attempt(bomb, bench.folder / str(number), contents)
        most = max(most, taken)
        row.count(f"{bomb.what}: {broken}" if broken else "", bench.say)
    row.note = f"files of at most 1 MiB; the largest peak was {most:.0f} MiB"
    return [row]


def attempt(bomb: Bomb, folder: Path, contents: Contents) -> tuple[str, float]:
    """Read one file; gives what was not as it should be, or an empty string, and the peak of memory in MiB."""
    folder.mkdir(parents=True)
    words = bomb.make(folder, contents)
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    assert max(sizes) <= LARGEST, f"{bomb.what} is a file of {max(sizes)} bytes"
    peak = folder / "peak"
    if bomb.verb == "eval":
        words += [f"output={folder / 'evaluation'}", "split=val"]
    else:
        words += [*whole(_SMALL), directory(folder / "run")]
    life = begin(words, folder / "log", measuring(peak), bomb.verb)
    status, said = life.wait(), life.said()
    taken = float(peak.read_text()) if peak.exists() else float("inf")
    if status != 2 or "Traceback" in said or "error: " not in said:
        return f"status {status} instead of 2: {said[-800:]}", taken
    return ("" if taken <= _MOST else f"took {taken:.0f} MiB"), taken


def measuring(path: Path) -> Prepare:
    """Write the largest resident memory into a file when the process ends, beyond what it has now, in MiB.

    A forked process maps the pages of libraries again as it uses them; those count as imports, not as reading.
    """

    def prepare() -> None:
        leave = os._exit
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _resident("VmRSS") - _resident("RssFile")

        def measure_and_leave(status: int) -> None:
            path.write_text(str(_resident("VmHWM") - _resident("RssFile") - before))
            leave(status)

        os._exit = measure_and_leave  # type: ignore[assignment]

    return prepare


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
