"""What is exported says what the model says, at any batch size, and describes itself."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_masks import MODEL, draw
from extras import PACKAGES, needs
from safetensors.torch import load_file

from runner.checkpoint.file import read
from runner.config.composition import Composition
from runner.config.schema.verbs import Export
from runner.data.sources.digits import digits
from runner.lab.export import formats as export_formats
from runner.run import from_checkpoint as _checkpoint

CPU = torch.device("cpu")
CALL = ("export", "threads=1")
SMALL = ("epochs=1", "model=mlp", "model.hidden=[8]")
NEEDED = PACKAGES["export"]
with_packages = needs("export")
NAMED = '''
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

DIGITS = load_digits()


class Digits(torch.utils.data.Dataset):
    """A class and its image of bytes (1, 8, 8)."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        pixels = torch.from_numpy(DIGITS.images[index] * 15).to(torch.uint8)[None]
        return {"label": int(DIGITS.target[index]), "pixels": pixels}


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Classify:
    def training_step(self, modules, batch):
        return F.cross_entropy(modules["model"](batch["pixels"]), batch["label"])

    def evaluation_step(self, modules, batch):
        logits = modules["model"](batch["pixels"])
        right = (logits.argmax(1) == batch["label"]).float().mean()
        return {"loss": F.cross_entropy(logits, batch["label"]), "right": right}
