"""A disk that is full: one sentence, a status that is not 0, earlier checkpoints whole, and the run goes on once there is room."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from faults.jobs import directory, whole
from faults.lives import Life, Prepare, fingerprint, leftovers, live
from faults.phases import telling
from faults.table import Bench, Row

_WORDS = ("model.dropout=0.2", "epochs=2")


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    ways = (_checkpoints, _small_disk, _logs, _cache)
    return [way(bench) for way in ways[: bench.counts["disks"] or None]]


def _limited(limit: int, batch: int = -1) -> Prepare:
    """From a micro-batch on, or from the start, no file may be larger than `limit` bytes; what is printed goes on."""

    def limit_now() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def prepare() -> None:
        _print_through_another_process()
        if batch < 0:
            limit_now()
        else:
            telling(lambda phase, at: limit_now() if (phase, at) == ("after fetch", batch) else None)

    return prepare


def _print_through_another_process() -> None:
    """Printing to a file would meet the limit as well."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()  # it outlives its parent until all is copied
        os.close(writing)
        while data := os.read(reading, 1 << 16):
            os.write(1, data)
        os._exit(0)
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)


def _not_told(life: Life) -> str:
    """What is wrong with how a run on a full disk ended, or an empty string."""
    deadline = time.perf_counter() + 5
    while "error: " not in life.said() and time.perf_counter() < deadline:
        time.sleep(0.01)
    said = life.said()
    if life.status in (0, None) or (life.status or 0) < 0:
        return f"status {life.status} on a full disk: {said[-800:]}"
    if "error: " not in said or "Traceback" in said:
        return f"no sentence: {said[-1500:]}"
    return ""


def _not_recovered(words: tuple[str, ...], run: Path, expected: str) -> str:
    """What is wrong with the checkpoints that are left, or with the run that goes on from them; or an empty string."""
    from runner.base.errors import UserError
    from runner.checkpoint import file

    try:
        file.read(run / "checkpoints" / "last.safetensors")
    except UserError as error:
        return str(error)
    if left := leftovers(run / "checkpoints"):
        return f"{run} has {', '.join(left)}"
    rest = live([*words, f"ckpt_path={run}", directory(run)], run.with_suffix(".rest.log"))
    found = fingerprint(run) if rest.status == 0 else f"status {rest.status}: {rest.said()[-1500:]}"
    return "" if found == expected else f"{run}: {found} instead of {expected}"


def _reference(words: tuple[str, ...], folder: Path) -> str:
    first = live([*words, directory(folder / "reference")], folder / "reference.log")
    assert first.status == 0, first.said()[-2000:]
    return fingerprint(folder / "reference")


def _checkpoints(bench: Bench) -> Row:
    row, folder = Row("disk", "files limited to less than a checkpoint (RLIMIT_FSIZE)"), bench.folder / "checkpoints"
    words = whole(_WORDS)
    expected = _reference(words, folder)
    size = (folder / "reference" / "checkpoints" / "last.safetensors").stat().st_size
    for number, share in enumerate((0.5, 0.05, 0.99)[: 1 if bench.counts["disks"] else None]):
        run = folder / f"run_{number}"
        # More than the summary has, so that the checkpoint is what does not fit.
        life = live([*words, directory(run)], run.with_suffix(".log"), _limited(max(8192, int(size * share)), 10))
        row.count(_not_told(life) or _not_recovered(words, run, expected), bench.say)
    return row


def _logs(bench: Bench) -> Row:
    row, folder = Row("disk", "files limited to less than metrics.jsonl and TensorBoard's"), bench.folder / "logs"
    words = whole((*_WORDS, "logger=all", "log.every_steps=1"))
    expected = _reference(words, folder)
    for number, limit in enumerate((64, 1024)):
        run = folder / f"run_{number}"
        life = live([*words, directory(run)], run.with_suffix(".log"), _limited(limit, 10))
        row.count(_not_told(life) or _not_recovered(words, run, expected), bench.say)
    return row


def _cache(bench: Bench) -> Row:
    row, folder = Row("disk", "files limited to less than the cache of data.cache=disk"), bench.folder / "cache"
    pictures(folder / "pictures")
    words = whole((
        "data=image_folder", f"data.root={folder / 'pictures'}", "data.image_size=16", "data.cache=disk",
        "data.num_workers=0", "epochs=1", "model.dropout=0.2", "data.batch_size=16",
    ))  # fmt: skip
    run, caches = folder / "run", folder / "pictures.cache"
    life = live([*words, directory(run)], run.with_suffix(".log"), _limited(20_000))
    files = [path.name for path in caches.glob("*") if path.suffix != ".lock"] if caches.exists() else []
    broken = _not_told(life) or (f"the cache's folder has {', '.join(files)}" if files else "")
    if not broken:
        without = _reference((*words, "data.cache=null"), folder)
        rest = live([*words, directory(folder / "again")], folder / "again.log")
        found = fingerprint(folder / "again") if rest.status == 0 else f"status {rest.status}: {rest.said()[-800:]}"
        broken = "" if found == without else f"{found} instead of {without}"
    row.count(broken, bench.say)
    return row


def pictures(folder: Path, count: int = 40) -> None:
    """A folder of small random images in two classes."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(count):
        path = folder / "train" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def _small_disk(bench: Bench) -> Row:
    row, folder = Row("disk", "a disk that another file fills (tmpfs)"), bench.folder / "small"
    words = whole(_WORDS)
    expected = _reference(words, folder)
    size = (folder / "reference" / "checkpoints" / "last.safetensors").stat().st_size
    with _mounted(folder / "disk") as place:
        if place is None:
            row.note = "not done: no right to mount a tmpfs here"
            return row
        run, filler = place / "run", place / "filler"
        life = live([*words, directory(run)], folder / "run.log", _filling(filler, size // 2))
        broken = _not_told(life)
        filler.unlink()
        row.count(broken or _not_recovered(words, run, expected), bench.say)
    return row


def _filling(filler: Path, left: int) -> Prepare:
    """Fill the disk of a file at a micro-batch, so that only some bytes are left."""

    def fill(phase: str, at: int) -> None:
        if (phase, at) == ("after fetch", 10):
            try:
                filler.write_bytes(b"x" * max(0, shutil.disk_usage(filler.parent).free - left))
            except OSError as error:  # a checkpoint that is being written took the rest, so less is left
                if error.errno != errno.ENOSPC:
                    raise

    return lambda: telling(fill)


@contextlib.contextmanager
def _mounted(place: Path) -> Iterator[Path | None]:
    """A disk of 8 MiB in memory, or None if it cannot be mounted."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        done = False
    try:
        yield place if done else None
    finally:
        if done:
            subprocess.run(["umount", "-l", str(place)], check=False)
