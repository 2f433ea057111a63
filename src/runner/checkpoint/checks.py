"""Whether the contents of a checkpoint have the types that everybody relies on."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

_LARGEST_IMAGE = 2**28  # numbers of one image: over 9,000 pixels a side, in colour
_LARGEST = 2**53  # the last whole number that every program keeps exactly
_POSITION = {"epoch": int, "batch": int, "micro_batch": int, "global_step": int, "evaluation_due": bool, "pieces": int}
_BEST = {"metric": str, "mode": str, "value": float, "loss": float, "global_step": int, "epoch": int}


def _is_identity(item: tuple[Any, Any]) -> bool:
    """Whether this is the name of a split, its length, and digests of what is known of it."""
    name, facts = item
    return (
        isinstance(name, str)
        and isinstance(facts, dict)
        and type(facts.get("samples")) is int
        and isinstance(facts.get("content"), str)
        and all(isinstance(value, str) for key, value in facts.items() if key != "samples")
    )


def _is_image_shape(shape: Any) -> bool:
    """Whether these are channels, height and width of an image that fits into memory."""
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(size) is int and size > 0 for size in shape):
        return False
    return math.prod(shape) <= _LARGEST_IMAGE


def _is_average(averaged: Any) -> bool:
    """Whether this is what a run saves of averaged weights: nothing, or a kind, a count, a flag, and tensors by name or None."""
    if averaged is None:
        return True
    if not isinstance(averaged, dict) or averaged.get("kind") not in ("ema", "swa"):
        return False
    updates, weights = averaged.get("updates"), averaged.get("weights")
    if type(averaged.get("calibrated", True)) is not bool:
        return False
    if type(updates) is not int or not 0 <= updates < _LARGEST or "weights" not in averaged:
        return False
    return weights is None or (
        isinstance(weights, dict)
        and all(isinstance(value, torch.Tensor) or name.endswith("_extra_state") for name, value in weights.items())
        and all(isinstance(name, str) for name in weights)
    )


def _are_turns(turns: Any) -> bool:
    """Whether a value is pairs of a step and an epoch, each number above the one before it."""
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        return False
    if not all(type(number) is int and 0 < number < _LARGEST for turn in turns for number in turn):
        return False
    return all(one[0] < two[0] and one[1] < two[1] for one, two in itertools.pairwise(turns))


def wrong_type(contents: dict[str, Any]) -> str:
    """What of the top levels is not what it should be, or an empty string."""
    for key in ("model", "optimizer", "scheduler", "rng", "position", "metrics", "versions"):
        if not isinstance(contents[key], dict):
            return f"{key} is not a mapping"
        if not all(isinstance(name, str) for name in contents[key]):
            return f"{key} has a key that is no text"
    if not isinstance(contents["config"], str):
        return "config is not text"
    classes, metrics = contents["classes"], contents["metrics"]
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return "classes is not a list of names"
    weights = {name: value for name, value in contents["model"].items() if not name.endswith("_extra_state")}
    if strange := next((name for name, value in weights.items() if not isinstance(value, torch.Tensor)), None):
        return f"model.{strange} is not a tensor"
    if not _is_average(contents["averaged"]):
        return "averaged is not a kind, a number of updates and tensors by name"
    if not isinstance(metrics.get("callbacks"), dict):
        return "metrics.callbacks is not a mapping"
    data = metrics.get("data")
    if data is not None and not (isinstance(data, dict) and all(map(_is_identity, data.items()))):
        return "metrics.data does not give samples and content of splits"
    sources = metrics.get("sources")
    if sources is not None and not (
        isinstance(sources, dict) and all(type(part) is str for item in sources.items() for part in item)
    ):
        return "metrics.sources does not give digests by name"
    images = metrics.get("images")
    if images is not None and not _is_image_shape(images):
        return "metrics.images is not channels, height and width"
    best = metrics.get("best")
    if contents["position"].get("pieces") == 0:
        return "position.pieces is 0"
    for name in ("skipped_steps", "left_out"):  # the second in format 1
        steps = contents["position"].get(name, [])
        if not isinstance(steps, list) or not all(type(step) is int for step in steps):
            return f"position.{name} is not a list of steps"
    if not _are_turns(contents["position"].get("turns", [])):
        return "position.turns is not a list of steps and epochs, in order"
    return (
        _wrong_record(contents["position"], _POSITION, "position", needed=("epoch", "batch", "global_step"))
        or ("" if best is None else _wrong_record(best, _BEST, "metrics.best", needed=tuple(_BEST)))
        or _wrong_numbers(metrics.get("last", {}), "metrics.last")
        or ("" if contents["scaler"] is None else _wrong_numbers(contents["scaler"], "scaler"))
    )


def _wrong_record(record: Any, fields: dict[str, type], place: str, needed: tuple[str, ...]) -> str:
    """What of a mapping with given fields is missing or of another type, or an empty string; other fields are not looked at."""
    if not isinstance(record, dict):
        return f"{place} is not a mapping"
    for name, kind in fields.items():
        if name not in record and name not in needed:
            continue
        value = record.get(name)
        if kind is int and (type(value) is not int or not 0 <= value < _LARGEST):
            return f"{place}.{name} is not a whole number of at least 0"
        if type(value) not in ((float, int) if kind is float else (kind,)):
            return f"{place}.{name} is not what it should be"
    return ""


def _wrong_numbers(values: Any, place: str) -> str:
    """Whether a mapping holds anything but numbers by name, in words; an empty string if not."""
    if not isinstance(values, dict):
        return f"{place} is not a mapping"
    wrong = (name for name, value in values.items() if not isinstance(name, str) or type(value) not in (int, float))
    name = next(wrong, None)
    return "" if name is None else f"{place}.{name} is not a number"
