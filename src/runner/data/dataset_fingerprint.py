"""A fingerprint of the data of a run: lengths, targets, sizes of files, and the content of a few samples."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import DataFailed
from runner.data.sample_rng import hash_ints
from runner.data.sampler import Indices
from runner.data.samples import SeededDataset
from runner.data.sources.folders import ImageFolder, ImageList
from runner.data.sources.listing import common_part, size_of
from runner.data.sources.shards import Shards
from runner.data.splits import Parts, targets_of
from runner.instrument.nested import leaves_of

_AT_ONCE = 4096  # files of which names and sizes are digested together
_LOOKED_AT = 16
_PLACES = 0xDA7A  # separates these random numbers from all others
_DIFFERENCES = {
    "targets": "has other targets",
    "files": "has other files, or files of other sizes",
    "images": "has other images",
    "content": "has other images or targets",
    "blocks": "is divided into other shards",
}


def fingerprint_data(
    parts: Parts, sources: Mapping[str, Dataset[Any]], *, pairs: bool = True, ends: Tensor | None = None
) -> dict[str, Any]:
    """Lengths and digests that distinguish the data of a run from other data, at the cost of a few samples per split.

    Returns:
        For each split `samples`, its length, and SHA-256 digests: `content`, of the indices, images and targets of some of
        its samples, before any transform; if known without reading samples, `targets`, and `files` (path relative to the
        common folder, and size) or `images` (checksums in shards); and with `ends`, `blocks`, of where the blocks of the
        training split end.
    """
    result, files_of = {}, {id(dataset): _files_of(dataset) for dataset, _ in parts.values()}
    for name, (dataset, indices) in parts.items():
        digests: dict[str, Any] = {"samples": len(indices)}
        source: Any = sources[name]
        if isinstance(dataset, ImageList) and dataset.decoding.decode == "torchcodec":
            # The same data have the same digest, whatever decodes them and a cache
            source = copy.copy(dataset)
            source.decoding = replace(dataset.decoding, decode="auto")
        digests["content"] = _digest(_content(source, indices, pairs))
        targets, files = targets_of(dataset), files_of[id(dataset)]
        if targets is not None and targets.ndim and len(targets) == len(dataset):  # type: ignore[arg-type]
            digests["targets"] = _digest([targets[indices[:]].numpy().tobytes()])
        if files:
            sizes = dataset.files.sizes if isinstance(dataset, ImageFolder) else None
            digests["files"] = _digest(_listing(files, indices, sizes))
        elif isinstance(dataset, Shards):
            digests["images"] = _digest([dataset.checksums[indices[:]].numpy().tobytes()])
        if ends is not None and name == "train":  # the order of an epoch depends on them
            digests["blocks"] = _digest([ends.numpy().tobytes()])
        result[name] = digests
    return result


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _content(dataset: Dataset[Any], indices: Indices, pairs: bool) -> Iterator[bytes]:
    seeded, count = SeededDataset(dataset, 0, pairs=pairs), len(indices)
    for turn in range(min(count, _LOOKED_AT)):
        index = int(indices[turn if count <= _LOOKED_AT else hash_ints(_PLACES, turn) % count])
        yield f"sample {index}".encode()
        try:
            item = seeded[0, index]
        except (MemoryError, DataFailed):
            raise
        except Exception:  # reported, or skipped, when it is used
            yield b"unreadable"
            continue
        for tensor in _values(item):
            yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _values(sample: Any) -> Iterator[Tensor]:
    """Everything in a sample as tensors; anything but numbers, text and images counts by its type."""
    for value in leaves_of(sample):
        if isinstance(value, Tensor):
            yield value
            continue
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            text = value if isinstance(value, str | bytes) else type(value).__name__
            array = np.frombuffer(repr(text).encode(), dtype=np.uint8)
        yield torch.from_numpy(np.array(array))


def _files_of(dataset: Any) -> list[bytes]:
    """The file of each sample, if the data set is one of files, this program's or torchvision's; else empty."""
    if callable(getattr(dataset, "file_names", None)):
        return list(dataset.file_names())
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or len(samples) != len(dataset):
        return []
    paths = [sample[0] if isinstance(sample, tuple) else sample for sample in samples]
    return [os.fsencode(path) for path in paths] if all(isinstance(path, str | Path) for path in paths) else []


def _listing(files: list[bytes], indices: Indices, sizes: Tensor | None) -> Iterator[bytes]:
    common = common_part(files)
    listed = None if sizes is None else sizes.tolist()
    for some in torch.split(indices[:], _AT_ONCE):  # as a digest of each of a million would take seconds
        yield b"".join(
            b"%s\0%d\0" % (files[index][common:], size_of(files[index]) if listed is None else listed[index])
            for index in some.tolist()
        )


def data_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], identify: Callable[[], Mapping[str, Any]]
) -> list[str]:
    """The differences of the data from those of a checkpoint, in clauses.

    Facts that change at every reading, or that only one of the two has, are not compared; `identify` computes `now` again.
    """
    # Data that are drawn again at every reading differ from themselves too; only their length can be compared.
    again, found = identify() if before != now else {}, list[str]()
    for name in dict.fromkeys([*before, *now]):
        if name not in now or name not in before:
            found.append(f"there is {'no' if name not in now else 'a'} split '{name}' now")
            continue
        old, new = before[name], now[name]
        if old["samples"] != new["samples"]:
            found.append(f"'{name}' has {new['samples']:,} samples instead of {old['samples']:,}")
            continue
        differing = (key for key in _DIFFERENCES if key in old and key in new and old[key] != new[key])
        if key := next((key for key in differing if new[key] == again[name].get(key)), ""):
            found.append(f"'{name}' {_DIFFERENCES[key]}")
    return found


def class_changes(before: list[str], now: list[str]) -> list[str]:
    """`data_changes` for the names of the classes."""
    shown = [", ".join(names[:5]) + f", ... ({len(names)})" * (len(names) > 5) or "none" for names in (now, before)]
    return [] if before == now else [f"its classes are {shown[0]} instead of {shown[1]}"]
