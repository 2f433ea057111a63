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


@pytest.mark.parametrize("kind", ["zip", "legacy", "state_dict", "model", "model_state_dict", "safetensors"])
def test_weights_are_read_alone_or_under_a_usual_name(kind: str, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / ("model.safetensors" if kind == "safetensors" else "weights.pth")
    if kind == "safetensors":
        save_file(tensors, path)
    elif kind in ("zip", "legacy"):
        torch.save({**tensors, "epoch": 3}, path, _use_new_zipfile_serialization=kind == "zip")
    else:
        torch.save({kind: tensors, "epoch": 3, "optimizer": {}}, path)
    found = read_weights(str(path), tmp_path)
    assert (found.path, found.classes) == (path, ())
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)


class Bomb:
    """Unpickling it calls a function."""

    def __init__(self, call: Callable[..., object], argument: object) -> None:
        self.call, self.argument = call, argument

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (self.argument,)


@pytest.mark.parametrize("kind", ["zip", "legacy", 0, 5], ids=str)
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
    torch.save(nn.Linear(2, 2), path)  # a whole module is refused by its class
    with pytest.raises(UserError, match=r"is refused: .*\(torch\.nn\.modules\.linear\.Linear\); nothing in it was run"):
        read_weights(str(path), tmp_path)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_what_is_truncated_or_none_is_named(kind: str, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pth'}"
    torch.save(tensors, path, _use_new_zipfile_serialization=kind == "zip")
    data = path.read_bytes()
    parts = [data[:length] for length in (3, 10, 100, len(data) // 2, len(data) - 1)]
    for content in [*parts, b"", b"no weights at all", b"PK\3\4 and then nothing"]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"init_from: .*weights\.\w+ (is refused|cannot be read)"):
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


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {"model": {}}, None], ids=str)
def test_a_file_without_tensors_by_name_is_named(content: object, tmp_path: Path) -> None:
    path = tmp_path / ("other.pt" if content else "empty.safetensors")
    torch.save(content, path) if content else save_file({}, path, metadata={"kind": "nothing"})
    with pytest.raises(UserError, match="has no tensors by name"):
        read_weights(str(path), tmp_path)


def test_a_path_to_nothing_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").touch()
    with pytest.raises(UserError, match=r"init_from: there is no .*weigths\.pth; did you mean '.*weights\.pth'"):
        read_weights(str(tmp_path / "weigths.pth"), tmp_path)
    with pytest.raises(UserError, match="init_from: no run with a checkpoint"):
        read_weights("last", tmp_path / "digits")
