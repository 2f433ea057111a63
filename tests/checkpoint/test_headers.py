"""Headers that would take far more memory than their file has bytes are refused before they are parsed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.base.errors import UserError
from runner.checkpoint.file import DamagedCheckpoint, read, write

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults import forging

MIB = 2**20


def resident(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


class Peak:
    """The largest memory of this process inside a `with` block, beyond what it had before."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.mib = (resident("VmHWM") - self.before) / MIB


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
        Peak() as peak,
        pytest.raises(DamagedCheckpoint, match="more values, lists or mappings than runs save"),
    ):
        read(path)
    assert peak.mib < 100


def test_a_header_of_more_than_32_mib_is_refused(tmp_path: Path) -> None:
    head = '{"__metadata__":{"format":"2","sha256":"' + "0" * 64 + '","a":"' + "x" * (33 * MIB) + '"}}'
    (tmp_path / "bomb.safetensors").write_bytes(forging.sealed_header(head.encode()))
    with Peak() as peak, pytest.raises(DamagedCheckpoint, match="its header is larger than 32 MiB"):
        read(tmp_path / "bomb.safetensors")
    assert peak.mib < 10


def test_a_state_of_too_many_containers_is_refused_when_it_is_written(tmp_path: Path, contents: Any) -> None:
    made = contents()
    made["metrics"]["callbacks"]["mine"] = [[] for _ in range(2**19)]
    with pytest.raises(UserError, match="262,144 lists and mappings, which could not be read back"):
        write(tmp_path / "a.safetensors", made)
