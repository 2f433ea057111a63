"""Checks the types of the contents of a checkpoint, on which everything else relies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

_LARGEST_IMAGE = 2**28  # numbers of one image: over 9,000 pixels a side, in colour
_LARGEST = 2**53  # the last whole number that every program keeps exactly
Check = Callable[[Any], bool]


def _is(*kinds: type) -> Check:
    """Of one of these types, and none derived from it, as True is an int."""
    return lambda value: type(value) in kinds


def _list(item: Check) -> Check:
    return lambda value: type(value) is list and all(map(item, value))


def _by_name(item: Check) -> Check:
    """A mapping from texts."""
    return lambda value: (
        isinstance(value, dict) and all(map(_is(str), value)) and all(item(element) for element in value.values())
    )


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_state_dict(value: Any) -> bool:
    return _by_name(lambda _: True)(value) and all(
        isinstance(tensor, Tensor) or name.endswith("_extra_state") for name, tensor in value.items()
    )


def _is_average(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("kind") in ("ema", "swa")
        and _is_count(value.get("updates"))
        and _or_none(_is_state_dict)(value.get("weights", 0))
        and _is_state_dict(value.get("loss", {}))
        and type(value.get("calibrated")) is bool
    )


def _is_fingerprint(value: Any) -> bool:
    """The number of samples of a split, and digests of what is known of it."""
    return (
        isinstance(value, dict)
        and type(value.get("samples")) is int
        and isinstance(value.get("content"), str)
        and _by_name(_is(str))({key: item for key, item in value.items() if key != "samples"})
    )


def _is_image_shape(value: Any) -> bool:
    return _list(_is_count)(value) and len(value) == 3 and 0 < math.prod(value) <= _LARGEST_IMAGE


def _are_turns(value: Any) -> bool:
    """Pairs of a step and an epoch, each number above the one before it."""
    return (
        _list(_list(_is_count))(value)
        and all(len(turn) == 2 and min(turn) > 0 for turn in value)
        and all(one[0] < two[0] and one[1] < two[1] for one, two in itertools.pairwise(value))
    )


def _is_mean(value: Any) -> bool:
    """A running mean, see `runner.engine.state.RunningMean`."""
    if not isinstance(value, dict) or not isinstance(value.get("sum"), Tensor):
        return False
    return not value["sum"].ndim and _is_count(value.get("samples"))


_MAPPING, _NUMBERS = (_by_name(lambda _: True), "a mapping by name"), (_by_name(_is(int, float)), "numbers by name")
_COUNT, _TEXT, _NUMBER = (_is_count, "a whole number of at least 0"), (_is(str), "text"), (_is(int, float), "a number")
# What a value at a place has to be, in this order; where the place ends with a question mark, it need not be there.
_RULES: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(("optimizer", "scheduler", "rng", "position", "metrics"), _MAPPING),
    **dict.fromkeys(("model", "loss?"), (_is_state_dict, "tensors by name")),
    "versions": _MAPPING,
    "config": _TEXT,
    "classes": (_list(_is(str)), "a list of names"),
    "averaged": (_or_none(_is_average), "a kind, a number of updates and tensors by name"),
    "scaler": (_or_none(_NUMBERS[0]), "numbers by name"),
    **dict.fromkeys(("position.epoch", "position.batch", "position.global_step"), _COUNT),
    "position.evaluation_due?": (_is(bool), "true or false"),
    "position.turns?": (_are_turns, "a list of steps and epochs, in order"),
    "metrics.callbacks": (_is(dict), "a mapping"),
    "metrics.data": (_by_name(_is_fingerprint), "samples and content of splits"),
    "metrics.sources": (_by_name(_is(str)), "digests by name"),
    "metrics.images?": (_is_image_shape, "channels, height and width"),
    "metrics.terms?": (_by_name(_is_mean), "running means by name"),
    "metrics.last?": _NUMBERS,
    "metrics.best?": (_or_none(_is(dict)), "a mapping"),
    **dict.fromkeys(("metrics.best.metric", "metrics.best.mode"), _TEXT),
    **dict.fromkeys(("metrics.best.value", "metrics.best.loss"), _NUMBER),
    **dict.fromkeys(("metrics.best.global_step", "metrics.best.epoch"), _COUNT),
}


def wrong_type(contents: dict[str, Any]) -> str:
    """A clause on the first value of another type in contents with all keys, or an empty string."""
    for place, (check, words) in _RULES.items():
        *outer, name = place.removesuffix("?").split(".")
        inner: Any = contents
        for key in outer:
            inner = inner.get(key)
        if inner is None or (name not in inner and place.endswith("?")):
            continue
        if not check(inner.get(name)):
            return f"{'.'.join([*outer, name])} is not {words}"
    return ""
