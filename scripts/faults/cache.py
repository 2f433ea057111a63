"""Damage to the file of `data.cache=disk`, before a run and while it is used: right bits or a message, never a crash."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from faults.disk import pictures
from faults.jobs import directory, whole
from faults.lives import Life, Prepare, fingerprint, live
from faults.phases import telling
from faults.table import Bench, Row

_EDGE = 16
_SAMPLES = 40
_IMAGES = _SAMPLES * 3 * _EDGE**2
_READERS = {
    "gathered": (),
    "in RAM": ("data.placement=ram",),
    "by a worker": ("data.placement=disk", "data.num_workers=1"),
}
Damage = Callable[[Path, Random], None]


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    photos = bench.folder / "pictures"
    pictures(photos, _SAMPLES)
    words = whole((
        "data=image_folder", f"data.root={photos}", f"data.image_size={_EDGE}", "data.num_workers=0", "epochs=3",
        "model.dropout=0.2", "data.batch_size=16",
    ))  # fmt: skip
    plain = live([*words, directory(bench.folder / "plain")], bench.folder / "plain.log")
    assert plain.status == 0, plain.said()[-2000:]
    expected = fingerprint(bench.folder / "plain")
    words = (*words, "data.cache=disk")
    made = live([*words, directory(bench.folder / "made")], bench.folder / "made.log")
    (path,) = (bench.folder / "pictures.cache").glob("*.images")
    whole_file = path.read_bytes()
    assert (made.status, fingerprint(bench.folder / "made")) == (0, expected), made.said()[-2000:]
    rows = []
    for when, kinds in (("before a run", BEFORE), ("while a run uses it", IN_USE)):
        row = Row("cache", f"the cache of data.cache=disk damaged {when}, in {len(kinds)} ways")
        for number in range(bench.counts["cache"]):
            kind, reader = list(kinds)[number % len(kinds)], list(_READERS)[number // len(kinds) % len(_READERS)]
            run = bench.folder / f"{when.replace(' ', '_')}_{number}"
            _put_back(path, whole_file)
            hurt, draw = kinds[kind], Random(bench.draw.random())
            prepare = None
            if when == "before a run":
                hurt(path, draw)
            else:
                prepare = _hurting(hurt, path, draw)
            damaged = path.is_file() and path.read_bytes() != whole_file
            life = live([*words, *_READERS[reader], directory(run)], run.with_suffix(".log"), prepare)
            broken = _wrong(life, run, expected, path, named=damaged) or _left(path, whole_file)
            row.count(f"{kind}, {reader}: {broken}" if broken else "", bench.say)
        rows.append(row)
    return rows


def _put_back(path: Path, data: bytes) -> None:
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _hurting(hurt: Damage, path: Path, draw: Random) -> Prepare:
    """Damage the file after the first batch of a run."""

    def tell(phase: str, at: int) -> None:
        if (phase, at) == ("after fetch", 0):
            hurt(path, draw)

    return lambda: telling(tell)


def _wrong(life: Life, run: Path, expected: str, path: Path, named: bool) -> str:
    """What was not as promised: the right bits, or a message that names the file."""
    said = life.said()
    if "Traceback" in said or life.status not in (0, 1, 2):
        return f"status {life.status}: {said[-1500:]}"
    if life.status != 0:
        return "" if path.name in said and "error: " in said else f"the message does not name the file: {said[-800:]}"
    if named and path.name not in said:
        return f"nothing was said: {said[-800:]}"
    found = fingerprint(run)
    return "" if found == expected else f"{found} instead of {expected}"


def _left(path: Path, whole_file: bytes) -> str:
    """What is wrong with the file afterwards: a run that opens it must find every image that is not as it was."""
    from runner.data.cache_file import CachedImages, Unusable

    if not path.is_file():
        return ""
    data, each = path.read_bytes(), 3 * _EDGE**2
    try:
        cached = CachedImages(path)
    except Unusable:
        return ""
    places = {number: slice(number * each, (number + 1) * each) for number in range(_SAMPLES)}
    believed = [
        number
        for number, place in places.items()
        if data[place] != whole_file[place] and not cached.images.problem(number)
    ]
    return f"the images {believed} in {path} are other ones and would be believed" if believed else ""


def _change(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def _flip(path: Path, place: int, draw: Random) -> None:
    with path.open("rb") as file:
        file.seek(place)
        byte = file.read(1)[0]
    _change(path, place, bytes([byte ^ draw.randrange(1, 256)]))


def _replace(path: Path, data: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(data)
    os.replace(other, path)


IN_USE: dict[str, Damage] = {
    "a byte of an image": lambda path, draw: _flip(path, draw.randrange(_IMAGES), draw),
    "a block of zeros": lambda path, draw: _change(path, draw.randrange(_IMAGES - 1000), bytes(1000)),
    "truncation": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
    "removal": lambda path, draw: path.unlink(),
    "another file in its place": lambda path, draw: _replace(path, draw.randbytes(9999)),
    "a byte of the index": lambda path, draw: _flip(path, draw.randrange(_IMAGES, path.stat().st_size), draw),
    "a byte of the ending": lambda path, draw: _flip(path, path.stat().st_size - draw.randrange(1, 29), draw),
    "appended bytes": lambda path, draw: _change(path, path.stat().st_size, draw.randbytes(draw.randrange(1, 9999))),
}


def _flip_many(path: Path, draw: Random) -> None:
    for _ in range(8000):
        _flip(path, draw.randrange(_IMAGES), draw)


def _fifo(path: Path, draw: Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, draw: Random) -> None:
    path.unlink()
    path.mkdir()


BEFORE = {
    **IN_USE,
    "8,000 bytes": _flip_many,
    "an empty file": lambda path, draw: os.truncate(path, 0),
    "a FIFO": _fifo,
    "a folder": _folder,
}
