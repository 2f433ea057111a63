"""The layout of a safetensors file: the header's length (8 bytes, little-endian), the header (JSON), the tensors' bytes.

Written here and not by the library, which takes the whole file as one copy in memory and computes no digests.
Metadata begin with `format` and `sha256`; `digests` has the SHA-256 of each tensor's bytes. `sha256` is that of the header
and its length, with 64 zeros instead of itself. So whatever is read is verified, and what is not needed is not read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import torch

from runner.checkpoint.structure import BY_DTYPE, NATIVE

_BLOCK = 1 << 20
_LARGEST_HEADER = 2**25  # bytes: over 100,000 tensors
# Lists and mappings of a header take 20 to 80 times the memory of their two characters, other values up to 50 times. Runs
# save about one container in 70 bytes and one value in 40; the first numbers leave room for the states of callbacks.
_CONTAINERS, _VALUES, _BYTES_OF_ONE = 2**18, 2**20, 32
_ZEROS = "0" * 64
_HEAD = re.compile(rb'.{8}\{"__metadata__":\{"format":"(\d{1,9})","sha256":"([0-9a-f]{64})"', re.DOTALL)

OTHERS = "init_from= starts a run from weights of other programs"


class Damaged(Exception):
    """The file is truncated, altered, or something else."""


class Stored(NamedTuple):
    """The place of a tensor in a file, and the digest of its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    sha256: str


class Header(NamedTuple):
    """A verified header: version and texts of the metadata, and tensors in the order of their bytes."""

    format: int
    metadata: dict[str, str]
    tensors: dict[str, Stored]


