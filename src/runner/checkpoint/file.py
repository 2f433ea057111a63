"""One checkpoint is one safetensors file that verifies itself: see `runner.checkpoint.layout` for its bytes.

The tensors of the model have their own names, all others begin with the part that they belong to, such as
`optimizer/state/0/exp_avg`. The metadata have a text for each part: `config` as it is, the others as JSON, see
`runner.checkpoint.structure`. Nothing in it can execute.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from runner.base.errors import UserError, first_line
from runner.base.files import renaming, whole, writing
from runner.base.reading import open_regular
from runner.checkpoint import layout
from runner.checkpoint.structure import Tensors, Unsupported, decode, encode
from runner.config.gone import drop

FORMAT = 2
KEYS = (
    "format", "model", "optimizer", "scheduler", "scaler", "averaged", "rng", "position", "config", "classes", "metrics",
    "versions",
)  # fmt: skip
OPTIONAL = ("loss",)  # of a loss with tensors
_ORDER = ("model", *OPTIONAL, *KEYS[2:])  # a tensor that several parts have is stored under its name in the first
_LEFT = 2**20  # bytes of a tensor that is worth leaving in the file
_LARGE = ("model", "optimizer", "averaged")  # parts whose tensors may be left in the file, see `read`

Parts = Callable[[dict[str, Any]], Collection[str]]
"""Selects the keys of a checkpoint that are needed with their tensors, given its contents without any."""


class DamagedCheckpoint(UserError):
    """The file is not a whole checkpoint: truncated, altered, or something else."""


def write(path: Path, contents: dict[str, Any]) -> None:
    """Write a checkpoint: whole or not at all, and on the disk when this returns.

    Args:
        path: target; an older file there is replaced only once the new one is complete.
        contents: tensors and plain containers under `KEYS` and `OPTIONAL`.

    Raises:
        UserError: if it cannot be written, or holds what could not be read back; nothing is left behind and the older
            file is untouched.
    """
    assert set(contents) - set(OPTIONAL) == set(KEYS), f"a checkpoint has the keys {KEYS}"
    # Everything becomes text and tensors before the file is opened, so that unsupported values write nothing
    try:
        tensors = Tensors()
        metadata = {key: _text(key, contents[key], tensors) for key in _ORDER if key in contents}
        with _reported(path), whole(path) as file:
            layout.write(file, str(contents["format"]), metadata, tensors.by_name)
    except (Unsupported, ValueError) as error:
        raise UserError(
            "checkpoint",
            f"{error}, which could not be read back; {path} was not written",
            "tensors, numbers, strings, and lists and mappings of them, as in a state_dict()",
        ) from error


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `UserError` about `checkpoint`."""
    try:
        with writing(path):
            yield
    except UserError as error:
        raise type(error)("checkpoint", f"{error}; earlier checkpoints are untouched") from error.__cause__


def _text(key: str, value: Any, tensors: Tensors) -> str:
    """A part of a checkpoint as a text of the metadata; its tensors go to `tensors`."""
    if key == "config":
        if not isinstance(value, str):
            raise Unsupported(f"config is a {type(value).__name__}")
        return value
    # Weights of the model keep their plain names, so that other programs find them in the file
    if key == "model" and isinstance(value, dict):
        encoded: Any = {
            name: encode(item, str(name) if isinstance(item, torch.Tensor) else f"model/{name}", tensors)
            for name, item in value.items()
        }
    else:
        encoded = encode(value, key, tensors)
    return json.dumps(encoded, separators=(",", ":"), allow_nan=False)


def link(source: Path, target: Path) -> None:
    """Make `target` the same checkpoint as `source`, atomically; a copy where the file system has no links.

    Raises `UserError` if it cannot be written.
    """
    with _reported(target):
        try:
            # A link costs no space and no time, and many file systems have them
            with renaming(target) as temporary:
                os.link(source, temporary)
        except OSError:
            with source.open("rb") as reading, whole(target) as writing:
                shutil.copyfileobj(reading, writing)


def is_checkpoint(path: Path) -> bool:
    """True if a file is a checkpoint, whole or damaged, and not weights from elsewhere; raises `UserError` without a file."""
    with _opened(path) as file:
        return layout.is_checkpoint(file)


def verify(path: Path) -> None:
    """Check the file's SHA-256; raises as `read`."""
    with _opened(path) as file:
        layout.verify(file)


def read(path: Path, parts: Parts | None = None, later: bool = False) -> dict[str, Any]:
    """Verify and load a checkpoint onto the CPU.

    Args:
        path: the file.
        parts: which keys are needed with their tensors; by default all. Only what is needed is read and verified; other
            tensors are on the device `meta`.
        later: leave large tensors of weights and optimizer in the file once all of it is verified; each is read, and
            verified again, by `runner.distributed.sharding.loaded`, so that memory need not hold all of them.

    Raises:
        DamagedCheckpoint: if it is truncated, altered, or no checkpoint.
        UserError: if there is no such file, it cannot be read, or a newer version wrote it.
    """
    with _opened(path) as file:
        return _read(file, path, parts, later)


