"""What a checkpoint stands for has bounds, and what is in it has the types that everybody relies on."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint import pickles
from runner.checkpoint.checks import wrong_type
from runner.checkpoint.file import DamagedCheckpoint, read, write

Make = Callable[..., dict[str, Any]]
MIB = 2**20


def loaded(data: bytes) -> Any:
    return pickles.load(io.BytesIO(data))


def zipped(records: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of the same name twice
        for name, data in records:
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("records", "compression", "words"),
    [
        ([("a", b"\0" * MIB)], zipfile.ZIP_DEFLATED, "compressed"),
        ([("a/data.pkl", b"1"), ("A/DATA.pkl", b"2")], zipfile.ZIP_STORED, "two records with the same name"),
        ([("a", b"1"), ("a", b"2")], zipfile.ZIP_STORED, "two records with the same name"),
        ([("a/data.pkl", b"1"), ("b/data.pkl", b"2")], zipfile.ZIP_STORED, "not one folder"),
        ([("/elsewhere", b""), ("a/data.pkl", b"1")], zipfile.ZIP_STORED, "not one folder"),
        ([("a/data.pkl", b"N."), ("a/byteorder", b"big")], zipfile.ZIP_STORED, "big-endian"),
    ],
)
def test_an_archive_that_torch_never_makes_is_told(
    records: list[tuple[str, bytes]], compression: int, words: str
) -> None:
    with pytest.raises(pickles.NotSaved, match=words):
        loaded(zipped(records, compression))


def test_a_record_that_claims_more_than_the_file_has_is_told() -> None:
    data = bytearray(zipped([("a", b"x" * 24)]))
    central = data.rindex(b"PK\x01\x02")
    data[central + 20 : central + 28] = (2**31).to_bytes(4, "little") * 2
    with pytest.raises(pickles.NotSaved, match="more bytes than the file has"):
        loaded(bytes(data))


def test_something_else_than_an_archive_is_told() -> None:
    for data in (b"x" * 100, b"PK\3\4" + b"x" * 100):
        with pytest.raises(pickles.NotSaved, match="not a zip archive"):
            loaded(data)


def doubled(times: int) -> list[Any]:
    value: list[Any] = [0]
    for _ in range(times):
        value = [value, value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (doubled(30), "more values than a file of its size can contain"),
        (endless(), "levels of nesting"),
        (torch.zeros(1).expand(2**30), "a tensor is larger than the file"),
        (torch.zeros(2, device="meta"), "holds more than tensors and plain containers"),
        (torch.eye(2).to_sparse(), "holds more than tensors and plain containers"),
        ({(1, (2, 3)): 4}, "Unsupported key"),
    ],
    ids=["doubled", "endless", "expanded", "meta", "sparse", "deep key"],
)
def test_what_no_file_of_its_size_holds_is_told(
    value: Any, words: str, tmp_path: Path, contents: Make, forge: Callable[[Path, Any], None]
) -> None:
    made = contents()
    made["metrics"]["callbacks"]["x"] = value
    forge(tmp_path / "odd.pt", made)
    with pytest.raises(DamagedCheckpoint, match=words):
        read(tmp_path / "odd.pt")


def test_contents_of_a_run_are_what_they_should_be(contents: Make) -> None:
    best = {"metric": "val/accuracy", "mode": "max", "value": 1, "loss": 0.5, "global_step": 3, "epoch": 1}
    made = contents(scaler={"scale": 65536.0, "growth_interval": 2000})
    made["metrics"] |= {"best": best}
    made["model"]["head._extra_state"] = {"anything": 1}
    assert wrong_type(made) == ""


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("position", "epoch"), 2**60, "position.epoch"),
        (("position", "batch"), True, "position.batch"),
        (("position", "micro_batch"), "0", "position.micro_batch"),
        (("position", "evaluation_due"), 1, "position.evaluation_due"),
        (("position", "left_out"), [1, "2"], "position.left_out is not a list of steps"),
        (("position", "skipped_steps"), [1, "2"], "position.skipped_steps is not a list of steps"),
        (("position", "turns"), [[5, 1], [5, 2]], "position.turns is not a list of steps and epochs, in order"),
        (("position", "turns"), [[5, "1"]], "position.turns is not a list of steps and epochs, in order"),
        (("position", "turns"), 5, "position.turns is not a list of steps and epochs, in order"),
        (("metrics", "best"), {"metric": "x"}, "metrics.best.mode"),
        (("metrics", "best"), [], "metrics.best is not a mapping"),
        (("metrics", "last"), {"loss": "low"}, "metrics.last is not numbers by name"),
        (("metrics", "images"), [3, 8], "metrics.images is not channels, height and width"),
        (("metrics", "images"), [3, 8, 8.0], "metrics.images is not channels, height and width"),
        (("metrics", "images"), [3, 2**20, 2**20], "metrics.images is not channels, height and width"),
        (("scaler",), {"scale": None}, "scaler is not numbers by name"),
        (("model", "layer.weight"), [1.0], "model is not tensors by name"),
        (("versions",), {1: "2"}, "versions is not a mapping by name"),
    ],
)
def test_values_of_another_type_are_named(
    place: tuple[str, ...], value: Any, words: str, tmp_path: Path, contents: Make
) -> None:
    made = contents()
    inner = made
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    write(tmp_path / "odd.safetensors", made)
    with pytest.raises(DamagedCheckpoint, match=words):
        read(tmp_path / "odd.safetensors")
