"""Damage to the files of `data.cache=disk`, before a run and while it is used: right bits or a message, never a crash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from faults.disk import pictures
from faults.jobs import directory, whole
from faults.lives import Life, Prepare, fingerprint, live
from faults.phases import telling
from faults.table import Bench, Row

_READERS = {
    "gathered": (),
    "in RAM": ("data.placement=ram",),
    "by a worker": ("data.placement=disk", "data.num_workers=1"),
}
Damage = Callable[[Path, Random], None]


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    photos, folder = bench.folder / "pictures", bench.folder / "pictures.cache"
    pictures(photos)
    words = whole((
        "data=image_folder", f"data.root={photos}", "data.image_size=16", "data.num_workers=0", "epochs=3",
        "model.dropout=0.2", "data.batch_size=16",
    ))  # fmt: skip
    plain = live([*words, directory(bench.folder / "plain")], bench.folder / "plain.log")
    assert plain.status == 0, plain.said()[-2000:]
    expected = fingerprint(bench.folder / "plain")
    words = (*words, "data.cache=disk")
    made = live([*words, directory(bench.folder / "made")], bench.folder / "made.log")
    assert (made.status, fingerprint(bench.folder / "made")) == (0, expected), made.said()[-2000:]
    kept = shutil.copytree(folder, bench.folder / "kept")
    rows = []
    for when, kinds in (("damaged before a run", BEFORE), ("removed or replaced while a run uses it", IN_USE)):
        row = Row("cache", f"the cache of data.cache=disk {when}, in {len(kinds)} ways")
        for number in range(bench.counts["cache"]):
            kind, reader = list(kinds)[number % len(kinds)], list(_READERS)[number // len(kinds) % len(_READERS)]
            shutil.rmtree(folder)
            shutil.copytree(kept, folder)  # with the times of the files
            run, draw = bench.folder / f"{when.replace(' ', '_')}_{number}", Random(bench.draw.random())
            path, prepare = (
                draw.choice(sorted(each for each in folder.iterdir() if each.suffix in (".json", ".npy"))),
                None,
            )
            if kinds is BEFORE:
                kinds[kind](path, draw)
            else:
                prepare = _hurting(kinds[kind], path, draw)
            life = live([*words, *_READERS[reader], directory(run)], run.with_suffix(".log"), prepare)
            broken = _wrong(life, run, expected, path)
            row.count(f"{kind} of {path.name}, {reader}: {broken}" if broken else "", bench.say)
        rows.append(row)
    return rows


def _hurting(hurt: Damage, path: Path, draw: Random) -> Prepare:
    """Damage the file after the first batch of a run."""

    def tell(phase: str, at: int) -> None:
        if (phase, at) == ("after fetch", 0):
            hurt(path, draw)

    return lambda: telling(tell)


def _wrong(life: Life, run: Path, expected: str, path: Path) -> str:
    """What was not as promised: the right bits, or a message that names the cache."""
    said = life.said()
    if "Traceback" in said or life.status not in (0, 2):
        return f"status {life.status}: {said[-1500:]}"
    if life.status != 0:
        named = path.parent.name in said and "error: " in said
        return "" if named else f"the message does not name the cache: {said[-800:]}"
    found = fingerprint(run)
    return "" if found == expected else f"{found} instead of {expected}"


def _change(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def _replace(path: Path, data: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(data)
    os.replace(other, path)


def _fifo(path: Path, draw: Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, draw: Random) -> None:
    path.unlink()
    path.mkdir()


IN_USE: dict[str, Damage] = {
    "removal": lambda path, draw: path.unlink(),
    "another file in its place": lambda path, draw: _replace(path, draw.randbytes(9999)),
}
BEFORE: dict[str, Damage] = {
    **IN_USE,
    "another byte": lambda path, draw: _change(path, draw.randrange(path.stat().st_size), draw.randbytes(1)),
    "other bytes": lambda path, draw: _change(path, 0, draw.randbytes(path.stat().st_size)),
    "truncation": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
    "appended bytes": lambda path, draw: _change(path, path.stat().st_size, draw.randbytes(draw.randrange(1, 9999))),
    "an empty file": lambda path, draw: os.truncate(path, 0),
    "a FIFO": _fifo,
    "a folder": _folder,
}