def write(file: BinaryIO, written: str, metadata: dict[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the format, texts by name and tensors into an empty file; a tensor is copied only if it is not contiguous on the CPU.

    Raises `OSError` if it cannot be written. ValueError: if the header is too large, or a text in it is not Unicode.
    """
    # Positions first, as the header with them stands before the tensors
    entries, end = dict[str, dict[str, Any]](), 0
    # Larger elements come first, so that all are aligned when the file is mapped.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": BY_DTYPE[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}

    def header(digests: dict[str, str]) -> bytes:
        known = {"format": written, "sha256": _ZEROS, **metadata, "digests": _compact(digests)}
        text = _compact({"__metadata__": known, **entries}).encode()
        # safetensors aligns the tensors by padding the header
        text += b" " * (-len(text) % 8)
        # A reader refuses such headers, so a writer must not make one
        if len(text) > _LARGEST_HEADER or _too_dense(text):
            problem = "what is saved beside tensors is over 32 MiB, 1,048,576 values, or 262,144 lists and mappings"
            raise ValueError(problem)
        return len(text).to_bytes(8, "little") + text

    # The place of the header is skipped now and filled last, when the digests are known
    file.seek(len(header(dict.fromkeys(entries, _ZEROS))))  # digests have one length, and follow from what is written
    made = header({name: _write_tensor(file, tensors[name]) for name in entries})
    file.seek(0)
    # The checksum of the header is computed with zeros in its place
    file.write(made.replace(_ZEROS.encode(), hashlib.sha256(made).hexdigest().encode(), 1))


def _too_dense(header: bytes) -> bool:
    """True if parsing would take far more memory than the header has bytes."""
    room, containers = len(header) // _BYTES_OF_ONE, header.count(b"[") + header.count(b"{")
    return containers > _CONTAINERS + room or header.count(b",") > _VALUES + room


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> str:
    plain = tensor.detach()
    plain = (plain if plain.device.type == "cpu" else plain.cpu()).resolve_conj().resolve_neg().contiguous()
    data, digest = plain.reshape(-1).view(torch.uint8).numpy().data, hashlib.sha256()
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK]
        digest.update(block)
        file.write(block)
    return digest.hexdigest()


def is_checkpoint(file: BinaryIO) -> bool:
    """True if a file is of the program's, be it damaged; other safetensors files have other metadata."""
    file.seek(0)
    start = file.read(200)
    size = min(int.from_bytes(start[:8], "little"), _LARGEST_HEADER)
    file.seek(8)
    return _HEAD.match(start) is not None or b'"digests":"{' in file.read(size)


def read_header(file: BinaryIO) -> Header:
    """Read and verify the header of a file; nothing of the size that it claims is taken before that.

    Raises:
        Damaged: if it is none of `write`, or altered, or the file has another size.
        Exception: of many kinds, if it is made by hand.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    # The length is checked against the file before anything of that size is read
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= size - 8:
        raise Damaged(f"is truncated, or is not a checkpoint of runner's; {OTHERS}")
    if length > _LARGEST_HEADER:
        raise Damaged("is not a checkpoint of runner's: its header is larger than 32 MiB")
    file.seek(0)
    data = file.read(8 + length)
    # The checksum comes before the JSON parser: damage is reported as damage
    head = _HEAD.match(data)
    if head is None:
        raise Damaged(f"is not a checkpoint of runner's: its header has no checksum; {OTHERS}")
    if hashlib.sha256(data.replace(head[2], _ZEROS.encode(), 1)).hexdigest().encode() != head[2]:
        raise Damaged("its contents do not match its checksum (header): the file is damaged")
    # A small file can hold millions of values, which would need far more memory than its size
    if _too_dense(data):
        raise Damaged("is not a checkpoint of runner's: its header has more values, lists or mappings than runs save")
    entries = json.loads(data[8:])
    metadata = entries.pop("__metadata__")
    tensors = _tensors(entries, json.loads(metadata.get("digests", "{}")), 8 + length)  # a newer format may have none
    end = max((stored.end for stored in tensors.values()), default=8 + length)
    # Missing or extra bytes at the end are damage, even where every tensor can be read
    if end != size:
        raise Damaged(f"is truncated, or has bytes after its end: it should have {end:,} bytes and has {size:,}")
    return Header(int(head[1]), metadata, tensors)


def _tensors(entries: dict[str, Any], digests: Any, start: int) -> dict[str, Stored]:
    """The entries of tensors in a header, whose bytes have to follow each other without gap or overlap."""
    found, end = dict[str, Stored](), 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, stop) = NATIVE[entry["dtype"]], entry["shape"], entry["data_offsets"]
        # Whatever is wrong with an entry is found here, before a shape allocates memory
        numbers = (*shape, begin, stop)
        if len(entry) != 3 or len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"the entry of {name[:100]} is not one of a tensor")
        if begin != end or stop - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the bytes of {name[:100]} have a wrong position or length")
        if not isinstance(digests[name], str):
            raise ValueError(f"{name[:100]} has no checksum")
        found[name], end = Stored(dtype, tuple(shape), start + begin, start + stop, digests[name]), stop
    return found


def read_tensors(file: BinaryIO, header: Header, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors onto the CPU and verify them (`Damaged`): what is hashed is what is used, whatever becomes of the file."""
    found = {}
    for name in names:
        stored = header.tensors[name]
        data = torch.empty(stored.end - stored.begin, dtype=torch.uint8)
        _read_verified(file, name, stored, data.numpy().data)
        found[name] = data.view(stored.dtype).view(stored.shape)
    return found


def verify(file: BinaryIO) -> None:
    """Verify all of a file, in little memory; raises `Damaged` if it is truncated or altered."""
    block = memoryview(bytearray(_BLOCK))
    for name, stored in read_header(file).tensors.items():
        _read_verified(file, name, stored, block)


def _read_verified(file: BinaryIO, name: str, stored: Stored, memory: memoryview) -> None:
    """Read a tensor's bytes into memory, over and over the same where it is smaller, and verify them."""
    file.seek(stored.begin)
    digest, left, start = hashlib.sha256(), stored.end - stored.begin, 0
    while left > 0:
        start = start if start < len(memory) else 0
        block = memory[start : start + min(left, _BLOCK)]
        if file.readinto(block) != len(block):  # type: ignore[attr-defined]
            raise Damaged("is truncated")
        digest.update(block)
        left, start = left - len(block), start + len(block)
    if digest.hexdigest() != stored.sha256:
        raise Damaged(f"its contents do not match its checksum ({name}): the file is damaged")
