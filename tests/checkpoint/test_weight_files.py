"""Weights from the files that people have: checkpoints, state dicts, safetensors."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from runner.checkpoint.weights import read_weights
from runner.config.errors import UserError


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {"body.weight": torch.randn(3, 2), "body.bias": torch.randn(3)}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_safetensors_are_read(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    found = read_weights(str(path), tmp_path)
    assert (found.path, found.classes) == (path, ())
    assert same(found.tensors, tensors)


@pytest.mark.parametrize("key", [None, "state_dict", "model", "model_state_dict"])
def test_state_dicts_are_read_alone_or_under_a_usual_name(
    key: str | None, tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    path = tmp_path / "weights.pth"
    torch.save({**tensors, "epoch": 3} if key is None else {key: tensors, "epoch": 3, "optimizer": {}}, path)
    assert same(read_weights(str(path), tmp_path).tensors, tensors)


def test_files_of_the_old_format_are_read(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / "weights.pth"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert same(read_weights(str(path), tmp_path).tensors, tensors)


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(nn.Linear(2, 2), path)
    with pytest.raises(UserError, match=r"init_from: .* is refused: .* nothing in it was run"):
        read_weights(str(path), tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"PK\3\4 and then nothing"])
def test_what_cannot_be_read_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"init_from: .*{name}"):
        read_weights(str(path), tmp_path)


def test_an_archive_that_would_fill_the_memory_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(UserError, match=r"is compressed, which torch\.save never does"):
        read_weights(str(path), tmp_path)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (torch.zeros(1).expand(2**14, 2**14), "a tensor is larger than the file"),
        (torch.zeros(2**14).as_strided((2**14, 2**14), (1, 0)), "a tensor is larger than the file"),
        (torch.zeros(4, 4, device="meta"), "_rebuild_meta_tensor_no_storage is not allowed"),
    ],
    ids=["expanded", "strided", "meta"],
)
@pytest.mark.parametrize("new_format", [True, False])
def test_tensors_that_stand_for_more_than_the_file_holds_are_refused(
    head: Tensor, reason: str, new_format: bool, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"head.weight": head}, path, _use_new_zipfile_serialization=new_format)
    assert path.stat().st_size < 200_000
    with pytest.raises(UserError, match=f"init_from: .* is refused: .*{reason}"):
        read_weights(str(path), tmp_path)


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {"model": {}}], ids=str)
def test_a_file_without_tensors_by_name_is_named(content: object, tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(UserError, match="has no tensors by name"):
        read_weights(str(path), tmp_path)


def test_a_path_to_nothing_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").touch()
    with pytest.raises(UserError, match=r"init_from: there is no .*weigths\.pth; did you mean '.*weights\.pth'"):
        read_weights(str(tmp_path / "weigths.pth"), tmp_path)
    with pytest.raises(UserError, match="init_from: no run with a checkpoint"):
        read_weights("last", tmp_path / "digits")


def test_a_safetensors_file_without_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    save_file({}, path, metadata={"kind": "nothing"})
    with pytest.raises(UserError, match="has no tensors"):
        read_weights(str(path), tmp_path)
