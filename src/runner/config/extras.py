"""Keys of a component that the program reads itself, in addition to the arguments of its target."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from runner.config import keys
from runner.config.schema.sections import EXTRAS

E = TypeVar("E")


def names_of(key: str, signature: inspect.Signature | None) -> set[str]:
    """Names of the extras of the component at a dotted key; names in its signature are arguments."""
    own = set(signature.parameters) if signature is not None else set()
    return set(keys.hints(EXTRAS[key])) - own if key in EXTRAS else set()


def without_extras(key: str, node: Mapping[str, Any], signature: inspect.Signature | None) -> dict[str, Any]:
    """The mapping of a component with `_target_` and its arguments alone."""
    extras = names_of(key, signature)
    return {name: value for name, value in node.items() if name not in extras}


def extras_in(key: str, node: Mapping[str, Any], signature: inspect.Signature | None) -> dict[str, Any]:
    """The extras that the mapping of a component gives."""
    extras = names_of(key, signature)
    return {name: value for name, value in node.items() if name in extras}
