"""Files from the network: from several addresses in turn, continued after a break, and verified by their checksum."""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from socket import gaierror
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from runner.config.errors import PREEMPTED, DiskFull, UserError
from runner.data.long_work import exclusive, noticing_signals, progress

_SILENCE_S = 30.0  # how long an address may send nothing
_TRIES = 3  # connections in a row that give nothing new, after a break
_PAUSE_S = 1.0
_SLOW, _SLOW_AFTER_S = 200_000, 20.0  # bytes a second, below which another address is tried
_CHUNK = 2**18
_MB = 10**6


class FetchFailed(Exception):
    """No address gave the file; the message says why for each."""


class FetchStopped(UserError):
    """A signal asked the run to stop."""

    exit_code = PREEMPTED


class _Failed(Exception):
    """An address did not give the file."""


class _Slow(Exception):
    """An address is slow, and another one is left."""


def addresses(filename: str, mirror: str | Sequence[str] | None, published: Sequence[str]) -> list[str]:
    """Where to fetch a file, in order: from folders of the user's, then as published.

    Raises:
        UserError: if `mirror` holds something that is not an address.
    """
    folders = [mirror] if isinstance(mirror, str) else list(mirror or ())
    for folder in folders:
        if urlsplit(folder).scheme not in ("http", "https", "ftp", "file"):
            problem = f"'{folder}' is not an address"
            raise UserError("data.mirror", problem, "https://host/folder or file:///folder, in which the files are")
    return [*(f"{folder.rstrip('/')}/{filename}" for folder in folders), *published]


