"""Shards in an object store, by fsspec: they are listed, and read in verified ranges, with retries."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from runner.base.errors import DataFailed, UserError
from runner.base.signals import heard
from runner.data.bad_samples import one_line

ATTEMPTS = 6
DELAY_S = 0.5  # before the second attempt; it doubles before each further one
PATIENCE_S = 60.0  # after which there is no further attempt
TIMEOUT_S = 30.0  # of one request, with its answer
_BLOCK = 2**20  # bytes that are requested at once of a shard that is read whole
_LARGEST = 2**28  # bytes of an index, names of classes or a manifest; an index has about 40 an image
# Of HTTP: access is denied; there is no such object; no such range; asking again may help
_DENIED, _ABSENT, _TOO_MUCH, _LATER = 403, (404, 410), 416, (408, 409, 425, 429)
_FINAL = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EISDIR, errno.ENOTDIR)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")  # of botocore
# What clients call the version of a content, the best first
_VERSIONS = (
    "ETag", "etag", "generation", "blob_id", "md5Hash", "LastModified", "last_modified", "Last-Modified", "mtime", "created",
)  # fmt: skip

T = TypeVar("T")

# Draws from the system, as those of a run's generators are part of its state
_RANDOM = random.SystemRandom()
# A process that was forked keeps the clients of its parent, unused: freeing them would end connections of the parent
_CLIENTS: dict[tuple[int, str], Any] = {}


def store(url: str) -> Any:
    """The client of fsspec for a URL, made once in each process, as its event loop and connections do not survive a fork.

    Raises `UserError` if fsspec does not know the protocol, or a package for it is not installed.
    """
    key = os.getpid(), "/".join(url.split("/", 3)[:3])
    if key not in _CLIENTS:
        try:
            from fsspec.core import url_to_fs

            client = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)[0]
        except (ImportError, ValueError) as error:
            allowed = "a folder, or a URL of a protocol that fsspec knows: pip install 'runner[remote]' for s3:// and https://"
            raise UserError("data.root", f"cannot open {url}: {error}", allowed) from error
        # s3fs retries, and botocore below it, which would multiply the attempts of `retried`
        if hasattr(client, "config_kwargs"):
            client.retries, client.config_kwargs = 1, {"retries": {"max_attempts": 0}, **client.config_kwargs}
        elif hasattr(client, "client_kwargs"):
            client.client_kwargs = {**client.client_kwargs, "trace_configs": [_redirects_refused()]}
        _CLIENTS[key] = client
    return _CLIENTS[key]


def _redirects_refused() -> Any:
    """What makes a client for HTTP refuse redirects to another host, which nobody named."""
    from aiohttp import TraceConfig

    async def refuse(_session: Any, _context: Any, seen: Any) -> None:
        host = urlsplit(seen.response.headers.get("Location", "")).hostname
        if host not in (None, seen.url.host):
            problem = f"{seen.url} redirects to another host, {host}, which is not followed"
            raise DataFailed("data.root", problem, "an address of that host, if this machine may send requests there")

    watched = TraceConfig()
    watched.on_request_redirect.append(refuse)
    return watched


def request(url: str, method: str, **arguments: Any) -> Any:
    """Call a method of the client of a URL, in `TIMEOUT_S` if it is an asynchronous one; raises what the client raises."""
    client = store(url)
    if not client.async_impl:
        return getattr(client, method)(url, **arguments)
    from fsspec.asyn import sync

    return sync(client.loop, getattr(client, f"_{method}"), url, timeout=TIMEOUT_S, **arguments)


def _content(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """Bytes of an object from `start` up to `end`, or all; at most one more is read, as an answer may have no end.

    Raises what the client raises, `OSError` if fewer come, and `DataFailed` if more do.
    """
    client, most = store(url), _LARGEST if end is None or start is None else end - start
    is_s3, asked = hasattr(client, "_call_s3"), {} if end is None else {"Range": f"bytes={start}-{end - 1}"}

    async def received() -> bytes:
        if is_s3:
            bucket, key, _ = client.split_path(url)
            answer = (await client._call_s3("get_object", Bucket=bucket, Key=key, **asked))["Body"]
        else:
            session, headers = await client.set_session(), client.kwargs.get("headers", {}) | asked
            answer = await session.get(client.encode_url(url), **client.kwargs | {"headers": headers})
        with contextlib.closing(answer):
            if not is_s3:
                client._raise_not_found_for_status(answer, url)
            body, content = answer if is_s3 else answer.content, bytearray()
            while len(content) <= most and (chunk := await body.read(most + 1 - len(content))):
                content += chunk
            return bytes(content)

    if is_s3 or hasattr(client, "encode_url"):
        from fsspec.asyn import sync

        content = bytes(sync(client.loop, received, timeout=TIMEOUT_S))
    else:  # not of this package's extra
        content = bytes(request(url, "cat_file", start=start, end=end))
    if len(content) > most:
        how = f"has more than {most:,} bytes" if end is None else "does not answer requests of ranges"
        raise DataFailed("data.root", f"{url} {how}")
    if end is not None and len(content) < most:
        raise OSError(f"only {len(content):,} of {most:,} bytes came")
    return content


def retried(url: str, call: Callable[[], T]) -> T:
    """The result of `call`, which is repeated after errors that may pass.

    Raises:
        FileNotFoundError: at once, if there is nothing at `url`.
        DataFailed: if it is refused, or fails `ATTEMPTS` times or for `PATIENCE_S`, or a signal asked this process to stop.
    """
    began, before = time.monotonic(), len(heard)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except (UserError, MemoryError):
            raise
        except Exception as error:  # each client has exceptions of its own
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            # The client for HTTP makes this of every error
            of_http = type(error.__cause__).__module__.startswith("aiohttp")
            if isinstance(error, FileNotFoundError) and (not of_http or _status(error) in _ABSENT):
                raise
            last = attempt == ATTEMPTS or time.monotonic() > began + PATIENCE_S
            if last or len(heard) > before or not _may_pass(error):
                late = isinstance(error, TimeoutError) and not str(error)
                reason = f"no answer in {TIMEOUT_S:g} s" if late else one_line(error)
                tried = f" ({attempt} attempts)" if attempt > 1 else ""
                allowed = "a store that answers, credentials that may read it and have not expired; then the same command again"
                raise DataFailed("data.root", f"cannot read {url}: {reason}{tried}", allowed) from error
        until = time.monotonic() + DELAY_S * 2 ** (attempt - 1) * _RANDOM.uniform(0.5, 1)
        while (left := until - time.monotonic()) > 0 and len(heard) == before:
            time.sleep(min(left, 0.1))
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _LATER
    refused = isinstance(error, PermissionError | TypeError | ValueError) or type(error).__name__ in _NO_CREDENTIALS
    return not (refused or (isinstance(error, OSError) and error.errno in _FINAL))


def _status(error: BaseException | None) -> int | None:
    """The status of the answer of HTTP that an error comes from, if any."""
    while error is not None:
        response = getattr(error, "response", None)
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        for found in (getattr(error, "status", None), metadata.get("HTTPStatusCode")):
            if isinstance(found, int):
                return found
        error = error.__cause__
    return None


@dataclass(frozen=True)
class RemoteShard:
    """A tar file in a store, of `size` bytes; `version` is what the store says of its content, such as an ETag."""

    url: str
    size: int
    version: str

    def range(self, start: int, end: int) -> bytes:
        """Bytes from `start` up to `end`; raises `DataFailed`, also if the object was replaced or removed."""
        if start == end:
            return b""
        try:
            return retried(self.url, lambda: _content(self.url, start, end))
        except FileNotFoundError as error:
            raise self.changed("it is not there any more") from error
        except DataFailed as error:
            other = _status(error.__cause__) == _TOO_MUCH
            with contextlib.suppress(Exception):  # the error that made this look is the one to report
                other = other or self.replaced()
            if other:
                raise self.changed("it is another object now") from error
            raise

    def read(self, start: int, length: int, checksum: int) -> bytes:
        """Bytes with that CRC-32; raises `DataFailed` as `range`, and if they have another one."""
        for _ in range(2):  # a network may damage what it carries, once
            content = self.range(start, start + length)
            if zlib.crc32(content) == checksum:
                return content
        raise self.changed(f"the image at byte {start:,} has another CRC-32")

    def changed(self, how: str) -> DataFailed:
        """The error for an object that is not the one that was indexed, which does not count as a sample to skip."""
        problem = f"{self.url} was changed or damaged after it was indexed: {how}"
        allowed = f"the object as it was, without the {self.url.rpartition('/')[2]}.index of another one beside it"
        return DataFailed("data.root", problem, f"{allowed}; or a new run, which indexes it again")

    def replaced(self) -> bool:
        """Whether the store has another object at this URL now; raises what the client raises."""
        now = _described(self.url, request(self.url, "info"))
        # A list can say something else of an object than its description does, such as a time and no ETag
        comparable = now.version.partition(" ")[0] == self.version.partition(" ")[0]
        return now.size != self.size or (comparable and now.version != self.version)

    def check(self) -> None:
        """Raise `DataFailed` if the object was replaced."""
        if retried(self.url, self.replaced):
            raise self.changed("it was replaced meanwhile")

    def index(self) -> bytes | None:
        """The content of the index beside it, if there is one."""
        return content_of(f"{self.url}.index")

    def opened(self) -> Any:
        """The object as a file for reading."""
        from fsspec.spec import AbstractBufferedFile

        shard, before = self, len(heard)

        class Opened(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
            def _fetch_range(self, start: int, end: int) -> bytes:
                if len(heard) > before:  # reading a whole shard takes long
                    raise DataFailed("data.root", f"a signal came before all of {shard.url} was read")
                return shard.range(start, end)

        return Opened(store(self.url), self.url, block_size=_BLOCK, size=self.size)


def content_of(url: str) -> bytes | None:
    """A whole small object; None if there is none, or access is denied, as stores say of absent ones that may not be listed."""
    try:
        return retried(url, lambda: _content(url))
    except FileNotFoundError:
        return None
    except DataFailed as error:
        if _status(error.__cause__) == _DENIED:
            return None
        raise


def chosen(url: str) -> RemoteShard:
    """A shard that the user names; raises `UserError` if there is none."""
    try:
        return _described(url, retried(url, lambda: request(url, "info")))
    except FileNotFoundError as error:
        raise UserError("data.root", f"there is no {url}") from error


def listed(url: str) -> list[RemoteShard]:
    """The shards `<url>/*.tar` in the order of names; empty if there are none.

    Raises `UserError` if this protocol has no lists.
    """
    if url.startswith(("http://", "https://")):
        problem = f"{url} cannot be listed, as HTTP has no lists"
        raise UserError("data.root", problem, "data.dataset.train='\"train-{0000..0146}.tar\"', or a list of names")
    with contextlib.suppress(FileNotFoundError):
        entries = retried(url, lambda: request(url, "ls", detail=True))
        # Some clients list a file as itself
        names = {str(entry["name"]).rpartition("/")[2]: entry for entry in entries if entry["type"] == "file"}
        names = {} if [*names] == [url.rpartition("/")[2]] else names
        shards = [name for name in sorted(names) if name.endswith(".tar") and not name.startswith(".")]
        return [_described(f"{url}/{name}", names[name]) for name in shards]
    return []


def _described(url: str, info: dict[str, Any]) -> RemoteShard:
    if not isinstance(info.get("size"), int):
        raise UserError(
            "data.root", f"the server does not tell the size of {url}, and may not answer requests of ranges"
        )
    key, said = next(((key, info[key]) for key in _VERSIONS if info.get(key)), ("", ""))
    # A list may have the number of a time that a description has, such as of fsspec's own store in memory
    version = f"{key} {said.timestamp() if isinstance(said, datetime) else said}".strip()
    return RemoteShard(url, info["size"], version)
