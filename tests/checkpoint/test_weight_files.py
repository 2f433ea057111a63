"""Weights from the files that people have: checkpoints, state dicts, safetensors."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.checkpoint.weights import read_weights


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


class Bomb:
    """Unpickling it calls a function."""

    def __init__(self, call: Callable[..., object], argument: object) -> None:
        self.call, self.argument = call, argument

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (self.argument,)


@pytest.mark.parametrize("kind", ["zip", "legacy", *range(6)], ids=str)
@pytest.mark.parametrize("call", [os.system, eval, Path.touch], ids=["os.system", "eval", "Path.touch"])
def test_code_in_a_file_does_not_run(
    kind: str | int, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path, ran = tmp_path / "model.pth", tmp_path / "ran"
    argument = {os.system: f"touch {ran}", eval: f"open('{ran}', 'w')"}.get(call, ran)
    if isinstance(kind, int):
        path.write_bytes(pickle.dumps(Bomb(call, argument), protocol=kind))
    else:
        torch.save({"x": Bomb(call, argument)}, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(UserError, match=r"init_from: .* is refused: .* nothing in it was run"):
        read_weights(str(path), tmp_path)
    assert not ran.exists()


def test_a_whole_module_is_refused_by_its_class(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pth")
    with pytest.raises(UserError, match=r"is refused: .*\(torch\.nn\.modules\.linear\.Linear\); nothing in it was run"):
        read_weights(str(tmp_path / "model.pth"), tmp_path)


@pytest.mark.parametrize("new_format", [True, False])
def test_truncated_weights_are_named(new_format: bool, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / "weights.pth"
    torch.save(tensors, path, _use_new_zipfile_serialization=new_format)
    data = path.read_bytes()
    for length in (3, 10, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=r"init_from: .*weights\.pth (is refused|cannot be read)"):
            read_weights(str(path), tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"PK\3\4 and then nothing"])
def test_what_cannot_be_read_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"init_from: .*{name}"):
        read_weights(str(path), tmp_path)


@pytest.mark.parametrize(
    "head",
    [
        torch.zeros(1).expand(2**30),
        torch.zeros(2**14).as_strided((2**14, 2**14), (1, 0)),
        torch.zeros(4, 4, device="meta"),
        torch.eye(3).to_sparse(),
    ],
    ids=["expanded", "strided", "meta", "sparse"],
)
@pytest.mark.parametrize("new_format", [True, False])
def test_tensors_that_stand_for_more_than_the_file_holds_are_refused(
    head: Tensor, new_format: bool, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"head.weight": head}, path, _use_new_zipfile_serialization=new_format)
    assert path.stat().st_size < 200_000
    with pytest.raises(UserError, match=r"init_from: .* is refused: 'head\.weight' is not a dense tensor that fits"):
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