def has_md5(path: Path, md5: str) -> bool:
    """Whether there is a file with this checksum."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == md5
    except OSError:
        return False


def fetch(path: Path, md5: str, urls: Sequence[str]) -> None:
    """Fetch a file from the first address that gives it, unless it is there; several processes may ask for it at once.

    The file appears when it is complete and verified. What a break leaves is in `.<name>.partial`, where the next call, and
    the next address, continue it. An address that is slow comes last.

    Raises:
        FetchFailed: if no address gives it.
        UserError: if it cannot be written, or a signal asks the run to stop.
    """
    if has_md5(path, md5):
        return
    with noticing_signals() as stopped, exclusive(path, "fetches", stopped, _writing(path)) as locked:
        if has_md5(path, md5):  # another process has fetched it in the meantime
            return
        if stopped():
            raise _stopped(path)
        # Without locks, two processes must not write to one file.
        partial = path.with_name(f".{path.name}.partial" if locked else f".{path.name}.{os.getpid()}.partial")
        queue, failures = [(url, False) for url in urls], list[str]()
        while queue:
            (url, tried), *queue = queue
            try:
                _fetch_from(url, path.name, partial, md5, stopped, patient=tried or not queue)
            except (_Slow, _Failed) as error:
                problem = str(error)
                if isinstance(error, _Slow):
                    queue.append((url, True))
                else:
                    failures.append(f"{url}: {error}")
            else:
                with _writing(path):
                    partial.replace(path)
                    # Processes that wait for this lock find the file.
                    path.with_name(f".{path.name}.lock").unlink(missing_ok=True)
                return
            if queue:
                print(f"warning: {url}: {problem}; trying {queue[0][0]}", file=sys.stderr, flush=True)
        raise FetchFailed("; ".join(failures))


def unpack(archive: Path, folder: Path, files: Iterable[str]) -> None:
    """Unpack files of a tar archive into a folder, whatever folders they have in it; each appears when it is complete.

    Raises:
        UserError: if a file cannot be written.
    """
    wanted = set(files)
    with tarfile.open(archive) as packed:
        for member in packed:
            name = Path(member.name).name
            source = packed.extractfile(member) if member.isfile() and name in wanted else None
            if source is not None:
                unfinished = folder / f".{name}.{os.getpid()}.partial"
                with _writing(folder / name):
                    folder.mkdir(parents=True, exist_ok=True)
                    with unfinished.open("wb") as file:
                        shutil.copyfileobj(source, file)
                    unfinished.replace(folder / name)


def _fetch_from(url: str, name: str, partial: Path, md5: str, stopped: Callable[[], bool], patient: bool) -> None:
    """Complete `partial` from one address, with as many connections as it takes; raises `_Failed` or `_Slow`."""
    tries, most, continued = 0, _size(partial), _size(partial) > 0
    while not has_md5(partial, md5):
        broken = ""
        try:
            complete = _receive(url, name, partial, stopped, patient)
            broken = "" if complete else "the connection broke"
        except HTTPError as error:
            broken = f"HTTP {error.code} {error.reason}"
            if error.code == 416:  # Range Not Satisfiable: what there is cannot be a part of the file
                broken = ""
            elif error.code < 500 and error.code != 429:
                raise _Failed(broken) from error
        except (OSError, HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, gaierror):
                raise _Failed(f"its host was not found, check the network connection ({_said(cause)})") from error
            broken = f"no data for {_SILENCE_S:g} s" if isinstance(cause, TimeoutError) else _said(cause)
        if not broken:
            if has_md5(partial, md5):
                return
            found = f"{_size(partial):,} bytes"
            with _writing(partial):
                partial.unlink(missing_ok=True)
            if not continued:
                raise _Failed(f"another checksum than the published MD5 {md5} ({found}, deleted)")
            continued, most = False, 0  # perhaps the first part was wrong
            continue
        size = _size(partial)
        # An address that never gave anything is not asked again.
        if tries == 0 and size <= most and not broken.startswith("HTTP"):
            raise _Failed(broken)
        tries, most = 1 if size > most else tries + 1, max(size, most)
        if tries > _TRIES:
            raise _Failed(f"{broken} after {size / _MB:.1f} MB, {_TRIES} times in a row")
        _pause(_PAUSE_S * tries, partial, stopped)


def _receive(url: str, name: str, partial: Path, stopped: Callable[[], bool], patient: bool) -> bool:
    """Append to `partial` what one connection gives; returns whether that was everything."""
    have = _size(partial)
    request = Request(url, headers={"User-Agent": "runner"} | ({"Range": f"bytes={have}-"} if have else {}))
    with urlopen(request, timeout=_SILENCE_S) as response:
        # A server may ignore the range, and sends everything.
        start = have if str(response.headers.get("Content-Range", "")).startswith(f"bytes {have}-") else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None and length.isdigit() else None
        _check_space(partial, (total or start) - have)

        def say(done: int, rate: float) -> str:
            size = f"{(start + done) / _MB:,.1f}"
            text = f"fetching {name}: {size} MB, {rate / _MB:.2f} MB/s"
            if total is None:
                return text
            left = datetime.timedelta(seconds=round((total - start - done) / max(rate, 1)))
            return f"fetching {name}: {size} of {total / _MB:,.1f} MB, {rate / _MB:.2f} MB/s, {left} left"

        done, began = 0, time.perf_counter()
        with _opened(partial, "ab" if start else "wb") as write, progress(say) as advance:
            while chunk := response.read1(_CHUNK):
                write(chunk)
                done += len(chunk)
                advance(done)
                if stopped():
                    raise _stopped(partial)
                took = time.perf_counter() - began
                if not patient and took > _SLOW_AFTER_S and done < took * _SLOW:
                    raise _Slow(f"{done / took / 1000:.0f} kB/s is slow")
        return total is None or start + done >= total


def _check_space(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial.parent).free
    if needed > free:
        problem = (
            f"{partial.parent.absolute()} has {free / _MB:,.1f} MB free, and {needed / _MB:,.1f} MB are to be fetched"
        )
        raise UserError("data.root", problem, "free space there, or data.root=<a folder on another disk>")


@contextlib.contextmanager
def _opened(partial: Path, mode: str) -> Iterator[Callable[[bytes], None]]:
    with _writing(partial):
        file = partial.open(mode, buffering=0)

    def write(chunk: bytes) -> None:
        with _writing(partial):
            rest = memoryview(chunk)
            while rest:  # a disk that is almost full takes a part
                rest = rest[file.write(rest) :]

    with file:
        yield write


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Report that a file cannot be written."""
    try:
        yield
    except OSError as error:
        problem = f"cannot write {path.absolute()}: {_said(error)}"
        allowed = "a writable folder with space; what was fetched is continued there"
        kind = DiskFull if error.errno == errno.ENOSPC else UserError
        raise kind("data.root", problem, allowed) from error


def _stopped(partial: Path) -> FetchStopped:
    problem = f"a signal stopped the download after {_size(partial) / _MB:.1f} MB; the next run continues it"
    return FetchStopped("data.download", problem)


def _pause(seconds: float, partial: Path, stopped: Callable[[], bool]) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if stopped():
            raise _stopped(partial)
        time.sleep(0.05)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _said(error: object) -> str:
    said = getattr(error, "strerror", None) or str(error)
    return " ".join(str(said).split()) or type(error).__name__
