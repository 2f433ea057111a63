"""Models on the Hugging Face Hub: `hf://user/name` is the file model.safetensors of a repository, and no other is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from runner.base.errors import UserError, require
from runner.base.reading import bounded
from runner.models.checks import cache_alone

_FILE, _LARGEST = "model.safetensors", 2**36  # bytes


@contextlib.contextmanager
def asking(key: str, repository: str, allowed: str) -> Iterator[Any]:
    """Give huggingface_hub, and turn what it raises, or that the extra is missing, into a `UserError` about `key`."""
    require(key, "runner[huggingface]", "huggingface_hub")
    import huggingface_hub

    with cache_alone() as why:
        try:
            yield huggingface_hub
        except Exception as error:  # of the hub's, of its client for HTTP, or of the system
            raise UserError(key, f"{repository}: {why or ' '.join(str(error).split())[:300]}", allowed) from error


def local(place: str, key: str) -> str:
    """The path in the cache of the hub if a place is `hf://user/name[@revision]`, else the place; raises `UserError`."""
    if not place.startswith("hf://"):
        return place
    repository, _, revision = place.removeprefix("hf://").partition("@")
    with asking(key, place, f"hf://user/name or hf://user/name@revision, of a repository with {_FILE}") as hub:
        expected = hub.hf_hub_download(repository, _FILE, revision=revision or None, dry_run=True)
        bounded(expected.file_size or _LARGEST + 1, _LARGEST, "bytes")
        return str(hub.hf_hub_download(repository, _FILE, revision=revision or None))
