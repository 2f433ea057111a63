"""Headers made by hand: those that would take far more memory than their file has bytes are refused before they are parsed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import forging
from runner.base.errors import UserError
from runner.checkpoint.file import DamagedCheckpoint, read, write
from runner.runtime.memory import peak_memory, reset_peak_memory

MIB = 2**20


@contextlib.contextmanager
def peak_below(mib: int) -> Iterator[None]:
    """The largest memory of this process inside the block, beyond what it had before, is below `mib`."""
    cpu = torch.device("cpu")
    Path("/proc/self/clear_refs").write_text("5")  # raises where the peak cannot be reset
    reset_peak_memory(cpu)
    before = peak_memory(cpu).bytes
    yield
    assert peak_memory(cpu).bytes - before < mib * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("part", ["header", "text"])
@pytest.mark.parametrize("item", ["[],", "{},", "777,"])
def test_a_large_header_of_small_values_takes_little_more_memory_than_the_file(
    part: str, item: str, tmp_path: Path, contents: Any
) -> None:
    many, path = "[" + item * (20 * MIB // len(item)) + "0]", tmp_path / "bomb.safetensors"
    head = '{"__metadata__":{"format":"2","sha256":"' + "0" * 64 + '"},"a":' + many + "}"
    if part == "header":
        path.write_bytes(forging.sealed_header(head.encode()))
    else:
        path.write_bytes(forging.forged(contents(), metrics=many))
    with (
        peak_below(100),
        pytest.raises(DamagedCheckpoint, match="more values, lists or mappings than runs save"),
    ):
        read(path)


def test_a_header_of_more_than_32_mib_is_refused(tmp_path: Path) -> None:
    head = '{"__metadata__":{"format":"2","sha256":"' + "0" * 64 + '","a":"' + "x" * (33 * MIB) + '"}}'
    (tmp_path / "bomb.safetensors").write_bytes(forging.sealed_header(head.encode()))
    with peak_below(10), pytest.raises(DamagedCheckpoint, match="its header is larger than 32 MiB"):
        read(tmp_path / "bomb.safetensors")


def test_a_state_of_too_many_containers_is_refused_when_it_is_written(tmp_path: Path, contents: Any) -> None:
    made = contents()
    made["metrics"]["callbacks"]["mine"] = [[] for _ in range(2**19)]
    with pytest.raises(UserError, match="262,144 lists and mappings, which could not be read back"):
        write(tmp_path / "a.safetensors", made)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DIGESTS = {"digests": json.dumps({"a": hashlib.sha256(bytes(8)).hexdigest(), "b": "0"})}


@pytest.mark.parametrize(
    ("entries", "data", "reason"),
    [
        ({"a": F32}, bytes(4), "is truncated, or has bytes after its end"),
        ({"a": F32}, bytes(16), "is truncated, or has bytes after its end"),
        ({"a": F32, "b": F32}, bytes(8), "the bytes of b have a wrong"),
        ({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12), "the bytes of b have a wrong"),
        ({"a": F32 | {"data_offsets": [8, 16]}}, bytes(16), "the bytes of a have a wrong"),
        ({"a": F32 | {"shape": [3]}}, bytes(8), "the bytes of a have a wrong"),
        (
            {"a": F32 | {"shape": [2**40], "data_offsets": [0, 2**42]}},
            bytes(8),
            "is truncated, or has bytes after its end",
        ),
        ({"a": F32 | {"shape": [-2]}}, bytes(8), "the entry of a"),
        ({"a": F32 | {"shape": [True, 2]}}, bytes(8), "the entry of a"),
        ({"a": F32 | {"shape": [1] * 65}}, bytes(8), "the entry of a"),
        ({"a": F32 | {"data_offsets": [0, 2**70]}}, bytes(8), "the entry of a"),
        ({"a": F32 | {"more": 1}}, bytes(8), "the entry of a"),
        ({"a": F32 | {"dtype": "F31"}}, bytes(8), "F31"),
        ({"a": F32 | {"data_offsets": "08"}}, bytes(8), "cannot be read"),
        ({"a": 5}, bytes(8), "cannot be read"),
        ({"c": F32}, bytes(8), "cannot be read"),
        ({"a": F32}, bytes(8), "tensors that belong to no part"),
    ],
)
def test_a_header_that_does_not_fit_its_tensors_is_refused(
    entries: dict[str, Any], data: bytes, reason: str, tmp_path: Path, forge_header: Any
) -> None:
    forge_header(tmp_path / "odd.safetensors", DIGESTS, entries, data)
    with pytest.raises(DamagedCheckpoint, match=rf"odd\.safetensors: .*{reason}") as caught:
        read(tmp_path / "odd.safetensors")
    assert len(str(caught.value).splitlines()) == 1


HEAD = '{"__metadata__":{"format":"2","sha256":"' + "0" * 64 + '"'


@pytest.mark.parametrize(
    "text",
    [
        HEAD + ',"a":"1","a":"2"}}', HEAD + '},"a":1,"a":2}', HEAD + ',"a":5}}', HEAD + ',"a":' + "[" * 100_000, HEAD + "}",
        HEAD + ',"digests":"' + "[" * 100_000 + '"}}', HEAD + ',"digests":"[]"}}', HEAD + ',"digests":""}}', HEAD,
        '{"format":"2"}', "[]", "{" * 9, HEAD.replace('"2"', '"two"') + "}}", "\x00" * 200,
    ],
    ids=range(14),
)  # fmt: skip
def test_a_header_of_another_kind_is_refused(text: str, tmp_path: Path, forge_header: Any) -> None:
    forge_header(tmp_path / "odd.safetensors", {}, {}, text=text)
    with pytest.raises(DamagedCheckpoint, match=r"odd\.safetensors: (is not a checkpoint|cannot be read)"):
        read(tmp_path / "odd.safetensors")