'''
MAPPINGS = (
    "data=own", "data.dataset._target_=named.Digits", "data.images=[pixels]", "data.normalize.mean=[0.3]",
    "data.normalize.std=[0.4]", "transform=none", "loss=none", "~model.width", "~model.dropout", "model._target_=named.net",
    "task={_target_: named.Classify}", "epochs=5", "optimizer.lr=0.01",
)  # fmt: skip


@pytest.fixture
def model(trained: Path, compose: Callable[..., Composition]) -> torch.nn.Module:
    """The checkpoint's own model."""
    resolved = _checkpoint.resolve_checkpoint(compose(f"ckpt_path={trained}", verb="export"), Export)
    return resolved.restore_model(resolved.data_facts(), torch.device("cpu"))[1]


@pytest.fixture
def export(json_of: Callable[..., Any], trained: Path) -> Callable[..., dict[str, Any]]:
    return functools.partial(json_of, *CALL, f"ckpt_path={trained}")


def normalised(count: int) -> torch.Tensor:
    return (digits()["train"].images[:count] / 255 - 0.3053) / 0.3761


def test_torch_export_takes_any_batch_size(
    export: Any, model: torch.nn.Module, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any, **__: Any) -> None:
        raise AssertionError("the data is not to be read")

    monkeypatch.setattr("runner.run.from_checkpoint.read_data", absent)
    record = export()
    loaded = torch.export.load(trained / "export" / "model.pt2").module()
    for count in (1, 5, 33):
        torch.testing.assert_close(loaded(normalised(count)), model(normalised(count)), rtol=1e-5, atol=1e-5)
    assert [row["batch_size"] for row in record["comparison"]] == [1, 8]
    assert all(row["max_rel"] <= 1e-5 for row in record["comparison"])


@with_packages
def test_every_format_agrees_and_is_described(export: Any, model: torch.nn.Module, trained: Path) -> None:
    import onnxruntime

    record = export("format=safetensors,onnx,torchscript", "batch_sizes=[2,7]")
    folder = trained / "export"
    images = normalised(11)
    expected = model(images)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    assert [each.shape for each in (*session.get_inputs(), *session.get_outputs())] == [
        ["batch", 1, 8, 8],
        ["batch", 10],
    ]
    (outputs,) = session.run(None, {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), expected, rtol=1e-5, atol=1e-5)
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert {(row["format"], row["batch_size"]) for row in record["comparison"]} == {
        (name, size) for name in ("safetensors", "onnx", "torchscript") for size in (2, 7)
    }
    described = json.loads((folder / "model.json").read_text())
    assert described["classes"] == [str(number) for number in range(10)]
    assert described["input"]["shape"] == ["batch", 1, 8, 8]
    assert described["input"]["dtype"] == "float32"
    assert described["preprocessing"]["mean"] == [0.3053]
    assert {name: each["bytes"] for name, each in described["files"].items()} == {
        name: (folder / each["file"]).stat().st_size for name, each in described["files"].items()
    }
    assert sorted(path.name for path in folder.iterdir()) == sorted(Path(path).name for path in record["written"])


@with_packages
def test_weights_beside_an_onnx_file_are_listed_with_the_export_that_wrote_them(
    export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[set[str]] = []
    for most in (0, 2**30):
        monkeypatch.setattr(export_formats, "_INLINE_BYTES", most)
        names.append({Path(path).name for path in export("format=onnx")["written"]})
    assert names == [{"model.onnx", "model.onnx.data", "model.json"}, {"model.onnx", "model.json"}]


def test_preprocessing_goes_into_the_model_where_asked(export: Any, model: torch.nn.Module, trained: Path) -> None:
    record = export("include_preprocessing=true")
    assert record["input"]["dtype"] == "uint8"
    assert record["preprocessing"]["normalization_in_the_model"] is True
    loaded = torch.export.load(trained / "export" / "model.pt2").module()
    torch.testing.assert_close(loaded(digits()["train"].images[:9]), model(normalised(9)), rtol=1e-4, atol=1e-5)


@with_packages
def test_exported_files_and_8_bits_have_the_metrics_of_eval(
    export: Any, json_of: Any, trained: Path, compose: Callable[..., Composition]
) -> None:
    import onnxruntime

    splits = _checkpoint.resolve_checkpoint(compose(f"ckpt_path={trained}", verb="export"), Export).data(CPU)
    for name, words in {"val": (), "test": ("split=test", "include_preprocessing=true")}.items():
        record = export("format=onnx", "quantize=int8", *words)
        assert (record["split"], list(record["metrics"])) == (name, ["model", "onnx", "onnx_int8"])
        evaluated = json_of("eval", "threads=1", f"ckpt_path={trained}", f"split={name}")["metrics"]
        assert record["metrics"]["model"] == pytest.approx(evaluated, abs=1e-5)
        assert record["metrics"]["onnx"] == pytest.approx(evaluated, abs=1e-5)
        assert record["metrics"]["onnx_int8"]["accuracy"] == pytest.approx(evaluated["accuracy"], abs=0.02)
        # The file itself computes what the metrics say, and has 8 bits: it differs, by more than tolerance
        differences = [row["max_rel"] for row in record["comparison"] if row["format"] == "onnx_int8"]
        assert all(1e-5 < each < 0.1 for each in differences)
        session = onnxruntime.InferenceSession(str(trained / "export" / "model.int8.onnx"))
        right = total = 0
        loader = _checkpoint.split_of(splits, name).loader
        for batch in loader.batches(0, 0, math.ceil(loader.samples / loader.batch_size)):
            images, targets = batch.data
            if "include_preprocessing=true" in words:
                images = ((images * 0.3761 + 0.3053) * 255).round().to(torch.uint8)
            (outputs,) = session.run(None, {"images": images.numpy()})
            right, total = right + int((torch.from_numpy(outputs).argmax(1) == targets).sum()), total + len(targets)
        assert right / total == pytest.approx(record["metrics"]["onnx_int8"]["accuracy"])


@pytest.mark.extended
@with_packages
def test_files_of_a_segmenter_are_evaluated_as_its_task_does(
    train: Any, json_of: Any, own_module: Callable[..., Path], workdir: Path
) -> None:
    own_module("drawn_nets", MODEL)
    draw(workdir / "shapes", void=True)
    words = ("model=small_cnn", "~model.width", "~model.dropout", "model._target_=drawn_nets.Tiny", "epochs=1")
    directory = train("experiment=segmentation", "data.root=shapes", "data.image_size=24", *words).directory
    metrics = json_of(*CALL, f"ckpt_path={directory}", "format=onnx,torch_export", "quantize=int8")["metrics"]
    evaluated = json_of("eval", "threads=1", f"ckpt_path={directory}", "split=val")["metrics"]
    assert metrics["model"] == pytest.approx(evaluated, abs=1e-4)
    assert metrics["onnx"] == metrics["torch_export"] == pytest.approx(evaluated, abs=1e-3)
    assert metrics["onnx_int8"]["miou"] == pytest.approx(evaluated["miou"], abs=0.05)


@pytest.mark.extended
@with_packages
@pytest.mark.parametrize("words", [(), ("include_preprocessing=true",)], ids=["normalised", "bytes"])
def test_8_bits_are_calibrated_on_the_images_of_mappings(
    train_once: Any, json_of: Any, own_module: Callable[..., Path], words: tuple[str, ...]
) -> None:
    own_module("named", NAMED)
    path = f"ckpt_path={train_once(*MAPPINGS).directory}"
    evaluated = json_of("eval", "threads=1", path, "split=val")["metrics"]
    assert evaluated["right"] > 0.7
    metrics = json_of(*CALL, path, "format=onnx", "quantize=int8", *words)["metrics"]
    for name, tolerance in (("model", 1e-5), ("onnx", 1e-5), ("onnx_int8", 0.05)):
        assert metrics[name] == pytest.approx(evaluated, abs=tolerance)


@with_packages
def test_8_bits_that_cannot_be_written_are_a_sentence(
    rejected: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr("onnxruntime.quantization.quantize_static", refuse)
    result = rejected(*CALL, f"ckpt_path={trained}", "format=onnx", "quantize=int8")
    assert "format: onnx_int8 cannot express this model: no such operator" in result.err
    assert [path.name for path in (trained / "export").iterdir()] == ["model.onnx"]
    without_onnx = rejected(*CALL, f"ckpt_path={trained}", "quantize=int8")
    assert "quantize: needs an ONNX model" in without_onnx.err


@pytest.mark.extended
def test_a_model_that_was_trained_in_other_ways_is_exported_in_float32(train: Any, accepted: Any) -> None:
    words = ("epochs=1", "max_steps=2", "model=small_cnn", "model.width=4", "amp=bf16", "channels_last=true")
    directory = train(*words).directory
    accepted(*CALL, f"ckpt_path={directory}", "output=there")
    program = torch.export.load("there/model.pt2")
    assert {value.dtype for value in program.state_dict.values()} <= {torch.float32, torch.int64}
    assert program.module()(normalised(3)).dtype == torch.float32


def test_what_does_not_agree_ends_with_status_1_and_a_sentence(
    run: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Any, example: Any, path: Path) -> Any:
        path.write_bytes(b"")
        return lambda images: model(images) + 1e-3

    monkeypatch.setitem(export_formats.FORMATS, "torch_export", ("model.pt2", wrong))
    result = run(*CALL, f"ckpt_path={trained}")
    assert result.status == 1
    assert "torch_export differs from the model by 0.001" in result.err
    assert "Traceback" not in result.err


def test_a_model_that_cannot_be_exported_is_a_sentence(
    rejected: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("data-dependent control flow\nand more")

    monkeypatch.setattr("torch.export.export", refuse)
    result = rejected(*CALL, f"ckpt_path={trained}")
    assert "torch_export cannot express this model: data-dependent control flow" in result.err
    assert not list((trained / "export").iterdir())


@pytest.mark.parametrize("names", [("onnx",), ("onnxruntime",), NEEDED])
def test_packages_that_are_missing_are_a_sentence(
    names: tuple[str, ...], rejected: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None if asked in names else find(asked))
    result = rejected(*CALL, f"ckpt_path={trained}", "format=onnx")
    assert f"format: needs packages that are not installed: {', '.join(names)}\n" in result.err
    assert "runner[export]" in result.err


def test_torchscript_says_that_torch_deprecates_it(accepted: Any, trained: Path) -> None:
    assert "torch deprecates TorchScript" in accepted(*CALL, f"ckpt_path={trained}", "format=torchscript").out


def test_averaged_weights_are_exported_where_the_best_evaluation_is_theirs(train: Any, json_of: Any) -> None:
    last = train(*SMALL, "ema=0.9").directory / "checkpoints" / "last.safetensors"
    contents = read(last)
    for which, kind, expected in (
        ("averaged", "ema", contents["averaged"]["weights"]), ("raw", "raw", contents["model"])
    ):  # fmt: skip
        words = ("format=safetensors", f"weights={which}", f"output={which}")
        assert json_of(*CALL, f"ckpt_path={last}", *words)["weights"] == kind
        found = load_file(Path(which) / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_cannot_be_exported_together_is_told(problems: Any) -> None:
    assert set(problems("format=[]", "batch_sizes=[]", verb="export")) == {"format", "batch_sizes"}
    assert problems("format=onx", verb="export")["format"].nearest == "onnx"


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", ["torch_export", "safetensors", "torchscript", pytest.param("onnx", marks=needs("export"))]
)
def test_a_file_that_the_disk_refuses_is_a_sentence_and_leaves_nothing(name: str, rejected: Any, trained: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        result = rejected(*CALL, f"ckpt_path={trained}", f"format={name}", "output=here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write here/model." in result.err
    assert "largest file size" in result.err
    assert list(Path("here").iterdir()) == []
