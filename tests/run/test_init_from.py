"""`init_from`: weights from the files that people have, what fits, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import TINY
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.checkpoint.file import read
from runner.checkpoint.weights import read_weights, weights_sha256
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.models.heads import Head
from runner.run.finetune import InitialWeights, start_from


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, classes)


@pytest.fixture
def start(compose: Callable[..., Any], tmp_path: Path) -> Callable[..., InitialWeights]:
    """Start a model from tensors, as `init_mismatch` says."""
    composition = compose()
    config = resolve_config(composition, Train)

    def call(
        model: nn.Module, tensors: dict[str, Tensor], mismatch: Any = "head", classes: Sequence[str] = "abc"
    ) -> InitialWeights:
        path = tmp_path / "weights.pth"
        torch.save(tensors, path)
        settings = dataclasses.replace(config, init_from=str(path), init_mismatch=mismatch)
        return start_from(settings, model, Head("head", "head"), classes, name="model", path=str(settings.init_from))

    return call


def test_what_fits_is_taken_and_a_head_of_another_size_is_left_and_listed(start: Any) -> None:
    source, model = Net(), Net()
    found = start(model, source.state_dict(), "raise")
    assert (found.misfits, found.loaded) == ([], len(source.state_dict()))
    assert weights_sha256(model.state_dict()) == weights_sha256(source.state_dict()) == found.sha256
    assert all(weight.requires_grad and weight.is_leaf for weight in model.parameters())
    found = start(model, Net(5).state_dict())
    shapes = [["head.weight", "of another shape", "5x4", "3x4"], ["head.bias", "of another shape", "5", "3"]]
    assert found.table() == shapes
    assert torch.equal(model.head.weight, source.head.weight)
    assert not torch.equal(model.body[0].weight, source.body[0].weight)
    assert found.rows()[0][1] == "7 tensors, 2 skipped because they do not fit"


def test_names_of_a_deeper_head_are_missing_and_unexpected(start: Any) -> None:
    model = Net()
    model.head = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))  # type: ignore[assignment]
    lacks = {misfit.name: misfit.lack for misfit in start(model, Net().state_dict()).misfits}
    assert lacks == {
        **dict.fromkeys(["head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"], "missing"),
        **dict.fromkeys(["head.weight", "head.bias"], "unexpected"),
    }


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.model."])
def test_what_all_names_begin_with_is_left_out(prefix: str, start: Any) -> None:
    source, model = Net(), Net()
    start(model, {prefix + name: tensor for name, tensor in source.state_dict().items()}, "raise")
    assert torch.equal(model.body[0].weight, source.body[0].weight)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("body.0.bias", None, r"1 missing \(body\.0\.bias\)"),
        ("extra", torch.zeros(1), r"1 unexpected \(extra\)"),
        ("body.0.bias", torch.zeros(7), r"1 of another shape \(body\.0\.bias 7 for 4\)"),
    ],
)
def test_what_does_not_fit_outside_the_head_is_refused_unless_skipped(
    name: str, tensor: Tensor | None, message: str, start: Any
) -> None:
    model, tensors = Net(), {**Net().state_dict(), name: tensor}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    before = weights_sha256(model.state_dict())
    for mismatch in ("head", "raise"):
        with pytest.raises(UserError, match=message):
            start(model, tensors, mismatch)
        assert weights_sha256(model.state_dict()) == before
    assert len(start(model, tensors, "skip").misfits) == 1


@pytest.mark.parametrize("name", ["body.0.weight", "head.bias", "mask"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int64])
def test_values_of_another_kind_are_refused(name: str, dtype: torch.dtype, start: Any) -> None:
    model, tensors = Net(), dict(Net().state_dict())
    if name == "mask":
        model.register_buffer("mask", torch.ones(3, dtype=dtype))
        tensors["mask"] = torch.ones(3)
    else:
        tensors[name] = tensors[name].to(dtype)
    before = weights_sha256(model.state_dict())
    for mismatch in ("head", "raise", "skip"):
        with pytest.raises(UserError, match=rf"init_from: the tensor {name} of .* is torch\.\w+, .* is torch\.\w+\n"):
            start(model, tensors, mismatch)
    assert weights_sha256(model.state_dict()) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_another_precision_are_taken(dtype: torch.dtype, start: Any) -> None:
    source, model = Net(), Net()
    tensors = {name: tensor.to(dtype) for name, tensor in source.state_dict().items()}
    start(model, tensors, "raise")
    # A counter that older files lack is not missed
    assert (
        start(Net(), {name: each for name, each in tensors.items() if "num_batches" not in name}, "raise").misfits == []
    )
    assert torch.equal(model.body[0].weight, source.body[0].weight.to(dtype).float())


def test_raise_refuses_a_head_that_does_not_fit_and_skip_weights_of_which_none_fits(start: Any) -> None:
    refused = r"2 of another shape \(head.weight 5x4 for 3x4, .*\n +allowed: init_mismatch=head"
    with pytest.raises(UserError, match=refused):
        start(Net(), Net(5).state_dict(), "raise")
    with pytest.raises(UserError, match="are not those of this model"):
        start(Net(), {"other": torch.zeros(3)}, "skip")


def test_the_model_of_a_checkpoint_that_does_not_fit_is_named(train: Any, run: Any) -> None:
    base = (*(word for word in TINY if "model" not in word), "model=mlp", "model.hidden=[4]")
    file = f"init_from={train(*TINY).directory}"
    other = run("train", *base, file)
    assert (other.status, "holds SmallCNN and the config builds MLP" in other.err) == (2, True), other.err
    wider = run("train", *TINY, "model.width=8", file)
    assert "holds SmallCNN(width=4) and the config builds SmallCNN(width=8)" in wider.err
    assert "Traceback" not in other.err + wider.err


def test_long_lists_are_cut_in_the_table(start: Any) -> None:
    extra = {f"extra.{number}": torch.zeros(1) for number in range(50)}
    table = start(Net(), {**Net().state_dict(), **extra}, "skip").table()
    assert len(table) == 41
    assert table[-1][0] == "and 10 more"


SMALL = ("model=resnet18_cifar", "model.width=4", "limit.train_batches=2", "epochs=1", "evaluate.test=false")
FIRST, SECOND = "+data.dataset.classes=[0,1,2]", "+data.dataset.classes=[3,4,5]"


def test_a_run_starts_from_the_best_of_another_and_says_so(train: Any) -> None:
    source = train(*SMALL, FIRST)
    best = read(source.directory / "checkpoints" / "best.safetensors")
    tuned = train(*SMALL, SECOND, f"init_from={source.directory}", "freeze=all-but-head", "max_steps=1")
    last = tuned.last["model"]
    trunk = [name for name in last if not name.startswith("head")]
    assert all(torch.equal(last[name], best["model"][name]) for name in trunk)
    assert not torch.equal(last["head.weight"], best["model"]["head.weight"])
    assert tuned.summary["global_step"] == 1
    assert tuned.summary["resumed_from"] is None
    record = tuned.summary["init_from"]
    assert record["path"] == str((source.directory / "checkpoints" / "best.safetensors").resolve())
    assert record["weights_sha256"] == weights_sha256(best["model"])
    assert "skipped tensors of init_from" in tuned.out
    assert "head.weight  of other classes  3x32         3x32" in tuned.out
    # The file is not needed again, and what was started from is still known.
    for file in (source.directory / "checkpoints").iterdir():
        file.unlink()
    resumed = train(f"ckpt_path={tuned.directory}", "max_steps=2")
    assert resumed.summary["init_from"] == record


def test_the_same_classes_bring_their_head_along(train: Any) -> None:
    source = train(*SMALL, FIRST, "limit.train_batches=null", "max_steps=1")
    words = ("init_from=last", "init_mismatch=raise", "freeze=[stem,stages]", "optimizer.lr=0.0", "max_steps=1")
    runs = (source, train(*SMALL, FIRST, *words))
    heads = [run.last["model"]["head.weight"] for run in runs]
    assert torch.equal(*heads)


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
