"""What a pickle would become is known before it is unpickled: small files that ask for gigabytes are refused."""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint import pickles
from runner.checkpoint.file import DamagedCheckpoint, read, write
from runner.checkpoint.weights import read_weights
from runner.config.errors import UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults import forging, memory_files
from faults.forging import archive

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
@pytest.mark.parametrize("what", memory_files._PICKLES)
def test_a_small_checkpoint_that_asks_for_gigabytes_is_refused_within_100_mib(what: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    path.write_bytes(archive(memory_files._archived(memory_files._PICKLES[what])))
    assert path.stat().st_size <= MIB
    with Peak() as peak, pytest.raises(DamagedCheckpoint):
        read(path)
    assert peak.mib < 100


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("what", ["bytearray of a number", "codec hex, 22 times", "copies of a tensor"])
@pytest.mark.parametrize("older", [False, True], ids=["zip", "older"])
def test_small_weights_that_ask_for_gigabytes_are_refused_within_100_mib(
    what: str, older: bool, tmp_path: Path
) -> None:
    path, made = tmp_path / "bomb.pt", memory_files._PICKLES[what]
    path.write_bytes(memory_files._older(made) if older else memory_files._unsealed(memory_files._archived(made)))
    with Peak() as peak, pytest.raises(UserError, match=r"init_from: .* (refused|cannot be read)"):
        read_weights(str(path), tmp_path)
    assert peak.mib < 100


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("part", ["header", "text"])
@pytest.mark.parametrize("item", ["[],", "{},", "777,"])
def test_a_large_header_of_small_values_takes_little_more_memory_than_the_file(
    part: str, item: str, tmp_path: Path, contents: Callable[..., dict[str, Any]]
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


def test_a_state_of_too_many_containers_is_refused_when_it_is_written(
    tmp_path: Path, contents: Callable[..., dict[str, Any]]
) -> None:
    made = contents()
    made["metrics"]["callbacks"]["mine"] = [[] for _ in range(2**19)]
    with pytest.raises(UserError, match="262,144 lists and mappings, which could not be read back"):
        write(tmp_path / "a.safetensors", made)


def test_a_second_list_of_records_inside_an_archive_is_not_read(tmp_path: Path) -> None:
    [word] = memory_files._two_lists(tmp_path, {})
    with pytest.raises(UserError, match=r"init_from: .* (was not written by torch\.save|has no tensors by name)"):
        read_weights(word.partition("=")[2], tmp_path)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older"])
def test_whatever_torch_saves_of_plain_contents_is_loaded(zipped: bool, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.mine = 3  # type: ignore[attr-defined]
    tensor = torch.arange(3)
    tensor.mine = 4  # type: ignore[attr-defined]
    plain: dict[str, Any] = {
        "containers": OrderedDict(a=Counter("aab"), b={1, 2}, c=(1, [2, ()]), d=set(), e=Counter()),
        "bytes": [bytearray(b"xy"), bytearray(), b"\xff\0"],
        "numbers": [2**70, -1, 1.5, 1j, True, None],
        "facts": [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
    }
    tensors = [parameter, torch.nn.Parameter(torch.ones(2)), tensor, torch.eye(2)[0]]
    tensors += [torch.ones(2, dtype=torch.uint16)] if zipped else []  # the older format has no such type
    state = torch.nn.BatchNorm2d(2).state_dict()  # an OrderedDict with an attribute
    path = tmp_path / "saved.pt"
    torch.save(plain | {"tensors": tensors, "state": state}, path, _use_new_zipfile_serialization=zipped)
    with path.open("rb") as file:
        found = pickles.load(file, older=True)
    assert {name: found[name] for name in plain} == plain
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found["tensors"], tensors, strict=True))
    assert found["state"]._metadata == state._metadata


def test_thousands_of_small_tensors_are_not_taken_for_an_attack(tmp_path: Path) -> None:
    path = tmp_path / "many.pt"
    torch.save({f"{number}": torch.tensor(float(number)) for number in range(3000)}, path)
    with path.open("rb") as file:
        assert len(pickles.load(file)) == 3000
