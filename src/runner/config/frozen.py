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
        config = _with(config, key, copy.deepcopy(value))
    return config


def _with(section: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    inside = section if isinstance(section, dict) else vars(section)
    changed = {name: _with(inside[name], rest, value) if rest else value}
    return section | changed if isinstance(section, dict) else dataclasses.replace(section, **changed)
