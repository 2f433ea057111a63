"""Models on the Hugging Face Hub: `hf://user/name` is the file model.safetensors of a repository, and no other is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from runner.base.errors import UserError, first_line, require
from runner.base.reading import bounded

FILE = "model.safetensors"
_LARGEST = 2**36  # bytes


@contextlib.contextmanager
def asking(key: str, repository: str, allowed: str) -> Iterator[None]:
    """Turn what goes wrong between this machine and the hub into a `UserError` about `key`."""
    from huggingface_hub import constants, errors

    reasons: dict[type[Exception] | int, str] = {
        errors.RepositoryNotFoundError: "there is no such repository, or the token (HF_TOKEN) may not read it",
        errors.RevisionNotFoundError: "there is no such revision",
        errors.RemoteEntryNotFoundError: f"it has no {FILE}, and files of other formats are not read",
        errors.LocalEntryNotFoundError: f"there is no answer (HF_HUB_OFFLINE?), and {constants.HF_HUB_CACHE} has no copy",
        **dict.fromkeys((401, 403), "the token (HF_TOKEN, or hf auth login) is missing or has no permission"),
        409: "this repository exists already",
    }
    try:
        yield
    except Exception as error:  # of the hub's, of its client for HTTP, or of the system
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        reason = next((reasons[kind] for kind in (*type(error).__mro__, status) if kind in reasons), first_line(error))
        raise UserError(key, f"{repository} at {constants.ENDPOINT}: {reason[:300]}", allowed) from error


def local(place: str, key: str) -> str:
    """The path of the file in the cache of the hub, if a place is `hf://user/name` or `hf://user/name@revision`; else the place.

    It is downloaded if the cache lacks it. Raises `UserError` about `key` if there is no such file, or the extra is missing.
    """
    if not place.startswith("hf://"):
        return place
    require(key, "runner[huggingface]", "huggingface_hub")
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    repository, _, named = place.removeprefix("hf://").partition("@")
    revision, offline, size = named or None, False, 0
    with asking(key, place, f"hf://user/name or hf://user/name@revision, a repository with {FILE}"):
        try:
            size = get_hf_file_metadata(hf_hub_url(repository, FILE, revision=revision)).size or _LARGEST + 1
        except Exception as error:
            if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
                raise
            offline = True  # or the hub is down: the cache decides
        bounded(size, _LARGEST, "bytes")
        return hf_hub_download(repository, FILE, revision=revision, local_files_only=offline)
