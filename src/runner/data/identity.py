"""Which data a run is trained on: lengths, and the content of a few samples at fixed places."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from runner.data.indices import Indices
from runner.data.keyed import mix
from runner.data.samples import Keyed, as_target, as_tensor

_LOOKED_AT = 16
_PLACES = 0xDA7A  # keeps the places apart from every other draw


def identity(parts: Mapping[str, tuple[Dataset[Any], Indices]]) -> dict[str, Any]:
    """What tells the data of a run from other data, at the cost of a few samples a split.

    Args:
        parts: for each split the data set that it is read from, and its samples in it.

    Returns:
        For each split `samples`, its length, and `content`, a SHA-256 over the places, images and targets of some of its
        samples as they are read, before any transform; with fewer samples than are looked at, over all of them.
    """
    return {
        name: {"samples": len(indices), "content": _content(dataset, indices)}
        for name, (dataset, indices) in parts.items()
    }


def _content(dataset: Dataset[Any], indices: Indices) -> str:
    count = len(indices)
    places = range(count) if count <= _LOOKED_AT else (mix(_PLACES, turn) % count for turn in range(_LOOKED_AT))
    keyed, digest = Keyed(dataset, 0), hashlib.sha256()
    for place in places:
        index = int(indices[place])
        digest.update(f"sample {index}".encode())
        try:
            item = keyed[0, index]
        except MemoryError:
            raise
        except Exception:  # one that cannot be read is told, or passed over, where it is needed
            digest.update(b"unreadable")
            continue
        for tensor in (as_tensor(item[0]), as_target(item[1])):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def other_data(
    before: Mapping[str, Any], now: Mapping[str, Any], identify: Callable[[], Mapping[str, Any]]
) -> list[str]:
    """How the data differ from those of a checkpoint, in clauses; empty if they do not.

    Of a data set that gives other samples at every reading only the lengths are compared.

    Args:
        before: what `identity` gave when the checkpoint was written.
        now: what it has given of the data at hand.
        identify: gives it anew.
    """
    if before == now:
        return []
    lasting = now == identify()
    found = []
    for name in dict.fromkeys([*before, *now]):
        if name not in now or name not in before:
            found.append(f"there is {'no' if name not in now else 'a'} split '{name}' now")
        elif before[name]["samples"] != now[name]["samples"]:
            found.append(f"'{name}' has {now[name]['samples']:,} samples in place of {before[name]['samples']:,}")
        elif lasting and before[name]["content"] != now[name]["content"]:
            found.append(f"'{name}' has other images or targets")
    return found


def other_classes(before: list[str], now: list[str]) -> list[str]:
    """The same of the names of the classes."""
    return [] if before == now else [f"its classes are {_shown(now)} in place of {_shown(before)}"]


def _shown(classes: list[str]) -> str:
    return ", ".join(classes[:5]) + (f", ... ({len(classes)})" if len(classes) > 5 else "") or "none"
