"""Files from the network: from several addresses in turn, verified by their checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from runner.base.errors import PREEMPTED, UserError
from runner.base.files import renaming
from runner.data.preparation import exclusive, noticing_signals, progress, reported_writing

_SILENCE_S = 30.0  # how long an address may send nothing
_CHUNK = 2**18
_MB = 10**6


class FetchFailed(Exception):
    """No address gave the file; the message says why for each."""


class FetchStopped(UserError):
    """A signal asked the run to stop."""

    exit_code = PREEMPTED


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
    """Tell whether there is a file with this checksum."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == md5
    except OSError:
        return False


def writing(path: Path) -> AbstractContextManager[None]:
    """Report that a file of a data set cannot be written."""
    return reported_writing(path, "data.root", "a writable folder with space")


def fetch(path: Path, md5: str, urls: Sequence[str]) -> None:
    """Fetch a file from the first address that gives it, unless it is there; several processes may ask for it at once.

    The file appears when it is complete and verified.

    Raises:
        FetchFailed: if no address gives it.
        UserError: if it cannot be written, or a signal asks the run to stop.
    """
    if has_md5(path, md5):
        return
    failures = list[str]()
    unfinished = path.with_name(f".{path.name}.partial")
    with noticing_signals() as stopped, writing(path), exclusive(path, stopped):
        for url in urls:
            if stopped():
                raise FetchStopped("data.download", "a signal stopped it before it began")
            if has_md5(path, md5):  # another process has fetched it in the meantime
                return
            try:
                with renaming(path, unfinished):
                    _receive(url, path.name, unfinished, stopped)
                    if not has_md5(unfinished, md5):
                        raise OSError(f"another checksum than the published MD5 {md5}")
                # Processes that wait for this lock find the file.
                path.with_name(f".{path.name}.lock").unlink(missing_ok=True)
                return
            except (OSError, HTTPException) as error:
                failures.append(f"{url}: {error}")
    raise FetchFailed("; ".join(failures))


def _receive(url: str, name: str, path: Path, stopped: Callable[[], bool]) -> None:
    """Write what an address gives to a file."""
    with urlopen(Request(url, headers={"User-Agent": "runner"}), timeout=_SILENCE_S) as response:
        total, done = int(response.headers.get("Content-Length") or 0), 0
        of_total = f" of {total / _MB:,.1f}" if total else ""

        def say(done: int, rate: float) -> str:
            return f"fetching {name}: {done / _MB:,.1f}{of_total} MB, {rate / _MB:.2f} MB/s"

        with writing(path):
            file = path.open("wb")
        with file, progress(say) as advance:
            while chunk := response.read1(_CHUNK):
                # An error of the disk ends the run; one of the network leads to the next address.
                with writing(path):
                    file.write(chunk)
                    file.flush()
                done += len(chunk)
                advance(done)
                if stopped():
                    raise FetchStopped("data.download", f"a signal stopped it after {done / _MB:.1f} MB")
        if done < total:
            raise OSError(f"the connection broke after {done / _MB:.1f} MB")
