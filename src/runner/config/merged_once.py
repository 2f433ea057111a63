"""Hydra reads and merges the files of all jobs of a sweep once: doing so again for each takes a fifth of a second."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Iterator
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository

_LARGEST = 64  # selections of options that are kept, of 30 kB each


@contextlib.contextmanager
def merged_once() -> Iterator[None]:
    """Compositions inside that select the same options take their files from a copy of what was merged before.

    Hydra applies the other overrides to that copy, as it does without this. A file that changes meanwhile has no effect.
    """
    lists: dict[Any, Any] = {}
    merged: dict[int, bytes] = {}  # by the identity of a list of defaults, which `lists` keeps
    files: dict[Any, bytes] = {}
    loader: Any = config_loader_impl
    list_defaults, read = loader.create_defaults_list, ConfigRepository.load_config
    merge = ConfigLoaderImpl._compose_config_from_defaults_list

    def list_defaults_once(repo: Any, overrides_list: list[Any], **others: Any) -> Any:
        plain = [override for override in overrides_list if not override.is_sweep_override()]
        selected = [one for one in plain if repo.group_exists(one.key_or_group) and not isinstance(one.value(), dict)]
        key = (_folders(repo), *(one.input_line for one in selected), *sorted(others.items()))
        if key not in lists:
            if len(lists) >= _LARGEST:
                return list_defaults(repo, overrides_list=overrides_list, **others)
            lists[key] = list_defaults(repo, overrides_list=selected, **others)
        found = copy.copy(lists[key])
        found.config_overrides = [override for override in plain if override not in selected]
        return found

    def merge_once(self: Any, defaults: list[Any], repo: Any) -> Any:
        if not any(known.defaults is defaults for known in lists.values()):
            return merge(self, defaults, repo)
        if id(defaults) not in merged:
            merged[id(defaults)] = pickle.dumps(merge(self, defaults, repo), pickle.HIGHEST_PROTOCOL)
        return pickle.loads(merged[id(defaults)])

    def read_once(self: Any, config_path: str) -> Any:
        key = (_folders(self), config_path)
        if key not in files:
            files[key] = pickle.dumps(read(self, config_path), pickle.HIGHEST_PROTOCOL)
        return pickle.loads(files[key])

    places: list[tuple[Any, str, Any]] = [
        (loader, "create_defaults_list", functools.wraps(list_defaults)(list_defaults_once)),
        (ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once),
        (ConfigRepository, "load_config", read_once),
    ]
    before = [getattr(place, name) for place, name, _ in places]
    for place, name, replacement in places:
        setattr(place, name, replacement)
    try:
        yield
    finally:
        for (place, name, _), original in zip(places, before, strict=True):
            setattr(place, name, original)


def _folders(repo: Any) -> tuple[tuple[str, str], ...]:
    return tuple((source.provider, source.path) for source in repo.get_sources())
