"""Truncated and altered checkpoints: none is believed, none runs anything."""

from __future__ import annotations

from pathlib import Path

from faults.jobs import directory, whole
from faults.lives import live
from faults.table import Bench, Row


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    life = live([*whole(("max_steps=4",)), directory(bench.folder / "run")], bench.folder / "run.log")
    assert life.status == 0, life.said()[-2000:]
    checkpoint = bench.folder / "run" / "checkpoints" / "last.safetensors"
    data, damaged = checkpoint.read_bytes(), bench.folder / "damaged.safetensors"
    short, flipped = Row("damage", "truncated at a random length"), Row("damage", "one random byte altered")
    for _ in range(bench.counts["truncations"]):
        damaged.write_bytes(data[: bench.draw.randrange(len(data))])
        short.count(_believed(damaged), bench.say)
    for _ in range(bench.counts["flips"]):
        place, altered = bench.draw.randrange(len(data)), bytearray(data)
        altered[place] ^= bench.draw.randrange(1, 256)
        damaged.write_bytes(altered)
        flipped.count(_believed(damaged), bench.say)
    return [short, flipped, _passed_over(bench, checkpoint)]


def _believed(path: Path) -> str:
    """What a damaged file was not found to be, or an empty string."""
    from runner.checkpoint.file import DamagedCheckpoint, read

    try:
        read(path)
    except DamagedCheckpoint as error:
        return "" if path.name in str(error) else f"the message does not name the file: {error}"
    return "a damaged checkpoint was read"


def _passed_over(bench: Bench, checkpoint: Path) -> Row:
    """The program itself says which file is damaged, and takes the newest valid one."""
    row = Row("damage", "resumed beside a damaged last.safetensors")
    run = checkpoint.parent.parent
    data = checkpoint.read_bytes()
    checkpoint.unlink()  # it is a link to the newest step
    checkpoint.write_bytes(data[: len(data) // 2])
    words = [f"ckpt_path={run}", "max_steps=5", directory(bench.folder / "resumed")]
    life = live(words, bench.folder / "resumed.log")
    told = "last.safetensors: " in life.said() and "resumed from" in life.said()
    row.count("" if life.status == 0 and told else f"status {life.status}: {life.said()[-800:]}", bench.say)
    return row
