"""The frozen config: a changed copy of it, and its plain form."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from runner.config.schema.train import Train

T = TypeVar("T", bound=Train)


def to_plain(config: Train) -> dict[str, Any]:
    """The config as a new tree of plain containers, keys as in YAML, in the order of the schema."""
    # `async_` is the field of the key `async`.
    return dataclasses.asdict(
        config, dict_factory=lambda pairs: {name.removesuffix("_"): value for name, value in pairs}
    )


def with_changes(config: T, changes: Mapping[str, Any]) -> T:
    """The config with other values under dotted keys, such as `{"optimizer.lr": 0.1}`; the values are not validated."""
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return config


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(section, dict):
        return section | {name: _with(section[name], rest, value) if rest else copy.deepcopy(value)}
    inner = _with(getattr(section, name), rest, value) if rest else copy.deepcopy(value)
    return dataclasses.replace(section, **{name: inner})