def _read(file: BinaryIO, path: Path, parts: Parts | None, later: bool) -> dict[str, Any]:
    header = layout.read_header(file)
    # A newer format may have other contents, and is not damage, so that no older file is taken instead.
    if header.format > FORMAT:
        raise UserError(str(path), f"has format {header.format}, and this version reads up to {FORMAT}: update runner")
    if header.format < FORMAT:
        raise layout.Damaged(f"is not a checkpoint of runner's: it has format {header.format}; {layout.OTHERS}")
    # The metadata has one text for each part, so a reader decodes only what it needs
    texts = {key: text for key, text in header.metadata.items() if key not in ("format", "sha256", "digests")}
    values = {key: text if key == "config" else json.loads(text) for key, text in texts.items()}
    drop({"position": values.get("position")})  # fields of earlier versions
    named: dict[str, set[str]] = {key: set() for key in values}

    # Contents are first built without values, so that no tensor is read of a file that is not a checkpoint.
    blanks = {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in header.tensors.items()
    }

    def blank(key: str, name: str) -> torch.Tensor:
        named[key].add(name)
        return blanks[name]

    contents = {key: decode(value, partial(blank, key)) for key, value in values.items()}
    # Tensors without a place are a sign of a file made by hand, as writing makes none
    if len(set().union(*named.values())) < len(header.tensors):
        raise layout.Damaged("is not a checkpoint of runner's: it has tensors that belong to no part")
    contents = {"format": header.format, **contents}
    if set(contents) - set(OPTIONAL) != set(KEYS):
        raise layout.Damaged(f"is not a checkpoint of runner's: its keys are not {', '.join(KEYS)}")
    # Types are checked once here, so that the rest of the program can rely on them
    if problem := wrong_type(contents):
        raise layout.Damaged(f"is not a checkpoint of runner's: {problem}")
    # Callers that need only the weights do not read the moments, which are most of the file
    keys = [key for key in (values if parts is None else parts(contents)) if key in values]
    needed = set[str]().union(*(named[key] for key in keys))
    left = set[str]()
    # Without this, a process would hold the file's weights and moments twice while it loads them.
    if later:
        layout.verify(file)
        states = set[str]().union(*(named[key] for key in keys if key in _LARGE))
        left = {name for name in needed & states if blanks[name].is_floating_point() and blanks[name].nbytes >= _LEFT}
    # Small tensors are read at once; the large ones come when the run copies them to its device
    now = needed - left
    tensors = layout.read_tensors(file, header, [name for name in header.tensors if name in now])

    def read_now(name: str) -> torch.Tensor:
        with _opened(path) as again:
            return layout.read_tensors(again, header, [name])[name]

    for name in left:
        tensors[name] = torch.empty_like(blanks[name])
        tensors[name].read_now = partial(read_now, name)  # type: ignore[attr-defined]
    return contents | {key: decode(values[key], tensors.__getitem__) for key in keys}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file open for reading; whatever a damaged file or one made by hand raises becomes a sentence."""
    try:
        # Special files and links are refused: a file from someone else must not block or read elsewhere
        file = open_regular(path)
    except OSError as error:
        raise UserError("checkpoint", f"cannot read {path}: {error.strerror or error}") from error
    try:
        with file:
            yield file
    except UserError:
        raise
    except layout.Damaged as error:
        raise DamagedCheckpoint(str(path), str(error)) from error
    except Exception as error:
        raise DamagedCheckpoint(str(path), f"cannot be read: {reason(error)[:200]}") from error


def reason(error: Exception) -> str:
    """The first line of an error's message; a sentence for a `KeyError`, which says the key alone."""
    return f"there is no {error}" if isinstance(error, KeyError) else first_line(error)


# The types of contents: everything else relies on them.
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
        isinstance(tensor, torch.Tensor) or name.endswith("_extra_state") for name, tensor in value.items()
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
    if not isinstance(value, dict) or not isinstance(value.get("sum"), torch.Tensor):
        return False
    return not value["sum"].ndim and _is_count(value.get("samples"))


_MAPPING, _NUMBERS = (_by_name(lambda _: True), "a mapping by name"), (_by_name(_is(int, float)), "numbers by name")
_STATE_DICT, _FLAG = (_is_state_dict, "tensors by name"), (_is(bool), "true or false")
_COUNT, _TEXT, _NUMBER = (_is_count, "a whole number of at least 0"), (_is(str), "text"), (_is(int, float), "a number")
# What a value at a place has to be, in this order; where the place ends with a question mark, it need not be there.
_RULES: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(("optimizer", "scheduler", "rng", "position", "metrics"), _MAPPING),
    **dict.fromkeys(("model", "loss?"), _STATE_DICT),
    "versions": _MAPPING,
    "config": _TEXT,
    "classes": (_list(_is(str)), "a list of names"),
    "averaged": (_or_none(_is(dict)), "a mapping"),
    "averaged.kind": (lambda kind: kind in ("ema", "swa"), "ema or swa"),
    "averaged.updates": _COUNT,
    "averaged.weights": (_or_none(_is_state_dict), "tensors by name"),
    "averaged.loss?": _STATE_DICT,
    "averaged.calibrated": _FLAG,
    "scaler": (_or_none(_NUMBERS[0]), "numbers by name"),
    **dict.fromkeys(("position.epoch", "position.batch", "position.global_step"), _COUNT),
    "position.evaluation_due?": _FLAG,
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
        if not check(inner.get(name, ...)):
            return f"{'.'.join([*outer, name])} is not {words}"
    return ""
