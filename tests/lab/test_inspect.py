"""`inspect` says what a model is and computes, in the numbers that one gets by hand, and changes nothing by looking."""

from __future__ import annotations

import errno
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.checkpoint.file import read
from runner.config.load import resolve_config
from runner.config.schema.verbs import Inspect
from runner.engine.state import load_weights
from runner.lab.inspect.numbers import layers_of, numbers_of, pass_through
from runner.lab.inspect.parts import maps_of
from runner.models.features import write_features
from runner.run.run import Run
from runner.train import build_run

DATA = (
    "threads=1", "device=cpu", "data=synthetic", "data.dataset.samples=80", "data.dataset.classes=4", "data.image_size=8",
    "data.batch_size=8", "transform=standard", "data.split.val=0.3",
)  # fmt: skip
SMALL = (*DATA, "model=small_cnn", "model.width=4")
AWAY = """
from torch import nn

def net(in_channels, image_size, num_classes):
    model = nn.Sequential()
    model.add_module("up/away/x", nn.Conv2d(3, 3, 1))
    return model.extend([nn.Flatten(), nn.Linear(192, num_classes)])
"""
PARTS = ("layers", "activations", "gradients", "inputs", "features")


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.tracking.plots._DPI", 30)


@pytest.fixture
def inspect(json_of: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return functools.partial(json_of, "inspect")


@pytest.fixture
def built(compose: Callable[..., Any]) -> Callable[..., Run]:
    return lambda *words: build_run(resolve_config(compose(*words, verb="inspect"), Inspect))


def test_layers_add_up_to_the_model(inspect: Any, built: Any) -> None:
    found = inspect(*SMALL, "what=[layers]")
    model, totals = built(*SMALL).model, found["totals"]
    assert totals["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert totals["weights_bytes"] == 4 * totals["parameters"]
    assert sum(layer["flops"] for layer in found["layers"]) == totals["flops_forward"]
    by_name = {layer["name"]: layer for layer in found["layers"]}
    first = by_name["stages.0.0"]
    assert (first["kind"], first["output"], first["parameters"]) == ("Conv2d", [4, 8, 8], 4 * 3 * 9)
    assert first["flops"] == 2 * 4 * 8 * 8 * 3 * 9
    assert first["output_bytes"] == 4 * 4 * 8 * 8
    assert by_name["stages.0.2"]["output_bytes"] == 0, "ReLU works in place"
    assert by_name[""]["flops"] == 0
    assert by_name["head"]["output"] == [4]
    assert found["what"] == ["layers"]


def test_weights_that_two_modules_share_count_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    layers = {layer["name"]: layer for layer in layers_of(model, torch.zeros(1, 3), {}, 1)}
    assert [layers[name]["parameters"] for name in ("0", "1")] == [12, 3]


def test_statistics_are_those_that_one_gets_by_hand(built: Any) -> None:
    training = built(*SMALL, "model.dropout=0.0")
    model = training.model
    batch = next(iter(training.data.train.loader.batches(0, 0, 1)))
    found = pass_through(training, batch, [])
    assert all(weight.grad is None for weight in model.parameters())

    seen: dict[str, Tensor] = {}
    model.stages[1][0].register_forward_hook(lambda m, a, output: seen.update(conv=output) or output.retain_grad())
    loss = training.loss(model.train()(batch.images), batch.targets)
    loss.backward()
    assert found.loss == float(loss.detach())
    conv = found.activations["stages.1.0"]
    assert conv.shape == tuple(seen["conv"].shape)
    assert conv.mean == pytest.approx(float(seen["conv"].detach().mean()), abs=1e-6)
    assert conv.std == pytest.approx(float(seen["conv"].detach().std(correction=0)), rel=1e-5)
    assert (conv.minimum, conv.maximum) == (float(seen["conv"].detach().min()), float(seen["conv"].detach().max()))
    assert list(found.flows) == list(found.activations)
    assert found.flows["stages.1.0"].norm == pytest.approx(float(seen["conv"].grad.norm()), rel=1e-5)
    for name, weight in model.named_parameters():
        assert found.gradients[name].norm == pytest.approx(float(weight.grad.norm()), rel=1e-5), name


def test_tensors_are_inspected_by_the_names_of_modules(built: Any) -> None:
    training = built(*DATA, "model=resnet18_cifar", "model.width=4")
    batch = next(iter(training.data.train.loader.batches(0, 0, 1)))
    found = pass_through(training, batch, ["stages.0", "stages.3.1", "head"])
    assert list(found.activations) == list(found.flows) == ["stages.0", "stages.3.1", "head"]
    whole = pass_through(training, batch, [])
    assert found.loss == whole.loss
    assert found.activations["stages.0"] == whole.activations["stages.0.1"]
    assert found.flows["head"].norm > 0
    kept = ("stages.0.", "stages.3.1.", "head.")
    assert found.gradients == {name: each for name, each in whole.gradients.items() if name.startswith(kept)}


def test_a_frozen_weight_and_one_that_the_loss_does_not_reach_are_told(built: Any) -> None:
    training = built(*SMALL)
    model = training.model
    model.stages[0][0].weight.requires_grad_(False)
    model.head.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    found = pass_through(training, next(iter(training.data.train.loader.batches(0, 0, 1))), [])
    assert found.frozen == ["stages.0.0.weight"]
    assert found.without == ["head.idle"]
    assert "stages.0.0.weight" not in found.gradients


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = numbers_of(torch.tensor([1.0, float("nan"), 3.0, float("inf"), 0.0]))
    assert (found.not_finite, found.mean, found.minimum, found.maximum) == (2, pytest.approx(4 / 3), 0.0, 3.0)
    assert found.zeros == pytest.approx(1 / 3)
    assert numbers_of(torch.full((2, 2), float("nan"))).not_finite == 4


def test_every_part_gives_its_pictures_and_numbers(inspect: Any, workdir: Path) -> None:
    found = inspect(*SMALL, "samples=2")
    folder = Path(found["folder"])
    assert folder.parent == Path("outputs/inspections")
    assert tuple(found["what"]) == PARTS
    assert {path.name for path in folder.iterdir()} == {*found["files"], "inspect.json"}
    assert found["files"] == ["inputs.png", "features_stages.2.png"]
    for name in found["files"]:
        with Image.open(folder / name) as image:
            assert min(image.size) > 50
            image.verify()
    written = json.loads((folder / "inspect.json").read_text())
    assert {name: found[name] for name in written} == written


@pytest.mark.extended
def test_a_grid_is_drawn_of_the_layers_that_are_named_or_of_the_last_one_with_maps(inspect: Any, accepted: Any) -> None:
    words = ("what=features", "tensors=stages.0,head,stages.1.0")
    assert inspect(*SMALL, *words)["files"] == ["features_stages.0.png", "features_stages.1.0.png"]
    shown = accepted("inspect", *SMALL, *words).out
    assert "features: no picture, because no output of head can be seen as maps" in shown
    assert inspect(*DATA, "model=mlp", "model.hidden=[8]", "what=features")["files"] == []
    assert inspect(*DATA, "model=vit_tiny", "what=features")["files"] == ["features_norm.png"], "tokens are maps"


def test_tokens_on_a_square_are_maps() -> None:
    tokens = torch.rand(2, 10, 3)
    maps = maps_of(tokens)
    assert maps is not None
    assert maps.shape == (2, 3, 3, 3)
    assert maps[1, 2].flatten().equal(tokens[1, 1:, 2]), "without the class token"
    assert [maps_of(tokens[:, :count]) for count in (2, 3, 6)] == [None] * 3
    assert maps_of(tokens[:, :, :, None, None]) is None


@pytest.fixture
def trained(train_once: Callable[..., Any]) -> Any:
    return train_once(*SMALL, "epochs=1", "optimizer.lr=0.02")


@pytest.mark.extended
def test_mistakes_are_those_that_eval_counts_and_the_run_is_not_touched(
    trained: Any, inspect: Any, json_of: Any
) -> None:
    before = {path: path.read_bytes() for path in trained.directory.rglob("*") if path.is_file()}
    found = inspect(f"ckpt_path={trained.directory}", "what=errors", "samples=3", "evaluate.batch_size=7", "threads=1")
    assert {path: path.read_bytes() for path in before} == before
    folder = Path(found["folder"])
    assert folder.parent == trained.directory / "inspect"
    assert found["what"] == ["errors"]
    evaluated = json_of("eval", f"ckpt_path={trained.directory}", "split=val", "threads=1", "output=evaluated")
    errors = found["errors"]
    assert errors["confusion"] == evaluated["confusion"]
    assert errors["wrong"] == round((1 - evaluated["metrics"]["accuracy"]) * errors["samples"])
    assert errors["wrong"] > 0
    surest = errors["surest"]
    assert len(surest) == min(3, errors["wrong"])
    assert [each["probability"] for each in surest] == sorted((e["probability"] for e in surest), reverse=True)
    assert all(each["true"] != each["predicted"] for each in surest)
    assert {"confusion.png", "errors.png"} <= set(found["files"])
    assert found["checkpoint"] == evaluated["checkpoint"]


def test_all_parts_are_looked_at_unless_some_are_asked_for_and_errors_with_a_checkpoint_only(
    trained: Any, inspect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: dict[str, Callable[..., Any]] = dict.fromkeys((*PARTS, "errors"), lambda seen: {})
    monkeypatch.setattr("runner.lab.inspect.run.PARTS", nothing)
    assert tuple(inspect(*SMALL)["what"]) == PARTS
    assert tuple(inspect(f"ckpt_path={trained.directory}")["what"]) == (*PARTS, "errors")
    assert inspect(*SMALL, "what=errors,layers")["what"] == ["layers", "errors"]


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_features_of_a_split_are_those_of_its_samples_in_order(
    ending: str, trained: Any, inspect: Any, built: Any
) -> None:
    found = inspect(
        f"ckpt_path={trained.directory}", "features=stages.1,head", "split=test", f"output=made/f.{ending}",
        "evaluate.batch_size=6",
    )  # fmt: skip
    path = Path(found["features"]["file"])
    assert path == Path(f"made/f.{ending}")
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    arrays: dict[str, Any] = load_file(path) if ending == "safetensors" else dict(np.load(path))
    assert {name: list(array.shape) for name, array in arrays.items()} == found["features"]["shapes"]
    assert set(arrays) == {"stages.1", "head", "targets", "indices"}

    training = built(*SMALL)
    load_weights(training.model, read(trained.directory / "checkpoints" / "best.safetensors")["model"])
    batch = next(iter(training.data.eval_split("test").loader.batches(0, 0, 1)))
    with torch.no_grad():
        logits = training.model.eval()(batch.images)
    np.testing.assert_allclose(arrays["head"], logits.numpy(), rtol=1e-4, atol=1e-5)
    assert arrays["targets"].tolist() == batch.targets.tolist()
    assert arrays["indices"].tolist() == batch.indices.tolist()
    assert arrays["stages.1"].shape == (len(logits), 8, 4, 4)
    assert "folder" not in found, "features alone were asked for"

    found = inspect(f"ckpt_path={trained.directory}", "features=head", "what=[layers]")
    path, folder = Path(found["features"]["file"]), trained.directory / "inspect"
    assert (path.name, path.parent.parent, Path(found["folder"]).parent) == ("features_val.npz", folder, folder)


def test_features_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [{"x": torch.full((3, 2), float(number)), "y": torch.arange(3)} for number in range(5)]
    target = tmp_path / "f.npz"
    assert write_features(iter(batches), target) == {"x": (15, 2), "y": (15,)}
    with np.load(target) as archive:
        assert archive["x"][:, 0].tolist() == [number for number in range(5) for _ in range(3)]
        assert (archive["x"].dtype, archive["y"].dtype) == (np.float32, np.int64)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="no space left"):
        write_features(iter(batches), tmp_path / "g.safetensors")
    other = iter([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}])
    with pytest.raises(UserError, match=r"features: x has rows of \(4,\) in one batch and of \(3,\) in another"):
        write_features(other, tmp_path / "h.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["f.npz"]


@pytest.mark.extended
def test_averaged_weights_are_looked_at_where_they_are_meant(train: Any, inspect: Any, run: Any) -> None:
    trained = train(*SMALL, "epochs=1", "optimizer.lr=0.02", "ema=0.9")
    contents = read(trained.directory / "checkpoints" / "last.safetensors")
    for which, weights in (("raw", contents["model"]), ("averaged", contents["averaged"]["weights"])):
        last = f"ckpt_path={trained.directory}/checkpoints/last.safetensors"
        found = inspect(last, "what=gradients", f"weights={which}")
        norms = {each["name"]: each["weight_norm"] for each in found["gradients"]}
        assert norms["stages.0.0.weight"] == pytest.approx(float(weights["stages.0.0.weight"].norm()), rel=1e-5)
        assert found["weights_are"] == {"raw": "raw", "averaged": "ema"}[which]


def test_a_module_called_like_a_path_writes_into_the_folder_alone(inspect: Any, own_module: Any, workdir: Path) -> None:
    own_module("away", AWAY)
    net = ("model=mlp", "~model.hidden", "~model.dropout", "model._target_=away.net")
    found = inspect(*DATA, *net, "what=features", "tensors=['up/away/x']")
    assert found["files"] == ["features_up_away_x.png"]
    assert {path.parent for path in workdir.rglob("*.png")} == {workdir / found["folder"]}
