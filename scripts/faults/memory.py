"""Small files that want to become large: how much memory the program takes to read each, measured in a separate process."""

from __future__ import annotations

import gzip
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.forging import forged, sealed_header
from faults.jobs import directory, whole
from faults.lives import Prepare, begin, live
from faults.table import Bench, Row

Contents = dict[str, Any]
LARGEST = 2**20  # bytes of each file


@dataclass
class Bomb:
    """A small file that wants to become a large one.

    Attributes:
        what: what it is.
        verb: `eval` for a checkpoint, `train` for anything else.
        make: writes it into a folder, and gives the words that read it. It is given the contents of a good checkpoint.
    """

    what: str
    verb: str
    make: Callable[[Path, Contents], list[str]]


def _sent(data: bytes) -> Callable[[Path, Contents], list[str]]:
    def make(folder: Path, contents: Contents) -> list[str]:
        (folder / "sent.safetensors").write_bytes(data)
        key = "ckpt_path" if b'"sha256":"' in data[:200] else "init_from"
        return [f"{key}={folder / 'sent.safetensors'}"]

    return make


def _config(text: str) -> Callable[[Path, Contents], list[str]]:
    def make(folder: Path, contents: Contents) -> list[str]:
        return _sent(forged(contents | {"config": text}))(folder, contents)

    return make


def _headed(text: str) -> Callable[[Path, Contents], list[str]]:
    """A checkpoint of nothing but a header."""
    head = '{"__metadata__":{"format":"2","sha256":"' + "0" * 64 + '"'
    return _sent(sealed_header((head + text).encode()))


def _saying(**texts: str) -> Callable[[Path, Contents], list[str]]:
    """A checkpoint with other texts in its metadata."""
    return lambda folder, contents: _sent(forged(contents, **texts))(folder, contents)


def _header(text: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text


def _images(folder: Path, contents: Contents) -> list[str]:
    """MNIST whose images are a compressed gigabyte."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix in ("train", "t10k"):
        head = struct.pack(">4B3I", 0, 0, 8, 3, 2**20 - 20, 32, 32)
        with gzip.open(raw / f"{prefix}-images-idx3-ubyte.gz", "wb", compresslevel=9) as file:
            file.write(head)
            for _ in range(2**8):
                file.write(b"\0" * 2**21)
        with gzip.open(raw / f"{prefix}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">4BI", 0, 0, 8, 1, 60000) + b"\0" * 60000)
    return ["data=mnist", f"data.root={folder}"]


def _laughing() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    return "\n".join(lines + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)])


BOMBS = [
    Bomb("weights: safetensors of 20,000 empty tensors", "train", _sent(_header(json.dumps(
        {f"{n:x}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(16_000)}).encode()))),
    Bomb("weights: safetensors whose header claims 2**60 bytes", "train", _sent(_header(b"{}", 2**60))),
    Bomb("weights: safetensors of a tensor of 2**40", "train", _sent(_header(json.dumps(
        {"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()))),
    Bomb("weights: safetensors with 100,000 levels", "train", _sent(_header(b'{"a":' + b"[" * 100_000))),
    Bomb("checkpoint: a header of 340,000 empty lists", "eval", _headed('},"a":[' + "[]," * 335_000 + "0]}")),
    Bomb("checkpoint: a header of 140,000 mappings", "eval", _headed('},"a":[' + '{"":1},' * 135_000 + "0]}")),
    Bomb("checkpoint: a header of 12,000 empty tensors", "eval", _headed("}," + json.dumps(
        {f"{n:x}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(12_000)})[1:])),
    Bomb("checkpoint: a part of 300,000 empty mappings", "eval", _saying(metrics="[" + "{}," * 300_000 + "0]")),
    Bomb("checkpoint: a part of 70,000 sets", "eval", _saying(rng="[" + '{"$set":[]},' * 70_000 + "0]")),
    Bomb("checkpoint: a part that has one tensor 35,000 times", "eval", _saying(
        rng="[" + '{"$tensor":"rng/torch"},' * 35_000 + "0]")),
    Bomb("config: YAML of 130,000 numbers", "eval", _config("a: [" + "1," * 130_000 + "]")),
    Bomb("config: YAML of 65,000 mappings", "eval", _config("a: [" + "{}," * 65_000 + "]")),
    Bomb("config: YAML of 30,000 keys", "eval", _config("a: {" + "".join(f"k{n:x}: 1, " for n in range(26_000)) + "}")),
    Bomb("config: YAML aliases", "eval", _config(_laughing())),
    Bomb("config: 100,000 levels of YAML", "eval", _config("a: " + "[" * 100_000)),
    Bomb("config: text of 900,000 letters", "eval", _config("a: " + "x" * 900_000)),
    Bomb("data: images compressed to a thousandth", "train", _images),
]  # fmt: skip
assert len({bomb.what for bomb in BOMBS}) == len(BOMBS), "each file has a name of its own"

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
